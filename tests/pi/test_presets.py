"""The embedded presets: how they are built and kept, and that the tiny models behave."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from phyai import Engine
from phyai.built_folder import is_whole
from phyai.errors import ConfigError
from phyai.models.pi.config import PiConfig
from phyai.models.pi.presets import builders as presets
from phyai.models.pi.presets.sample_scene import sample_view
from phyai.models.pi.presets.tiny_weights import tiny_weights
from phyai.models.pi.processing.tokenizer import PromptTokenizer
from phyai.types import Observation
from tests.pi.preset_engines import MODELS, chunk, open_engine, tiny_args

EXTRA_FILES = {
    "pi05": "policy_preprocessor_step_3_normalizer_processor.safetensors",
    "pi0": "policy_preprocessor_step_6_normalizer_processor.safetensors",
}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("presets")


@pytest.fixture(scope="module", params=MODELS)
def tiny(request: pytest.FixtureRequest, cache_dir: Path) -> Iterator[tuple[str, Engine]]:
    with open_engine(request.param, **tiny_args(request.param, cache_dir)) as engine:
        yield request.param, engine


def _sample(engine: Engine) -> Observation:
    return presets.sample_observation(vars(engine.args.plugin_args))


def _digests(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
    }


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("model", MODELS)
def test_tiny_folder_has_the_released_layout(model: str, cache_dir: Path) -> None:
    folder = Path(tiny_args(model, cache_dir)["checkpoint_dir"])
    names = {file.name for file in folder.iterdir()}
    assert names == {
        "arch.json",
        "checksums.json",
        "config.json",
        "model.safetensors",
        "policy_postprocessor.json",
        "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
        "policy_preprocessor.json",
        EXTRA_FILES[model],
        "tokenizer.json",
    }
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10 * 2**20
    tensors = load_file(folder / "model.safetensors")
    assert all(name.startswith("model.") for name in tensors)
    assert "model.paligemma_with_expert.paligemma.lm_head.weight" in tensors
    assert "model.paligemma_with_expert.gemma_expert.lm_head.weight" in tensors
    assert not any("embed_tokens" in name for name in tensors)
    config = PiConfig.from_folder(folder, model)  # type: ignore[arg-type]
    assert (config.state_dim, config.action_dim, config.chunk_size) == (8, 7, 50)
    assert config.num_cameras == 2


@pytest.mark.parametrize(("model", "count"), [("pi0", 777), ("pi05", 812)])
def test_tiny_tensor_names_are_those_of_the_released_files(model: str, count: int) -> None:
    """Layers repeated to the released depth give the released number of tensors."""
    names = tiny_weights(model)  # type: ignore[arg-type]
    released = 0
    for name in names:
        depth = 27 if ".encoder.layers.0." in name else 18 if ".layers.0." in name else None
        if depth is not None:
            released += depth
        elif ".layers." not in name:
            released += 1
    assert released == count


def test_second_build_is_not_a_build(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tiny_args("pi05", cache_dir)
    monkeypatch.setattr(presets, "write_tiny_checkpoint", _must_not_run)
    assert tiny_args("pi05", cache_dir) == first


def _must_not_run(*args: Any) -> None:
    raise AssertionError("built a checkpoint that was there")


def test_two_builds_are_byte_identical(cache_dir: Path, tmp_path: Path) -> None:
    one = Path(tiny_args("pi0", cache_dir)["checkpoint_dir"])
    two = Path(tiny_args("pi0", tmp_path)["checkpoint_dir"])
    assert one.name == two.name
    assert _digests(one) == _digests(two)


@pytest.mark.parametrize("damage", ["truncated", "changed", "removed", "added", "no checksums"])
def test_damaged_folder_is_built_anew(damage: str, tmp_path: Path) -> None:
    folder = Path(tiny_args("pi05", tmp_path)["checkpoint_dir"])
    before = _digests(folder)
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "changed":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(bytes(data))
    elif damage == "removed":
        (folder / "config.json").unlink()
    elif damage == "added":
        (folder / "adapter_config.json").write_text("{}")
    else:
        (folder / "checksums.json").unlink()
    assert not is_whole(folder)
    assert Path(tiny_args("pi05", tmp_path)["checkpoint_dir"]) == folder
    assert _digests(folder) == before
    leftovers = [p.name for p in tmp_path.iterdir() if p.is_dir() and p != folder]
    assert leftovers == []


def test_progress_is_called_for_a_build_only(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    for _ in range(2):
        presets.tiny_pi0(tmp_path, lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(0, 1), (1, 1)]


def test_full_random_arguments(tmp_path: Path) -> None:
    for build in (presets.full_random_pi05, presets.full_random_pi0):
        args = build(tmp_path, None)
        assert args["checkpoint_dir"] is None
        assert args["precision"] == "bf16_openpi"
        ids = PromptTokenizer.from_path(args["tokenizer"]).ids(("pick up the cup\n",))
        assert ids[0] == 2
        sample = presets.sample_observation(args)
        assert list(sample.images) == ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]
        assert sample.state.shape == (32,)


def test_tiny_tokenizer_follows_the_rules_of_the_real_one(cache_dir: Path) -> None:
    folder = Path(tiny_args("pi05", cache_dir)["checkpoint_dir"])
    tokenizer = PromptTokenizer.from_path(folder)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    names = {index: piece for piece, index in vocab.items()}
    ids = tokenizer.ids(("Task: pick up the cup, State: 128 0;\nAction: ",))
    assert [names[i] for i in ids] == [
        *("<bos>", "Task", ":", "▁pick", "▁up", "▁the", "▁cup", ",", "▁State", ":"),
        *("▁", "1", "2", "8", "▁", "0", ";", "\n", "Action", ":", "▁"),
    ]
    padded, length = tokenizer.encode(("open\n",), 48)
    assert length == 3
    assert padded[length:].tolist() == [0] * 45
    assert names[tokenizer.ids(("é",))[1]] == "<0xC3>"
    assert max(vocab.values()) < 1024


# ---------------------------------------------------------------- the sample scene


def test_sample_images_are_pictures_and_equal_on_every_call() -> None:
    base, wrist = sample_view("base"), sample_view("wrist")
    for image in (base, wrist):
        assert image.shape == (256, 256, 3)
        assert image.dtype == np.uint8
        assert image.std() > 20
    assert np.abs(base.astype(int) - wrist.astype(int)).mean() > 20
    np.testing.assert_array_equal(base, sample_view("base"))
    assert sample_view("base", 64).shape == (64, 64, 3)
    with pytest.raises(ConfigError, match="view"):
        sample_view("side")


def test_sample_follows_the_robot_contract(cache_dir: Path) -> None:
    args = {**tiny_args("pi05", cache_dir), "robot": "droid"}
    sample = presets.sample_observation(args)
    assert sample.state.shape == (8,)
    assert len(sample.images) >= 2


# ---------------------------------------------------------------- behaviour of the tiny models


def test_tiny_loads_strictly_and_without_warnings(tiny: tuple[str, Engine]) -> None:
    _, engine = tiny
    report = engine.core.load_report
    assert report is not None
    assert not report.missing
    assert not report.unexpected
    assert report.ignored == ("paligemma_with_expert.gemma_expert.lm_head.weight",)
    assert engine.adapter.processor.warnings == ()  # type: ignore[attr-defined]


def test_tiny_actions_look_like_a_motion(tiny: tuple[str, Engine]) -> None:
    _, engine = tiny
    folder = Path(engine.args.plugin_args.checkpoint_dir)  # type: ignore[attr-defined]
    stats = load_file(folder / "policy_postprocessor_step_0_unnormalizer_processor.safetensors")
    low, high, std = (stats[f"action.{name}"] for name in ("min", "max", "std"))
    sample = _sample(engine)
    for seed in range(3):
        result = engine.step(dataclasses.replace(sample, options={"seed": seed}))
        actions = result.actions
        assert actions.shape == (50, 7)
        assert result.names == ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
        assert np.isfinite(actions).all()
        assert (actions >= low).all()
        assert (actions <= high).all()
        scaled = actions / std
        assert (np.ptp(scaled, axis=0) > 0.1).all()  # every dimension moves
        assert np.abs(np.diff(scaled, axis=0)).mean() < 0.5 * np.ptp(scaled, axis=0).mean()
        correlation = np.corrcoef(scaled.T)
        assert np.abs(correlation[~np.eye(7, dtype=bool)]).max() < 0.999  # in a way of its own


def _changes() -> dict[str, dict[str, Any]]:
    cube = sample_view("base").copy()
    cube[150:215, 95:140] = (60, 60, 200)
    moved = np.array(presets._STATE, dtype=np.float32)
    moved[0] += 0.1
    return {
        "prompt": {"prompt": "open the drawer"},
        "state": {"state": moved},
        "image": {"images": {"base_0_rgb": cube, "left_wrist_0_rgb": sample_view("wrist")}},
        "camera": {"images": {"base_0_rgb": sample_view("base")}},
        "seed": {"options": {"seed": 1}},
    }


@pytest.mark.parametrize("what", list(_changes()))
def test_tiny_reacts_to_every_input(tiny: tuple[str, Engine], what: str) -> None:
    _, engine = tiny
    sample = _sample(engine)
    changed = chunk(engine, dataclasses.replace(sample, **_changes()[what]))
    original = chunk(engine, sample)
    assert np.abs(changed - original).max() > 2e-3
    assert (np.abs(changed - original).max(axis=0) > 0).all()


def test_same_seed_gives_identical_chunks(tiny: tuple[str, Engine]) -> None:
    _, engine = tiny
    sample = _sample(engine)
    np.testing.assert_array_equal(chunk(engine, sample), chunk(engine, sample))


RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from phyai.models.pi.presets import builders as presets
from tests.pi.preset_engines import MODELS, chunk, open_engine, tiny_args
for model in MODELS:
    args = tiny_args(model, Path(sys.argv[1]))
    with open_engine(model, **args) as engine:
        print(chunk(engine, presets.sample_observation(args)).tobytes().hex())
"""


@pytest.mark.slow
def test_another_process_gives_identical_chunks(cache_dir: Path, tmp_path: Path) -> None:
    """It builds checkpoints of its own."""
    out = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    for model, line in zip(MODELS, out.stdout.split(), strict=True):
        with open_engine(model, **tiny_args(model, cache_dir)) as engine:
            here = chunk(engine, _sample(engine))
        there: NDArray[np.float32] = np.frombuffer(bytes.fromhex(line), dtype=np.float32)
        np.testing.assert_array_equal(here.ravel(), there)
