"""The towers' config files: their defaults, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError
from phyai.layers import VisionConfig
from phyai.models.minicpm_robot_track.vision import DinoConfig, TowerSizes, write_tiny_towers

DINO, SIGLIP = 0, 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_towers(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def copies(tiny: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Return copies of both folders to spoil."""
    for folder in tiny:
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / tiny[0].name, tmp_path / tiny[1].name


def test_sizes_are_those_of_the_files(tiny: tuple[Path, Path]) -> None:
    sizes = TowerSizes.from_folders(*tiny)
    assert sizes.dino == DinoConfig(32, 2, 2, 64, num_register_tokens=4)
    assert sizes.siglip == VisionConfig(48, 2, 3, 80, 14, 112)


def test_absent_keys_have_the_defaults_of_the_format(tmp_path: Path) -> None:
    kinds = {"dinov3_vit": DinoConfig(), "siglip": VisionConfig(768, 12, 12, 3072, 16, 224)}
    for kind in kinds:
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    sizes = TowerSizes.from_folders(tmp_path / "dinov3_vit", tmp_path / "siglip")
    assert (sizes.dino, sizes.siglip) == tuple(kinds.values())
    dino = AutoConfig.for_model("dinov3_vit")
    vision = AutoConfig.for_model("siglip_vision_model")
    for ours, official in ((sizes.dino, dino), (sizes.siglip, vision)):
        for name in ours.__dataclass_fields__:
            assert getattr(ours, name) == getattr(official, name), name


REFUSED: dict[str, tuple[int, dict[str, Any], type[Exception], str]] = {
    "another DINO": (DINO, {"model_type": "dinov2"}, CheckpointError, "must be 'dinov3_vit'"),
    "heads": (DINO, {"num_attention_heads": 3}, ConfigError, "hidden_size must be"),
    "odd heads": (DINO, {"num_attention_heads": 16}, ConfigError, "a multiple of 4"),
    "activation": (DINO, {"hidden_act": "relu"}, ConfigError, "hidden_act must be one of"),
    "string": (DINO, {"hidden_size": "32"}, CheckpointError, "hidden_size in .* an integer"),
    "negative": (DINO, {"num_register_tokens": -1}, CheckpointError, "num_register_tokens"),
    "huge": (DINO, {"intermediate_size": 10**9}, CheckpointError, "intermediate_size"),
    "flag": (DINO, {"key_bias": 1}, CheckpointError, "key_bias in .* must be true or false"),
    "theta": (DINO, {"rope_theta": 0}, CheckpointError, "rope_theta in .* a positive number"),
    "oblong": (DINO, {"patch_size": [16, 8]}, CheckpointError, "patch_size in"),
    "another SigLIP": (SIGLIP, {"model_type": "clip"}, CheckpointError, "must be 'siglip' or"),
    "no object": (SIGLIP, {"vision_config": [1]}, CheckpointError, "vision_config in"),
    "erf": (
        SIGLIP,
        {"vision_config": {"hidden_act": "gelu"}},
        CheckpointError,
        "hidden_act in .* must be 'gelu_pytorch_tanh'",
    ),
    "SigLIP heads": (
        SIGLIP,
        {"vision_config": {"num_attention_heads": 7}},
        ConfigError,
        "num_attention_heads",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_cannot_run_is_refused(case: str, copies: tuple[Path, Path]) -> None:
    tower, changes, error, message = REFUSED[case]
    path = copies[tower] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(error, match=message):
        TowerSizes.from_folders(*copies)


def test_square_sizes_may_be_lists(copies: tuple[Path, Path]) -> None:
    path = copies[0] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "patch_size": [16, 16]}))
    assert TowerSizes.from_folders(*copies).dino.patch_size == 16


def test_absent_folders_are_named(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="siglip_dir"):
        TowerSizes.from_folders(tiny[0], tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        TowerSizes.from_folders(tmp_path, tiny[1])
    with pytest.raises(CheckpointError, match="dino_dir must be a folder"):
        TowerSizes.from_folders(tiny[0] / "model.safetensors", tiny[1])
