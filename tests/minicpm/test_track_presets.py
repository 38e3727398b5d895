"""The embedded presets: their files, and a run from the command line to waypoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from phyai.cli.app import main
from phyai.models.minicpm_robot_track import MiniCPMRobotTrackArgs, MiniCPMRobotTrackConfig
from phyai.models.minicpm_robot_track.presets import builders
from phyai.models.minicpm_robot_track.presets.sample_scene import sample_frames
from phyai.models.minicpm_robot_track.presets.tiny_checkpoint import tiny_weights
from tests.native_cache import share_native


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("presets")


@pytest.fixture(scope="module")
def args(cache_dir: Path) -> dict[str, Any]:
    return builders.tiny_minicpm_robot_track(cache_dir)


def test_tiny_folder_has_the_released_layout(args: dict[str, Any], cache_dir: Path) -> None:
    folder = Path(args["checkpoint_dir"])
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    tower = {"config.json", "preprocessor_config.json", "model.safetensors"}
    assert found - {"checksums.json"} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        *(f"{name}/{file}" for name in ("dinov3", "siglip") for file in tower),
    }
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(tiny_weights())
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < 10 * 2**20
    assert builders.tiny_minicpm_robot_track(cache_dir) == args


def test_full_random_stands_for_the_released_sizes(cache_dir: Path) -> None:
    args = MiniCPMRobotTrackArgs(**builders.full_random_minicpm_robot_track(cache_dir))
    assert args.towers_random
    assert (Path(str(args.tokenizer)) / "tokenizer.json").is_file()
    config = MiniCPMRobotTrackConfig.released()
    assert (config.window_tokens, config.backbone.num_hidden_layers) == (221, 24)


def test_frames_move() -> None:
    first, second = sample_frames(2)
    assert (first != second).any()
    assert np.array_equal(first, sample_frames(1)[0])


def test_run_prints_waypoints(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    share_native(cache_dir)
    monkeypatch.setenv("PHYAI_CACHE", str(cache_dir))
    assert main(["run", "--plugin", "minicpm_robot_track", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    actions = np.asarray(data["actions"])
    assert actions.shape == (8, 3)
    assert np.isfinite(actions).all()
    assert data["names"] == ["x", "y", "yaw"]
