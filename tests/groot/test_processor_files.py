"""The processor's files: where they are, keys left out, and what is refused at load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError, RequestError
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.presets.builders import tiny_gr00t
from phyai.models.gr00t.presets.robots import DROID, GR1, LIBERO
from phyai.models.gr00t.processing.processor import GrootRow, Processor
from tests.groot.tiny_observations import observation_of

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_gr00t(tmp_path_factory.mktemp("presets"))


@pytest.fixture(scope="module")
def config(args: dict[str, Any]) -> GrootConfig:
    return GrootConfig.from_folder(args["checkpoint_dir"], args["backbone_dir"])


@pytest.fixture(scope="module")
def processor(args: dict[str, Any], config: GrootConfig) -> Processor:
    return Processor.from_checkpoint(args["checkpoint_dir"], config)


@pytest.fixture
def folder(args: dict[str, Any], tmp_path: Path) -> Path:
    """A copy of the checkpoint without its weights, to be damaged."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(
        args["checkpoint_dir"], copy, ignore=shutil.ignore_patterns("*.safetensors", "checksums*")
    )
    return copy


def _edit(folder: Path, name: str, edit: Edit) -> None:
    path = folder / name
    data = json.loads(path.read_text("utf-8"))
    edit(data)
    path.write_text(json.dumps(data), "utf-8")


def _kwargs(folder: Path, **changes: Any) -> None:
    """Change keys of processor_kwargs; ``...`` removes one."""

    def edit(data: dict[str, Any]) -> None:
        for name, value in changes.items():
            if value is ...:
                data["processor_kwargs"].pop(name, None)
            else:
                data["processor_kwargs"][name] = value

    _edit(folder, "processor_config.json", edit)


def _tag(folder: Path, tag: str, edit: Edit) -> None:
    _edit(
        folder,
        "processor_config.json",
        lambda data: edit(data["processor_kwargs"]["modality_configs"][tag]),
    )


def _load(folder: Path, config: GrootConfig, **more: Any) -> Processor:
    return Processor.from_checkpoint(folder, config, **more)


def _same(a: GrootRow, b: GrootRow) -> bool:
    return (
        np.array_equal(a.state, b.state)
        and np.array_equal(a.input_ids, b.input_ids)
        and torch.equal(a.pixel_values, b.pixel_values)
    )


def test_processor_folder(
    folder: Path, config: GrootConfig, processor: Processor, args: dict[str, Any]
) -> None:
    sub = folder / "processor"
    sub.mkdir()
    for name in ("processor_config.json", "statistics.json", "embodiment_id.json"):
        (folder / name).rename(sub / name)
    moved = _load(folder, config)
    assert moved.warnings == ()
    observation = observation_of(args)
    assert _same(moved.row(observation), processor.row(observation))
    elsewhere = _load(folder.parent, config, processor_dir=sub, backbone_dir=folder / "backbone")
    assert _same(elsewhere.row(observation), processor.row(observation))


def test_the_root_wins_over_the_processor_folder(folder: Path, config: GrootConfig) -> None:
    shutil.copytree(folder, folder / "processor")
    _kwargs(folder / "processor", use_percentiles=False)
    settings = _load(folder, config).settings
    assert settings is not None
    assert settings.use_percentiles


def test_absent_keys_have_the_official_defaults(folder: Path, config: GrootConfig) -> None:
    names = (
        "use_percentiles", "clip_outliers", "shortest_image_edge", "crop_fraction",
        "formalize_language", "letter_box_transform", "apply_sincos_state_encoding",
        "use_relative_action", "exclude_state", "max_state_dim", "max_action_horizon",
    )  # fmt: skip
    _kwargs(folder, **dict.fromkeys(names, ...))
    settings = _load(folder, config).settings
    assert settings is not None
    assert (settings.use_percentiles, settings.clip_outliers) == (False, True)
    assert (settings.formalize_language, settings.exclude_state) == (True, False)
    assert (settings.use_relative_action, settings.apply_sincos_state_encoding) == (False, False)
    recipe = settings.recipe
    assert (recipe.short_side, recipe.crop_fraction, recipe.letterbox) == (256, 0.95, False)


def test_overrides(folder: Path, config: GrootConfig, args: dict[str, Any]) -> None:
    plain = _load(folder, config, formalize_language=False, letter_box_transform=True)
    row = plain.row(observation_of(args))
    assert row.instruction == "Pick up the red cube."
    assert row.images[0].shape == (64, 64, 3)


def test_excluded_states_are_zeros(folder: Path, config: GrootConfig, args: dict[str, Any]) -> None:
    _kwargs(folder, exclude_state=True)
    row = _load(folder, config).row(observation_of(args))
    assert not row.state.any()
    assert row.raw_state["z"][0, 0] != 0


@pytest.mark.parametrize("clip", [True, False])
def test_outliers(folder: Path, config: GrootConfig, args: dict[str, Any], clip: bool) -> None:
    _kwargs(folder, clip_outliers=clip)
    row = _load(folder, config).row(observation_of(args, state=np.full(8, 50.0)))
    assert (row.state.max() == 1.0) == clip


def test_a_checkpoint_without_processor_files_serves_model_requests_only(
    folder: Path, config: GrootConfig, args: dict[str, Any]
) -> None:
    (folder / "processor_config.json").unlink()
    bare = _load(folder, config, embodiment=LIBERO)
    assert "only model requests" in bare.warnings[0]
    assert bare.tags() == ()
    with pytest.raises(RequestError, match=r"processor_config\.json"):
        bare.row(observation_of(args))
    with pytest.raises(CheckpointNotFound, match="processor_dir must hold"):
        _load(folder, config, processor_dir=folder)


@pytest.mark.parametrize(
    ("file", "edit", "match"),
    [
        ("processor_config.json", lambda d: d.update(processor_class="Gr00tN1d6Processor"), "N1.7"),
        ("processor_config.json", lambda d: d.pop("processor_kwargs"), "processor_kwargs"),
        (
            "processor_config.json",
            lambda d: d["processor_kwargs"].update(modality_configs={}),
            "at least one embodiment",
        ),
        (
            "processor_config.json",
            lambda d: d["processor_kwargs"].update(use_percentiles="yes"),
            "use_percentiles",
        ),
        (
            "processor_config.json",
            lambda d: d["processor_kwargs"].update(max_state_dim=132),
            "must equal the model's 64; got 132",
        ),
        (
            "processor_config.json",
            lambda d: d["processor_kwargs"].update(max_action_dim=0),
            "max_action_dim",
        ),
        (
            "statistics.json",
            lambda d: d[LIBERO]["state"]["x"].update(q01=[float("nan")]),
            "libero_sim/state/x/q01",
        ),
        ("embodiment_id.json", lambda d: d.update({LIBERO: "2"}), "embodiment_id.json"),
        ("backbone/preprocessor_config.json", lambda d: d.update(patch_size=14), "one backbone"),
    ],
)
def test_broken_files_are_refused_at_load(
    folder: Path, config: GrootConfig, file: str, edit: Edit, match: str
) -> None:
    _edit(folder, file, edit)
    with pytest.raises(CheckpointError, match=match):
        _load(folder, config)


def test_absent_statistics_are_refused_at_load(folder: Path, config: GrootConfig) -> None:
    (folder / "statistics.json").unlink()
    with pytest.raises(CheckpointNotFound, match=r"statistics\.json"):
        _load(folder, config)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda m: m["action"].update(delta_indices=list(range(50))), "model's 16 action steps"),
        (lambda m: m["state"].update(delta_indices=[-1, 0]), "state_history_length = 1"),
        (lambda m: m["state"]["modality_keys"].append("foot"), "state/foot/min"),
    ],
)
def test_an_embodiment_that_cannot_run_leaves_the_others(
    folder: Path, config: GrootConfig, args: dict[str, Any], edit: Edit, match: str
) -> None:
    _tag(folder, GR1, edit)
    loaded = _load(folder, config, embodiment=LIBERO)
    assert loaded.tags() == (LIBERO, DROID)
    assert any(GR1 in warning and match in warning for warning in loaded.warnings)
    with pytest.raises(RequestError, match=match):
        loaded.row(observation_of(args, GR1))
    assert loaded.row(observation_of(args)).embodiment == LIBERO
    with pytest.raises(ConfigError, match=match):
        _load(folder, config, embodiment=GR1)


def test_a_checkpoint_whose_only_embodiment_cannot_run_is_refused(
    folder: Path, config: GrootConfig
) -> None:
    def only(data: dict[str, Any]) -> None:
        configs = data["processor_kwargs"]["modality_configs"]
        data["processor_kwargs"]["modality_configs"] = {GR1: configs[GR1]}

    _edit(folder, "processor_config.json", only)
    assert _load(folder, config).robot().modalities.tag == GR1  # one tag needs no name
    _tag(folder, GR1, lambda m: m["action"].update(delta_indices=list(range(50))))
    with pytest.raises(CheckpointError, match="16 action steps; got 50"):
        _load(folder, config)


def test_projectors_beyond_the_model_are_refused(folder: Path, config: GrootConfig) -> None:
    _edit(folder, "embodiment_id.json", lambda d: d.update({GR1: 32}))
    assert any("[0, 32); got 32" in w for w in _load(folder, config).warnings)


def test_unknown_embodiment_argument(folder: Path, config: GrootConfig) -> None:
    with pytest.raises(ConfigError, match=f"{LIBERO}, {DROID}, {GR1}"):
        _load(folder, config, embodiment="agibot")


def test_expects(folder: Path, config: GrootConfig) -> None:
    expects = _load(folder, config, embodiment="LIBERO_PANDA").expects()
    assert expects["cameras"] == ("image", "wrist_image")
    assert (expects["state_dim"], expects["embodiment"]) == (8, LIBERO)
    assert expects["embodiments"][DROID]["frames"] == (-15, 0)
    assert expects["embodiments"][GR1]["horizon"] == 8
    several = _load(folder, config).expects()
    assert (several["cameras"], several["state_dim"], several["embodiment"]) == ((), None, None)
