"""The embedded presets: their files, and that every input of the tiny model matters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from phyai import DeviceConfig, Engine, EngineArgs, EngineConfig
from phyai.models.minicpm_robot import MiniCPMRobotArgs
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.presets import builders
from phyai.models.minicpm_robot.presets.sample_scene import sample_frame
from phyai.models.minicpm_robot.presets.tiny_weights import tiny_weights
from phyai.models.minicpm_robot.processing.contracts import CONTRACTS
from phyai.models.minicpm_robot.processing.processor import Processor
from phyai.types import ActionChunk, Observation
from tests.conftest import GOLDEN

CPU_FP32 = EngineConfig(device=DeviceConfig(target="cpu", params_dtype=torch.float32))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("presets")


@pytest.fixture(scope="module")
def args(cache_dir: Path) -> dict[str, Any]:
    return builders.tiny_minicpm_robot(cache_dir)


@pytest.fixture(scope="module")
def engine(args: dict[str, Any]) -> Iterator[Engine]:
    made = MiniCPMRobotArgs(**args, max_batch_size=4)
    with Engine(EngineArgs("minicpm_robot", made, CPU_FP32)) as started:
        yield started


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


# ---------------------------------------------------------------- files


def test_tiny_folder_has_the_released_layout(args: dict[str, Any]) -> None:
    folder = Path(args["checkpoint_dir"])
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "preprocessor_config.json",
        "checksums.json",
    }
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4_000_000


def test_tensor_names_are_those_of_the_golden_checkpoint(args: dict[str, Any]) -> None:
    """Both have 8 text, 4 vision and 4 head layers."""
    names = []
    for folder in (Path(args["checkpoint_dir"]), GOLDEN / "minicpm"):
        with safe_open(folder / "model.safetensors", "pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1]


def test_the_language_model_is_bfloat16_and_the_head_float32() -> None:
    for name, tensor in tiny_weights().items():
        want = torch.float32 if name.startswith("action_head.") else torch.bfloat16
        assert tensor.dtype == want, name
        assert bool(torch.isfinite(tensor).all())


def test_tiny_is_built_once_and_equal_everywhere(
    args: dict[str, Any], cache_dir: Path, tmp_path: Path
) -> None:
    folder = Path(args["checkpoint_dir"])
    when = folder.stat().st_mtime_ns
    assert builders.tiny_minicpm_robot(cache_dir) == args
    assert folder.stat().st_mtime_ns == when
    other = Path(builders.tiny_minicpm_robot(tmp_path)["checkpoint_dir"])
    assert other.name == folder.name
    assert digests(other) == digests(folder)


def test_a_damaged_folder_is_built_anew(tmp_path: Path) -> None:
    folder = Path(builders.tiny_minicpm_robot(tmp_path)["checkpoint_dir"])
    want = digests(folder)
    (folder / "config.json").write_text("{}", "utf-8")
    builders.tiny_minicpm_robot(tmp_path)
    assert digests(folder) == want


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    builders.tiny_minicpm_robot(tmp_path, lambda *step: told.append(step))
    assert [step[:2] for step in told] == [(0, 1), (1, 1)]


def test_full_random_has_released_sizes_and_no_weights(tmp_path: Path) -> None:
    made = builders.full_random_minicpm_robot(tmp_path)
    assert made["checkpoint_dir"] is None
    assert made["precision"] == "bf16"
    MiniCPMRobotArgs(**made)
    files = Path(made["processor_dir"])
    assert sum(file.stat().st_size for file in files.iterdir()) < 1_000_000
    processor = Processor.from_checkpoint(
        None, MiniCPMRobotConfig(), made["contract"], processor_dir=files
    )
    row = processor.row(builders.sample_observation(made))
    assert row.grids == ((32, 32), (32, 32))
    assert int(row.input_ids.max()) < 248094


def test_sample_frames_differ_by_camera_and_are_equal_on_every_call() -> None:
    names = ("head", "left_wrist", "right_wrist")
    frames = [sample_frame(name) for name in names]
    for name, frame in zip(names, frames, strict=True):
        assert frame.shape == (240, 320, 3)
        assert frame.dtype == np.uint8
        assert len(np.unique(frame.reshape(-1, 3), axis=0)) > 20
        assert np.array_equal(frame, sample_frame(name))
    assert not np.array_equal(frames[0], frames[1])
    assert not np.array_equal(frames[1], frames[2])


@pytest.mark.parametrize("contract", CONTRACTS)
def test_sample_observations_fit_their_contract(args: dict[str, Any], contract: str) -> None:
    given = {**args, "contract": contract}
    folder = Path(args["checkpoint_dir"])
    processor = Processor.from_checkpoint(folder, MiniCPMRobotConfig.from_folder(folder), contract)
    row = processor.row(builders.sample_observation(given))
    assert row.grids == ((8, 8),) * len(row.grids)
    assert row.info["contract"] == contract


def test_tiny_config_says_what_the_files_say(args: dict[str, Any]) -> None:
    folder = Path(args["checkpoint_dir"])
    config = MiniCPMRobotConfig.from_folder(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
    assert config.image_size == settings["scale_resolution"] == 112
    assert config.image_tokens(8, 8) == 4
    assert (config.head.action_dim, config.head.max_num_embodiments) == (80, 8)


# ---------------------------------------------------------------- the tiny model


def one(engine: Engine, observation: Observation) -> ActionChunk:
    [chunk] = engine.step([observation])
    return chunk


def test_the_sample_runs(engine: Engine, args: dict[str, Any]) -> None:
    chunk = one(engine, builders.sample_observation(args))
    assert chunk.actions.shape == (10, 7)
    assert chunk.names == ("x", "y", "z", "rx", "ry", "rz", "gripper")
    assert chunk.model_actions.shape == (10, 80)
    assert np.isfinite(chunk.actions).all()
    assert chunk.control_hz == 20.0
    # random weights, yet of a size a trained model's could be
    assert 0.05 < chunk.model_actions.std() < 20


def test_every_input_matters(engine: Engine, args: dict[str, Any]) -> None:
    fine = builders.sample_observation(args)
    want = one(engine, fine).model_actions
    np.testing.assert_array_equal(one(engine, fine).model_actions, want)
    wrist = fine.images["wrist"]
    changed = (
        replace(fine, images={**fine.images, "wrist": wrist[::-1]}),
        replace(fine, images={"agentview": wrist, "wrist": fine.images["agentview"]}),
        replace(fine, prompt="open the drawer"),
        replace(fine, state=np.asarray(fine.state) + np.float32(0.1)),
        replace(fine, options={"seed": 1}),
        replace(fine, options={"seed": 0, "embodiment_id": 1}),
        replace(fine, options={"seed": 0, "num_steps": 3}),
    )
    for observation in changed:
        off = abs(one(engine, observation).model_actions - want).max()
        assert off > 1e-3
