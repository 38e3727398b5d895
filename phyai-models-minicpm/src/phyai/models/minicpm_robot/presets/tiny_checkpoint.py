"""Writes the presets' folders, in the layout of the released checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.presets.tiny_tokenizer import (
    CONTROL,
    IMAGE,
    write_tiny_tokenizer,
)
from phyai.models.minicpm_robot.presets.tiny_weights import CONFIG, IMAGE_SIZE, tiny_weights


def write_tiny_checkpoint(folder: Path) -> None:
    """Fill ``folder`` with a whole checkpoint; equal bytes every time."""
    _write_json(folder / "config.json", CONFIG)
    save_file(tiny_weights(), folder / "model.safetensors", {"format": "pt"})
    write_tiny_tokenizer(folder)
    _write_image_settings(folder, IMAGE_SIZE)


def write_released_inputs(folder: Path) -> None:
    """Fill ``folder`` with tokenizer, template and image settings that fit the released sizes."""
    config = MiniCPMRobotConfig()
    write_tiny_tokenizer(folder, config.image_token_id - CONTROL[IMAGE])
    _write_image_settings(folder, config.image_size)


def _write_image_settings(folder: Path, resolution: int) -> None:
    settings = {
        "image_processor_type": "MiniCPMV4_6ImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": 14,
        "scale_resolution": resolution,
        "max_slice_nums": 9,
        "slice_mode": True,
        "downsample_mode": "16x",
        "use_image_id": True,
    }
    _write_json(folder / "preprocessor_config.json", settings)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
