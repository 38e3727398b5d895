"""Writes the tiny preset's checkpoint folder, in the layout of fine-tuned LeRobot models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from phyai.models.pi.config import IMAGE_PREFIX, TOKENIZER_MAX_LENGTH, Model, default_normalization
from phyai.models.pi.presets.tiny_tokenizer import write_tiny_tokenizer
from phyai.models.pi.presets.tiny_weights import (
    ACTION_WIDTH,
    EXPERT,
    STATE_WIDTH,
    TEXT,
    VISION,
    tiny_weights,
)
from phyai.models.pi.processing.norm_stats import ACTION, STATE
from phyai.models.pi.processing.tokenizer import DEFAULT_TOKENIZER

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb")
ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
CHUNK = 50

# One table arm with end-effector control: position 3, axis-angle 3, two fingers; actions are
# scaled displacements and a gripper command.
_STATE_STATS = {
    "mean": (-0.05, 0.03, 0.76, 2.97, -0.22, -0.13, 0.027, -0.027),
    "std": (0.10, 0.15, 0.38, 0.34, 0.91, 0.33, 0.014, 0.014),
    "min": (-0.48, -0.31, 0.01, 0.35, -3.64, -1.84, -0.001, -0.042),
    "max": (0.21, 0.39, 1.37, 3.72, 3.56, 1.39, 0.042, 0.001),
    "q01": (-0.40, -0.27, 0.04, 1.51, -2.72, -1.08, 0.002, -0.040),
    "q10": (-0.18, -0.16, 0.20, 2.66, -1.35, -0.55, 0.005, -0.039),
    "q90": (0.06, 0.24, 1.16, 3.28, 0.92, 0.28, 0.039, -0.005),
    "q99": (0.14, 0.33, 1.27, 3.56, 2.33, 0.57, 0.040, -0.002),
}
_ACTION_STATS = {
    "mean": (0.06, 0.09, -0.09, 0.001, 0.006, -0.005, -0.04),
    "std": (0.34, 0.38, 0.45, 0.040, 0.064, 0.078, 1.00),
    "min": (-0.94, -0.94, -0.94, -0.258, -0.375, -0.368, -1.0),
    "max": (0.94, 0.94, 0.94, 0.356, 0.375, 0.375, 1.0),
    "q01": (-0.75, -0.79, -0.94, -0.107, -0.206, -0.265, -1.0),
    "q10": (-0.39, -0.37, -0.79, -0.040, -0.062, -0.091, -1.0),
    "q90": (0.56, 0.65, 0.52, 0.044, 0.072, 0.077, 1.0),
    "q99": (0.94, 0.86, 0.94, 0.134, 0.184, 0.275, 1.0),
}


def write_tiny_checkpoint(folder: Path, model: Model) -> None:
    """Fill ``folder`` with the files of a fine-tuned checkpoint; equal bytes on every call."""
    _write_json(folder / "config.json", config_json(model))
    _write_json(
        folder / "arch.json",
        {
            "vision_config": asdict(VISION),
            "text_config": asdict(TEXT),
            "expert_config": asdict(EXPERT),
        },
    )
    tensors = {f"model.{name}": tensor for name, tensor in tiny_weights(model).items()}
    save_file(dict(sorted(tensors.items())), folder / "model.safetensors", {"format": "pt"})
    write_processor_files(folder, model)
    write_tiny_tokenizer(folder)


def config_json(model: Model) -> dict[str, Any]:
    """Return the policy config; ``arch.json`` has the sizes it cannot express."""
    size = VISION.image_size
    return {
        "type": model,
        "n_obs_steps": 1,
        "input_features": _inputs(),
        "output_features": {ACTION: _feature("ACTION", len(ACTION_NAMES))},
        "device": "cpu",
        "use_amp": False,
        "use_peft": False,
        "pretrained_path": None,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
        "chunk_size": CHUNK,
        "n_action_steps": CHUNK,
        "max_state_dim": STATE_WIDTH,
        "max_action_dim": ACTION_WIDTH,
        "num_inference_steps": 10,
        "min_period": 0.004,
        "max_period": 4.0,
        "use_relative_actions": False,
        "relative_exclude_joints": ["gripper"],
        "action_feature_names": list(ACTION_NAMES),
        "rtc_config": None,
        "image_resolution": [size, size],
        "empty_cameras": 0,
        "tokenizer_max_length": TOKENIZER_MAX_LENGTH[model],
        "normalization_mapping": dict(default_normalization(model)),
        "gradient_checkpointing": False,
        "compile_model": False,
        "compile_mode": "max-autotune",
    }


def write_processor_files(folder: Path, model: Model) -> None:
    """Write policy_preprocessor.json, policy_postprocessor.json and their statistics."""
    stats: dict[str, Mapping[str, Sequence[float]]] = {STATE: _STATE_STATS, ACTION: _ACTION_STATS}
    relative = {
        "enabled": False,
        "exclude_joints": ["gripper"],
        "action_names": list(ACTION_NAMES),
    }
    tokenizer = {
        "max_length": TOKENIZER_MAX_LENGTH[model],
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": DEFAULT_TOKENIZER,
    }
    outputs = {ACTION: _feature("ACTION", len(ACTION_NAMES))}
    begin = [_step("rename_observations_processor", rename_map={}), _step("to_batch_processor")]
    norm = _norm_step("normalizer_processor", model, {**_inputs(), **outputs})
    tokens, device = _step("tokenizer_processor", **tokenizer), _step("device_processor", **_CPU)
    delta = _step("relative_actions_processor", **relative)
    if model == "pi05":
        prompt = _step("pi05_prepare_state_tokenizer_processor_step")
        pre = [*begin, delta, norm, prompt, tokens, device]
    else:
        pre = [*begin, _step("pi0_new_line_processor"), tokens, device, delta, norm]
    post = [
        _norm_step("unnormalizer_processor", model, outputs),
        _step("absolute_actions_processor", enabled=False),
        _step("device_processor", **_CPU),
    ]
    for name, steps in (("policy_preprocessor", pre), ("policy_postprocessor", post)):
        for index, step in enumerate(steps):
            if "norm_map" in step["config"]:
                file = f"{name}_step_{index}_{step['registry_name']}.safetensors"
                step["state_file"] = file
                save_file(_stat_tensors(stats), folder / file)
        _write_json(folder / f"{name}.json", {"name": name, "steps": steps})


_CPU = {"device": "cpu", "float_dtype": None}


def _inputs() -> dict[str, Any]:
    features = {IMAGE_PREFIX + name: _feature("VISUAL", 3, 256, 256) for name in CAMERAS}
    features[STATE] = _feature("STATE", len(_STATE_STATS["mean"]))
    return features


def _feature(kind: str, *shape: int) -> dict[str, Any]:
    return {"type": kind, "shape": list(shape)}


def _step(name: str, **config: Any) -> dict[str, Any]:
    return {"registry_name": name, "config": config}


def _norm_step(name: str, model: Model, features: Mapping[str, Any]) -> dict[str, Any]:
    norm_map = dict(default_normalization(model))
    return _step(name, eps=1e-8, features=dict(features), norm_map=norm_map)


def _stat_tensors(
    stats: Mapping[str, Mapping[str, Sequence[float]]],
) -> dict[str, NDArray[np.float32]]:
    return {
        f"{feature}.{name}": np.asarray(values, dtype=np.float32)
        for feature, table in stats.items()
        for name, values in table.items()
    }


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
