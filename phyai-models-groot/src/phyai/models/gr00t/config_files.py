"""Reads ``config.json`` of a checkpoint folder, and its backbone's, into a GrootConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from phyai.errors import CheckpointError, ConfigError
from phyai.json_files import read_json_object
from phyai.models.gr00t.backbone_files import backbone_of, read_backbone, token_ids
from phyai.models.gr00t.config import (
    MODEL_NAME,
    MODEL_TYPE,
    DiTConfig,
    GrootConfig,
    SelfAttentionConfig,
)

CONFIG_FILE = "config.json"
BACKBONES = ("nvidia/Cosmos-Reason2", "Qwen/Qwen3-VL")
# Flag -> what it would mean. Results would be wrong without it, so the checkpoint is refused.
_UNSUPPORTED = {
    "strict_action_padding_mask": "masked action padding",
    "use_tactile": "tactile inputs",
    "reproject_vision": "a vision projection of its own",
}
_PREDECESSORS = {"Gr00tN1d6": "N1.6", "gr00t_n1_5": "N1.5", "gr00t_n1": "N1"}
_SETTLED = {
    "positional_embeddings": (None,),
    "interleave_self_attention": (True,),
    "norm_type": ("ada_norm",),
}
_SIZES = frozenset(f.name for f in fields(GrootConfig)) - {
    "backbone",
    "diffusion_model_cfg",
    "vl_self_attention_cfg",
    "image_token_id",
    "pad_token_id",
}
_FLAGS = ("add_pos_embed", "use_vlln", "use_alternate_vl_dit")

Part = TypeVar("Part", DiTConfig, SelfAttentionConfig)


def read_config(folder: Path, backbone_dir: Path | None) -> GrootConfig:
    """Return the checked config; see ``GrootConfig.from_folder``."""
    path = folder / CONFIG_FILE
    data = read_json_object(path)
    _check_kind(path, data)
    values: dict[str, Any] = {name: data[name] for name in _SIZES & data.keys()}
    for name in _FLAGS:
        if not isinstance(values.get(name, True), bool):
            raise CheckpointError(
                f"{name} in {path} must be true or false; got {values[name]!r}. Correct the file."
            )
    if (dit := data.get("diffusion_model_cfg")) is not None:
        values["diffusion_model_cfg"] = _part(DiTConfig, "diffusion_model_cfg", dit, path)
    vl = data.get("vl_self_attention_cfg")
    if vl is not None and not (isinstance(vl, dict) and vl.get("num_layers") == 0):
        values["vl_self_attention_cfg"] = _part(
            SelfAttentionConfig, "vl_self_attention_cfg", vl, path
        )
    model_name = values.get("model_name", MODEL_NAME)
    if not isinstance(model_name, str) or not any(name in model_name for name in BACKBONES):
        raise CheckpointError(
            f"model_name in {path} must name {' or '.join(BACKBONES)}; got {model_name!r}. "
            "Other backbones are not supported."
        )
    stored = read_backbone(folder, backbone_dir, model_name)
    return GrootConfig(**values, backbone=backbone_of(stored), **token_ids(stored))


def _check_kind(path: Path, data: Mapping[str, Any]) -> None:
    kind = data.get("model_type")
    if kind != MODEL_TYPE:
        older = _PREDECESSORS.get(str(kind))
        raise CheckpointError(
            f"model_type in {path} must be {MODEL_TYPE!r} (GR00T N1.7); got {kind!r}"
            f"{f' (GR00T {older})' if older else ''}. Use a checkpoint of GR00T N1.7."
        )
    for flag, meaning in _UNSUPPORTED.items():
        if data.get(flag):
            raise CheckpointError(
                f"{flag} in {path} must be false: {meaning} are not supported; got "
                f"{data[flag]!r}. Use a checkpoint without it."
            )
    backbone = data.get("backbone_model_type", "qwen")
    if backbone != "qwen":
        raise CheckpointError(
            f"backbone_model_type in {path} must be 'qwen'; got {backbone!r}. "
            "Other backbones are not supported."
        )


def _part(cls: type[Part], name: str, data: Any, path: Path) -> Part:
    """Return one of the two transformer configs; all its sizes have to be there."""
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{name} in {path} must be an object; got {type(data).__name__}. Correct the file."
        )
    for key, allowed in _SETTLED.items():
        if key in data and data[key] not in allowed:
            raise CheckpointError(
                f"{name}.{key} in {path} must be {allowed[0]!r}; got {data[key]!r}. "
                "Other forms are not supported."
            )
    sizes = [f.name for f in fields(cls)]
    absent = [key for key in sizes if key not in data]
    if absent:
        raise ConfigError(
            f"{name} in {path} must say {', '.join(sizes)}; got no {', '.join(absent)}. "
            "Correct the file."
        )
    return cls(**{key: data[key] for key in sizes})
