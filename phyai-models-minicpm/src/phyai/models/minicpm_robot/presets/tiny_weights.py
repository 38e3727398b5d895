"""The tiny preset's sizes and random weights, under the official names."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.models.minicpm_robot.presets.tiny_tokenizer import (
    CONTROL,
    IMAGE,
    TINY_FIRST_CONTROL,
    TINY_VOCAB,
)

IMAGE_SIZE = 112
BANKS = 8
_SEED = "minicpm-robot-tiny-1"
_LAYERS = ("linear_attention",) * 3 + ("full_attention",)
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_channels": 3,
    "image_size": 140,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "insert_layer_id": 1,
    "window_kernel_size": [2, 2],
}
_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": list(_LAYERS * 2),
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_DIT: dict[str, Any] = {
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "input_embedding_dim": 48,
    "num_layers": 4,
    "cross_attention_dim": 64,
    "output_dim": 40,
    "dropout": 0.2,
    "final_dropout": True,
    "interleave_self_attention": True,
    "norm_type": "ada_norm",
    "positional_embeddings": None,
}
_HEAD: dict[str, Any] = {
    "action_model_type": "custom",
    "hidden_size": 40,
    "action_dim": 80,
    "state_dim": 80,
    "action_horizon": 10,
    "num_inference_timesteps": 4,
    "num_target_vision_tokens": 6,
    "max_seq_len": 16,
    "num_timestep_buckets": 1000,
    "add_pos_embed": True,
    "proprio_inject": "concat",
    "prediction_type": "clean_action",
    "max_num_embodiments": BANKS,
    "diffusion_model_cfg": _DIT,
}
CONFIG: dict[str, Any] = {
    "architectures": ["MiniCPMV_VLA"],
    "insert_layer_id": 1,
    "image_size": IMAGE_SIZE,
    "image_token_id": TINY_FIRST_CONTROL + CONTROL[IMAGE],
    "video_token_id": TINY_FIRST_CONTROL + CONTROL["<|video_pad|>"],
    "downsample_mode": "16x",
    "merge_kernel_size": [2, 2],
    "merger_times": 1,
    "drop_vision_last_layer": False,
    "tie_word_embeddings": True,
    "vision_config": _VISION,
    "text_config": _TEXT,
    "action_head_cfg": _HEAD,
}
"""``config.json`` of the checkpoint."""

_LLM, _VPM, _ACTION = "vlm.llm.model", "vlm.vpm", "action_head"


def tiny_weights() -> dict[str, Tensor]:
    """Return the checkpoint's tensors by official name; equal on every call.

    As released: the vision-language model in bfloat16, the action head in float32.
    """
    vlm, head = _Draw(torch.bfloat16), _Draw(torch.float32)
    _vision(vlm)
    _mergers(vlm)
    _language(vlm)
    _banks(head)
    _dit(head)
    return {**vlm.tensors, **head.tensors}


class _Draw:
    """Collects tensors; the values of one depend on its name alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._dtype = dtype

    def values(self, name: str, shape: Sequence[int], mean: float, std: float) -> None:
        """Add normals."""
        digest = hashlib.sha256(f"{_SEED}/{name}".encode()).digest()
        drawn = np.random.default_rng(list(digest)).standard_normal(shape) * std + mean
        self.tensors[name] = torch.from_numpy(drawn.astype(np.float32)).to(self._dtype)

    def normal(self, name: str, *shape: int, fan_in: int | None = None) -> None:
        self.values(name, shape, 0.0, 1 / math.sqrt(fan_in or math.prod(shape[1:])))

    def linear(self, name: str, out: int, into: int, *, bias: bool = True) -> None:
        self.normal(f"{name}.weight", out, into)
        if bias:
            self.values(f"{name}.bias", (out,), 0.0, 0.02)

    def layer_norm(self, name: str, width: int) -> None:
        self.values(f"{name}.weight", (width,), 1.0, 0.02)
        self.values(f"{name}.bias", (width,), 0.0, 0.02)

    def bank(self, name: str, into: int, out: int) -> None:
        """Add one linear map per embodiment, [banks, in, out]."""
        self.normal(f"{name}.W", BANKS, into, out, fan_in=into)
        self.values(f"{name}.b", (BANKS, out), 0.0, 0.02)


def _vision(draw: _Draw) -> None:
    width, mlp = _VISION["hidden_size"], _VISION["intermediate_size"]
    patch, side = _VISION["patch_size"], _VISION["image_size"] // _VISION["patch_size"]
    draw.normal(f"{_VPM}.embeddings.patch_embedding.weight", width, 3, patch, patch)
    draw.values(f"{_VPM}.embeddings.patch_embedding.bias", (width,), 0.0, 0.02)
    draw.values(f"{_VPM}.embeddings.position_embedding.weight", (side * side, width), 0.0, 0.5)
    for i in range(_VISION["num_hidden_layers"]):
        layer = f"{_VPM}.encoder.layers.{i}"
        draw.layer_norm(f"{layer}.layer_norm1", width)
        draw.layer_norm(f"{layer}.layer_norm2", width)
        _attention(draw, f"{layer}.self_attn", width)
        draw.linear(f"{layer}.mlp.fc1", mlp, width)
        draw.linear(f"{layer}.mlp.fc2", width, mlp)
    draw.layer_norm(f"{_VPM}.post_layernorm", width)


def _mergers(draw: _Draw) -> None:
    width, out = _VISION["hidden_size"], _TEXT["hidden_size"]
    window = 4 * width
    middle = "vlm.vit_merger"
    draw.layer_norm(f"{middle}.layer_norm1", width)
    _attention(draw, f"{middle}.self_attn", width)
    draw.layer_norm(f"{middle}.pre_norm", window)
    draw.linear(f"{middle}.linear_1", 4 * _VISION["intermediate_size"], window)
    draw.linear(f"{middle}.linear_2", width, 4 * _VISION["intermediate_size"])
    final = "vlm.resampler.mlp.0"
    draw.layer_norm(f"{final}.pre_norm", window)
    draw.linear(f"{final}.mlp.0", window, window)
    draw.linear(f"{final}.mlp.2", out, window)


def _attention(draw: _Draw, name: str, width: int) -> None:
    for leg in ("q_proj", "k_proj", "v_proj", "out_proj"):
        draw.linear(f"{name}.{leg}", width, width)


def _language(draw: _Draw) -> None:
    width, mlp = _TEXT["hidden_size"], _TEXT["intermediate_size"]
    draw.normal(f"{_LLM}.embed_tokens.weight", _TEXT["vocab_size"], width, fan_in=1)
    for i, kind in enumerate(_TEXT["layer_types"]):
        layer = f"{_LLM}.layers.{i}"
        # Zero-centred: the norm multiplies by 1 + weight.
        draw.values(f"{layer}.input_layernorm.weight", (width,), 0.0, 0.02)
        draw.values(f"{layer}.post_attention_layernorm.weight", (width,), 0.0, 0.02)
        if kind == "linear_attention":
            _linear_mixer(draw, f"{layer}.linear_attn")
        else:
            _full_mixer(draw, f"{layer}.self_attn")
        draw.linear(f"{layer}.mlp.gate_proj", mlp, width, bias=False)
        draw.linear(f"{layer}.mlp.up_proj", mlp, width, bias=False)
        draw.linear(f"{layer}.mlp.down_proj", width, mlp, bias=False)
    draw.values(f"{_LLM}.norm.weight", (width,), 0.0, 0.02)
    # Tied to the embedding, stored all the same, and never used.
    draw.tensors["vlm.llm.lm_head.weight"] = draw.tensors[f"{_LLM}.embed_tokens.weight"].clone()


def _linear_mixer(draw: _Draw, name: str) -> None:
    width, heads = _TEXT["hidden_size"], _TEXT["linear_num_value_heads"]
    keys = _TEXT["linear_num_key_heads"] * _TEXT["linear_key_head_dim"]
    values = heads * _TEXT["linear_value_head_dim"]
    kernel = _TEXT["linear_conv_kernel_dim"]
    draw.linear(f"{name}.in_proj_qkv", 2 * keys + values, width, bias=False)
    draw.linear(f"{name}.in_proj_z", values, width, bias=False)
    draw.linear(f"{name}.in_proj_a", heads, width, bias=False)
    draw.linear(f"{name}.in_proj_b", heads, width, bias=False)
    draw.linear(f"{name}.out_proj", width, values, bias=False)
    draw.normal(f"{name}.conv1d.weight", 2 * keys + values, 1, kernel)
    # Memories of a few to some dozen tokens.
    draw.values(f"{name}.A_log", (heads,), 0.5, 0.3)
    draw.values(f"{name}.dt_bias", (heads,), -2.0, 0.5)
    draw.values(f"{name}.norm.weight", (_TEXT["linear_value_head_dim"],), 1.0, 0.02)


def _full_mixer(draw: _Draw, name: str) -> None:
    width, head = _TEXT["hidden_size"], _TEXT["head_dim"]
    query, keys = head * _TEXT["num_attention_heads"], head * _TEXT["num_key_value_heads"]
    draw.linear(f"{name}.q_proj", 2 * query, width, bias=False)  # with the output's gate
    draw.linear(f"{name}.k_proj", keys, width, bias=False)
    draw.linear(f"{name}.v_proj", keys, width, bias=False)
    draw.linear(f"{name}.o_proj", width, query, bias=False)
    draw.values(f"{name}.q_norm.weight", (head,), 0.0, 0.02)
    draw.values(f"{name}.k_norm.weight", (head,), 0.0, 0.02)


def _banks(draw: _Draw) -> None:
    width, hidden, out = _DIT["input_embedding_dim"], _HEAD["hidden_size"], _DIT["output_dim"]
    actions, state = _HEAD["action_dim"], _HEAD["state_dim"]
    draw.bank(f"{_ACTION}.action_encoder.W1", actions + state, width)
    draw.bank(f"{_ACTION}.action_encoder.W2", 2 * width, width)
    draw.bank(f"{_ACTION}.action_encoder.W3", width, width)
    draw.bank(f"{_ACTION}.action_decoder.layer1", out, hidden)
    draw.bank(f"{_ACTION}.action_decoder.layer2", hidden, actions)
    draw.values(
        f"{_ACTION}.future_tokens.weight", (_HEAD["num_target_vision_tokens"], width), 0.0, 0.5
    )
    draw.values(f"{_ACTION}.position_embedding.weight", (_HEAD["max_seq_len"], width), 0.0, 0.5)


def _dit(draw: _Draw) -> None:
    at, width = f"{_ACTION}.model", _DIT["input_embedding_dim"]
    embedder = f"{at}.timestep_encoder.timestep_embedder"
    draw.linear(f"{embedder}.linear_1", width, 256)
    draw.linear(f"{embedder}.linear_2", width, width)
    for i in range(_DIT["num_layers"]):
        block = f"{at}.transformer_blocks.{i}"
        context = width if i % 2 else _DIT["cross_attention_dim"]
        draw.linear(f"{block}.norm1.linear", 2 * width, width)
        for leg, into in (
            ("to_q", width),
            ("to_k", context),
            ("to_v", context),
            ("to_out.0", width),
        ):
            draw.linear(f"{block}.attn1.{leg}", width, into)
        draw.linear(f"{block}.ff.net.0.proj", 4 * width, width)
        draw.linear(f"{block}.ff.net.2", width, 4 * width)
    draw.linear(f"{at}.proj_out_1", 2 * width, width)
    draw.linear(f"{at}.proj_out_2", _DIT["output_dim"], width)
