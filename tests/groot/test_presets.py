"""The embedded presets: their files, and that every input of the tiny model matters."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from phyai import DeviceConfig, Engine, EngineArgs, EngineConfig
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.main_gr00t import GrootArgs
from phyai.models.gr00t.presets import builders
from phyai.models.gr00t.presets.robots import DROID, GR1, LIBERO, TAGS
from phyai.models.gr00t.presets.sample_scene import sample_frames
from phyai.models.gr00t.presets.tiny_weights import tiny_weights
from phyai.models.gr00t.processing.processor import Processor
from phyai.types import Observation
from tests.conftest import GOLDEN

CPU_FP32 = EngineConfig(device=DeviceConfig(target="cpu", params_dtype=torch.float32))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("presets")


@pytest.fixture(scope="module")
def args(cache_dir: Path) -> dict[str, Any]:
    return builders.tiny_gr00t(cache_dir)


@pytest.fixture(scope="module")
def engine(args: dict[str, Any]) -> Iterator[Engine]:
    with Engine(EngineArgs("gr00t_n17", GrootArgs(**args), CPU_FP32)) as made:
        yield made


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


# ---------------------------------------------------------------- files


def test_tiny_folder_has_the_released_layout(args: dict[str, Any]) -> None:
    folder = Path(args["checkpoint_dir"])
    assert set(_digests(folder)) - {"checksums.json"} == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "processor_config.json",
        "statistics.json",
        "embodiment_id.json",
        "backbone/config.json",
        "backbone/tokenizer.json",
        "backbone/tokenizer_config.json",
        "backbone/chat_template.jinja",
        "backbone/preprocessor_config.json",
    }
    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
    assert set(index["weight_map"]) == set(tiny_weights())
    assert len(set(index["weight_map"].values())) == 2
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 10 * 2**20


def test_tensor_names_are_the_official_ones() -> None:
    with safe_open(GOLDEN / "groot" / "model.safetensors", "np") as file:
        official = set(file.keys())
    numbers = re.compile(r"\.\d+\.")
    assert {numbers.sub(".#.", n) for n in tiny_weights()} == {
        numbers.sub(".#.", n) for n in official
    }


def test_builds_are_byte_identical_and_made_once(
    args: dict[str, Any], cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = builders.tiny_gr00t(tmp_path)
    assert Path(again["checkpoint_dir"]).name == Path(args["checkpoint_dir"]).name
    assert _digests(Path(again["checkpoint_dir"])) == _digests(Path(args["checkpoint_dir"]))

    def must_not_run(folder: Path) -> None:
        raise AssertionError("built a checkpoint that was there")

    monkeypatch.setattr(builders, "write_tiny_checkpoint", must_not_run)
    assert builders.tiny_gr00t(cache_dir) == args


def test_the_backbone_folder_inside_a_checkpoint_is_found(args: dict[str, Any]) -> None:
    folder = Path(args["checkpoint_dir"])
    alone = GrootConfig.from_folder(folder)
    assert alone == GrootConfig.from_folder(folder, Path(args["backbone_dir"]))
    assert alone.backbone != GrootConfig.released().backbone


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    builders.tiny_gr00t(tmp_path, lambda *step: told.append(step))
    assert [step[:2] for step in told] == [(0, 1), (1, 1)]


def test_released_inputs(cache_dir: Path) -> None:
    args = builders.full_random_gr00t(cache_dir)
    GrootArgs(**args)
    config = GrootConfig.released()
    processor = Processor.from_checkpoint(
        None, config, processor_dir=args["processor_dir"], backbone_dir=args["backbone_dir"]
    )
    assert processor.warnings == ()
    row = processor.row(builders.sample_observation(args))
    assert row.grids == ((1, 16, 22),) * 2  # 240 x 320 -> 256 x 340 -> 256 x 352
    assert row.pixel_values.shape == (2 * 352, 1536)
    assert int((row.input_ids == config.image_token_id).sum()) == 2 * 88
    assert (row.input_ids[0], row.input_ids[-2]) == (151644, 151645)
    assert row.state.shape == (1, 132)


# ---------------------------------------------------------------- samples and actions


@pytest.mark.parametrize(("tag", "steps"), [(LIBERO, 1), (DROID, 2), (GR1, 1)])
def test_sample_observations(args: dict[str, Any], tag: str, steps: int) -> None:
    sample = builders.sample_observation({**args, "embodiment": tag})
    for image in sample.images.values():
        assert image.dtype == np.uint8
        assert image.shape == ((2,) if steps == 2 else ()) + (240, 320, 3)
        assert len(np.unique(image)) > 50  # a picture, not a flat colour
    views = [image.tobytes() for image in sample.images.values()]
    assert len(set(views)) == len(views)


def test_samples_without_an_embodiment_take_the_first(args: dict[str, Any]) -> None:
    bare = {name: value for name, value in args.items() if name != "embodiment"}
    assert builders.sample_observation(bare).options["embodiment"] == sorted(TAGS)[0]


def test_frames_move() -> None:
    first, second = sample_frames("front", 2)
    assert (first != second).any()
    assert np.array_equal(first, sample_frames("front", 1)[0])


@pytest.mark.parametrize(("tag", "shape"), [(LIBERO, (16, 7)), (DROID, (16, 17)), (GR1, (8, 29))])
def test_every_robot_acts(
    engine: Engine, args: dict[str, Any], tag: str, shape: tuple[int, int]
) -> None:
    sample = builders.sample_observation({**args, "embodiment": tag})
    chunk = engine.step(sample)
    assert chunk.actions.shape == shape
    assert np.isfinite(chunk.actions).all()
    assert np.array_equal(chunk.actions, engine.step(sample).actions)


def _changed(sample: Observation, what: str) -> Observation:
    if what == "image":
        return replace(sample, images={k: 255 - v for k, v in sample.images.items()})
    if what == "state":
        return replace(sample, state=sample.state + np.float32(0.1))
    if what == "prompt":
        return replace(sample, prompt="open the drawer")
    return replace(sample, options={**sample.options, "seed": 1})


@pytest.mark.parametrize("what", ["image", "state", "prompt", "seed"])
def test_every_input_matters(engine: Engine, args: dict[str, Any], what: str) -> None:
    sample = builders.sample_observation(args)
    before, after = (engine.step(o).model_actions for o in (sample, _changed(sample, what)))
    assert np.abs(before - after).max() > 0.01
