"""Writes the presets' folders, in the layout of the released checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from phyai.models.gr00t.backbone_files import RELEASED, SUBFOLDER
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.presets.robots import HORIZON, IDS, modality_configs, statistics
from phyai.models.gr00t.presets.tiny_tokenizer import (
    CONTROL,
    IMAGE,
    TINY_FIRST_CONTROL,
    write_tiny_tokenizer,
)
from phyai.models.gr00t.presets.tiny_weights import BACKBONE, CONFIG, tiny_weights

SHARDS = 2
_PIXELS: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def write_tiny_checkpoint(folder: Path) -> None:
    """Fill ``folder`` with a whole checkpoint and its backbone's files; equal bytes every time."""
    _write_json(folder / "config.json", CONFIG)
    _write_shards(folder)
    write_processor_files(
        folder,
        max_state_dim=CONFIG["max_state_dim"],
        max_action_dim=CONFIG["max_action_dim"],
        max_action_horizon=HORIZON,
        shortest_image_edge=64,
        image_crop_size=[58, 58],
        image_target_size=[64, 64],
    )
    write_backbone_files(folder / SUBFOLDER, BACKBONE, TINY_FIRST_CONTROL, 1024)


def write_released_inputs(folder: Path) -> None:
    """Fill ``folder`` with the processor and backbone files that fit the released sizes."""
    sizes = GrootConfig.released()
    write_processor_files(
        folder,
        max_state_dim=sizes.max_state_dim,
        max_action_dim=sizes.max_action_dim,
        max_action_horizon=sizes.action_horizon,
        shortest_image_edge=256,
        image_crop_size=[230, 230],
        image_target_size=[256, 256],
    )
    first = RELEASED["image_token_id"] - CONTROL[IMAGE]
    write_backbone_files(folder / SUBFOLDER, RELEASED, first, 65536)


def write_processor_files(folder: Path, **sizes: Any) -> None:
    """Write processor_config.json, statistics.json and embodiment_id.json."""
    kwargs = {
        "modality_configs": modality_configs(),
        "use_albumentations": True,
        "crop_fraction": 0.95,
        "letter_box_transform": False,
        "formalize_language": True,
        "use_percentiles": True,
        "clip_outliers": True,
        "apply_sincos_state_encoding": True,
        "use_relative_action": True,
        "exclude_state": False,
        "use_mean_std": False,
        "model_name": CONFIG["model_name"],
        "model_type": "qwen",
        **sizes,
    }
    _write_json(
        folder / "processor_config.json",
        {"processor_class": "Gr00tN1d7Processor", "processor_kwargs": kwargs},
    )
    _write_json(folder / "statistics.json", statistics())
    _write_json(folder / "embodiment_id.json", IDS)


def write_backbone_files(
    folder: Path, config: Mapping[str, Any], first_control: int, min_pixels: int
) -> None:
    """Write what a backbone's folder holds besides weights."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    write_tiny_tokenizer(folder, first_control)
    size = {"shortest_edge": min_pixels, "longest_edge": 16777216}
    _write_json(folder / "preprocessor_config.json", {**_PIXELS, "size": size})


def _write_shards(folder: Path) -> None:
    tensors = dict(sorted(tiny_weights().items()))
    names = list(tensors)
    where: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        held = names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
        where.update(dict.fromkeys(held, file))
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
