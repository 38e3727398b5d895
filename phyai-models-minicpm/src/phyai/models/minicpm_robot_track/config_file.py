"""Reads a checkpoint's ``config.json`` into a MiniCPMRobotTrackConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from phyai.errors import CheckpointError
from phyai.json_files import read_json_object
from phyai.models.minicpm_robot_track.config import (
    MODEL_TYPE,
    BackboneSizes,
    MiniCPMRobotTrackConfig,
)

_PLAIN = frozenset(f.name for f in fields(MiniCPMRobotTrackConfig)) - {"backbone"}
_BACKBONE = frozenset(f.name for f in fields(BackboneSizes)) - {
    "short_factor",
    "long_factor",
    "original_max_position_embeddings",
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# Results would be wrong with another value, so the checkpoint is refused.
_SETTLED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "num_experts": (0, None),
}


def read_config(path: Path) -> MiniCPMRobotTrackConfig:
    """Return the checked config; see ``MiniCPMRobotTrackConfig.from_file``."""
    data = read_json_object(path)
    kind = data.get("model_type", MODEL_TYPE)
    if kind != MODEL_TYPE:
        raise CheckpointError(
            f"model_type in {path} must be {MODEL_TYPE!r}; got {kind!r}. "
            "Use a checkpoint of MiniCPM-RobotTrack."
        )
    values = {name: data[name] for name in _PLAIN & data.keys()}
    if isinstance(hidden := values.get("trajectory_hidden_dims"), list):
        values["trajectory_hidden_dims"] = tuple(hidden)
    nested = data.get("backbone_config")
    if nested is None:
        return MiniCPMRobotTrackConfig(**values)
    return MiniCPMRobotTrackConfig(**values, backbone=_backbone(path, nested))


def _backbone(path: Path, data: Any) -> BackboneSizes:
    if not isinstance(data, dict):
        raise CheckpointError(
            f"backbone_config in {path} must be an object; got {type(data).__name__}. "
            "Correct the file."
        )
    for name, allowed in _SETTLED.items():
        if name in data and data[name] not in allowed:
            raise CheckpointError(
                f"backbone_config.{name} in {path} must be {allowed[0]!r}; got {data[name]!r}. "
                "Other forms are not supported."
            )
    absent = [name for name in _REQUIRED if name not in data]
    if absent:
        raise CheckpointError(
            f"backbone_config in {path} must say {', '.join(_REQUIRED)}; got no "
            f"{', '.join(absent)}. Correct the file."
        )
    values = {name: data[name] for name in _BACKBONE & data.keys() if data[name] is not None}
    heads, width = data["num_attention_heads"], data["hidden_size"]
    values.setdefault("num_key_value_heads", heads)
    if "head_dim" not in values:
        if not isinstance(heads, int) or not isinstance(width, int) or heads < 1 or width % heads:
            raise CheckpointError(
                f"hidden_size in {path} must be a multiple of num_attention_heads; got {width!r} "
                f"and {heads!r}. Correct the file or add head_dim."
            )
        values["head_dim"] = width // heads
    return BackboneSizes(**values, **_rope(path, data, values))


def _rope(path: Path, data: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields; a base inside the scaling replaces the one in ``values``."""
    most = values.get("max_position_embeddings", BackboneSizes().max_position_embeddings)
    found: dict[str, Any] = {"original_max_position_embeddings": most}
    scaling = data.get("rope_scaling") or data.get("rope_parameters")
    if scaling is None:
        return found
    if not isinstance(scaling, dict):
        raise CheckpointError(
            f"rope_scaling in {path} must be an object; got {scaling!r}. Correct the file."
        )
    if "rope_theta" in scaling:
        values["rope_theta"] = scaling["rope_theta"]
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return found
    if kind != "longrope" or scaling.get("attention_factor") is not None:
        raise CheckpointError(
            f"rope_scaling in {path} must be of type 'longrope' without attention_factor; got "
            f"{kind!r}. Other forms are not supported."
        )
    for name in ("short_factor", "long_factor"):
        factors = scaling.get(name)
        if not isinstance(factors, list) or not factors:
            raise CheckpointError(
                f"rope_scaling.{name} in {path} must be a list of numbers; got {factors!r}. "
                "Correct the file."
            )
        found[name] = tuple(factors)
    original = scaling.get("original_max_position_embeddings")
    if original is not None:
        found["original_max_position_embeddings"] = original
    return found
