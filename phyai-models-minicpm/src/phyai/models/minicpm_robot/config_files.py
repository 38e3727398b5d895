"""Reads ``config.json`` and the tensors' shapes of a checkpoint into a MiniCPMRobotConfig.

The names of the action head's fields are not settled by public files, so its sizes come from the
shapes of its tensors; an ``action_head_cfg`` wins where it says something.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from phyai.errors import CheckpointError, CheckpointNotFound
from phyai.json_files import read_json_object
from phyai.models.minicpm_robot.config import (
    FULL,
    LINEAR,
    HeadSizes,
    MiniCPMRobotConfig,
    TextSizes,
    VisionSizes,
)
from phyai.models.minicpm_robot.names import BANK, SHARED, renaming
from phyai.weights import Remap, tensor_index

CONFIG_FILE = "config.json"
HEAD = "action_head"
FULL_EVERY = 4
HEAD_DIM = 64

Shapes = Mapping[str, tuple[int, ...]]

# Field -> the values there is code for. With others results would be wrong, so they are refused.
_SETTLED_TOP = {"merge_kernel_size": ([2, 2],), "merger_times": (1,),
                "drop_vision_last_layer": (False,)}  # fmt: skip
_SETTLED_TEXT = {"hidden_act": ("silu",), "attention_bias": (False,), "attn_output_gate": (True,)}
_SETTLED_VISION = {"hidden_act": ("gelu_pytorch_tanh",), "window_kernel_size": ([2, 2],)}
_SETTLED_ROPE = {"rope_type": ("default",)}
_ROPE = ("rope_theta", "partial_rotary_factor", "mrope_section")
_SETTLED_HEAD = {"proprio_inject": ("concat",), "prediction_type": ("clean_action",)}
_SETTLED_DIT = {"interleave_self_attention": (True,), "norm_type": ("ada_norm",),
                "positional_embeddings": (None,), "attention_bias": (True,),
                "activation_fn": ("gelu-approximate",),
                "norm_elementwise_affine": (False,)}  # fmt: skip
_HEAD_SIZES = ("hidden_size", "action_dim", "state_dim", "action_horizon", "max_seq_len",
               "num_inference_timesteps", "num_target_vision_tokens", "num_timestep_buckets",
               "max_num_embodiments", "add_pos_embed")  # fmt: skip
_DIT_SIZES = ("num_attention_heads", "attention_head_dim", "num_layers", "cross_attention_dim",
              "output_dim")  # fmt: skip
# Field -> the tensor that tells it, and along which dim.
_PLAIN = {
    "width": ("future_tokens.weight", 1),
    "num_target_vision_tokens": ("future_tokens.weight", 0),
    "max_seq_len": ("position_embedding.weight", 0),
    "cross_attention_dim": ("model.transformer_blocks.0.attn1.to_k.weight", 1),
    "ff_dim": ("model.transformer_blocks.0.ff.net.0.proj.weight", 0),
}


def read_config(folder: Path, remap: Remap = None) -> MiniCPMRobotConfig:
    """Return the checked config; see ``MiniCPMRobotConfig.from_folder``."""
    path = folder / CONFIG_FILE
    data = read_json_object(path)
    _check_settled(path, "", data, _SETTLED_TOP)
    vision, text = (_part(path, data, name) for name in ("vision_config", "text_config"))
    _check_settled(path, "vision_config.", vision, _SETTLED_VISION)
    _check_settled(path, "text_config.", text, _SETTLED_TEXT)
    if "insert_layer_id" not in vision and "insert_layer_id" in data:
        vision = {**vision, "insert_layer_id": data["insert_layer_id"]}
    top = {k: data[k] for k in ("image_token_id", "image_size", "downsample_mode") if k in data}
    return MiniCPMRobotConfig(
        vision=VisionSizes(**_known(VisionSizes, vision)),
        text=_text_sizes(path, text),
        head=_head_sizes(path, data, _shapes(folder, remap)),
        **top,
    )


def _shapes(folder: Path, remap: Remap) -> Shapes:
    """Return claimed name -> shape of every tensor; empty for a folder without weights."""
    rename = renaming(remap)
    try:
        stored = tensor_index(folder)
    except CheckpointNotFound:
        return {}
    named = {rename(name): tuple(info.shape) for name, info in stored.items()}
    return {name: shape for name, shape in named.items() if name is not None}


def _part(path: Path, data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = data.get(name)
    if not isinstance(part, Mapping):
        raise CheckpointError(
            f"{path} must hold an object {name}; got {type(part).__name__}. "
            "Use the folder of a MiniCPM-RobotManip checkpoint."
        )
    return part


def _check_settled(
    path: Path, prefix: str, data: Mapping[str, Any], settled: Mapping[str, tuple[Any, ...]]
) -> None:
    for key, allowed in settled.items():
        if key in data and data[key] not in allowed:
            raise CheckpointError(
                f"{prefix}{key} in {path} must be {allowed[0]!r}; got {data[key]!r}. "
                "Other forms are not supported."
            )


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are fields of ``cls``; others mean nothing here."""
    names = {f.name for f in fields(cls)}
    return {key: value for key, value in data.items() if key in names and value is not None}


def _text_sizes(path: Path, data: Mapping[str, Any]) -> TextSizes:
    values = _known(TextSizes, data)
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(
            f"text_config.rope_parameters in {path} must be an object; got {rope!r}. "
            "Correct the file."
        )
    _check_settled(path, "text_config.rope_parameters.", rope, _SETTLED_ROPE)
    values.update({k: rope[k] for k in _ROPE if rope.get(k) is not None})
    layers = values.get("num_hidden_layers", TextSizes().num_hidden_layers)
    every = data.get("full_attention_interval", FULL_EVERY)
    if "layer_types" not in values and isinstance(layers, int) and isinstance(every, int):
        types = [FULL if (i + 1) % max(every, 1) == 0 else LINEAR for i in range(layers)]
        values["layer_types"] = types
    for name in ("layer_types", "mrope_section"):
        if isinstance(values.get(name), list):  # the checks of the config refuse anything else
            values[name] = tuple(values[name])
    return TextSizes(**values)


# ---------------------------------------------------------------- the action head


def _head_sizes(path: Path, data: Mapping[str, Any], shapes: Shapes) -> HeadSizes:
    given = data.get("action_head_cfg") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(
            f"action_head_cfg in {path} must be an object; got {given!r}. Correct the file."
        )
    dit = given.get("diffusion_model_cfg") or {}
    if not isinstance(dit, Mapping):
        raise CheckpointError(
            f"action_head_cfg.diffusion_model_cfg in {path} must be an object; got {dit!r}. "
            "Correct the file."
        )
    _check_settled(path, "action_head_cfg.", given, _SETTLED_HEAD)
    _check_settled(path, "action_head_cfg.diffusion_model_cfg.", dit, _SETTLED_DIT)
    values = _inferred(path, shapes)
    if "state_dim" not in values and isinstance(data.get("state_dim"), int):
        values["state_dim"] = data["state_dim"]
    values.update({k: given[k] for k in _HEAD_SIZES if given.get(k) is not None})
    values.update({k: dit[k] for k in _DIT_SIZES if dit.get(k) is not None})
    if "input_embedding_dim" in dit:
        values["width"] = dit["input_embedding_dim"]
    _heads(path, values)
    return HeadSizes(**values)


def _heads(path: Path, values: dict[str, Any]) -> None:
    """Complete width, heads and their dim from two of them: shapes tell the product alone."""
    heads, dim = values.get("num_attention_heads"), values.get("attention_head_dim")
    width = values.get("width")
    numbers = [n for n in (heads, dim, width) if n is not None]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
        return  # the checks of the config say what is wrong
    if width is None:
        if heads is not None and dim is not None:
            values["width"] = heads * dim
    elif heads is None:
        if dim is None and width % HEAD_DIM:
            raise CheckpointError(
                f"action_head_cfg.diffusion_model_cfg in {path} must say attention_head_dim for a "
                f"width of {width}; got none, and {HEAD_DIM} does not divide it. Add it."
            )
        values["attention_head_dim"] = dim = dim or HEAD_DIM
        values["num_attention_heads"] = width // dim
    elif dim is None:
        values["attention_head_dim"] = width // heads


def _inferred(path: Path, shapes: Shapes) -> dict[str, Any]:
    """Return what the shapes of the head's tensors say; nothing where a tensor is absent."""
    shared = _is_shared(path, shapes)

    def shape(name: str, dims: int) -> tuple[int, ...] | None:
        found = shapes.get(f"{HEAD}.{name}")
        if found is not None and len(found) != dims:
            raise CheckpointError(
                f"tensor {HEAD}.{name} of {path.parent} must have {dims} dims; got {list(found)}. "
                "Download the checkpoint again."
            )
        return found

    def bank(name: str, layer: str) -> tuple[int, int, int] | None:
        """Return (banks, inputs, outputs) of a linear of the encoder or decoder."""
        if shared:
            found = shape(f"{layer}.weight", 2)
            return None if found is None else (1, found[1], found[0])
        found = shape(f"{name}.W", 3)
        return None if found is None else (found[0], found[1], found[2])

    values: dict[str, Any] = {"shared_head": shared}
    first = bank("action_encoder.W1", "action_encoder.layer1")
    hidden = bank("action_decoder.layer1", "action_decoder.layer1")
    last = bank("action_decoder.layer2", "action_decoder.layer2")
    for found in (first, hidden, last):
        if found is not None and not shared:
            values["max_num_embodiments"] = found[0]
    if hidden is not None:
        values["output_dim"] = hidden[1]
    if last is not None:
        values["hidden_size"], values["action_dim"] = last[1], last[2]
        if first is not None:
            values["state_dim"] = first[1] - last[2]
    for field, (name, dim) in _PLAIN.items():
        if (sizes := shape(name, 2)) is not None:
            values[field] = sizes[dim]
    block = re.compile(rf"{HEAD}\.model\.transformer_blocks\.(\d+)\.")
    numbers = [int(match[1]) for name in shapes if (match := block.match(name))]
    if numbers:
        values["num_layers"] = max(numbers) + 1
    return values


def _is_shared(path: Path, shapes: Shapes) -> bool:
    """Return whether one set of weights serves all embodiments.  Raises: CheckpointError."""
    banks = [name for name in shapes if BANK.fullmatch(name)]
    shared = [name for name in shapes if SHARED.fullmatch(name)]
    if banks and shared:
        raise CheckpointError(
            f"checkpoint {path.parent} must hold one action head; got weights per embodiment "
            f"({banks[0]}) and shared ones ({shared[0]}). Remove one of them."
        )
    return bool(shared)
