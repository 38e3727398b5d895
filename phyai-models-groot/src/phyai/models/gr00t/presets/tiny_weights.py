"""The tiny preset's sizes and random weights, under the official names."""

from __future__ import annotations

import hashlib
import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phyai.models.gr00t.presets.tiny_tokenizer import (
    CONTROL,
    IMAGE,
    PAD,
    TINY_FIRST_CONTROL,
    TINY_VOCAB,
)

Array: TypeAlias = NDArray[np.float32]

HORIZON = 16
_SEED = "gr00t-tiny-1"
_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1, 2],
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "model_type": "qwen3_vl",
}
_TEXT: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rope_scaling": {
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
        "rope_type": "default",
    },
    "pad_token_id": TINY_FIRST_CONTROL + CONTROL[PAD],
    "model_type": "qwen3_vl_text",
}
BACKBONE: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": TINY_FIRST_CONTROL + CONTROL[IMAGE],
    "vision_config": _VISION,
    "text_config": _TEXT,
}
"""``config.json`` of the backbone; the checkpoint holds ``select_layer`` of its text layers."""
CONFIG: dict[str, Any] = {
    "model_type": "Gr00tN1d7",
    "architectures": ["Gr00tN1d7"],
    "model_dtype": "float32",
    "dtype": "float32",
    "model_name": "nvidia/Cosmos-Reason2-2B",
    "backbone_model_type": "qwen",
    "backbone_embedding_dim": 64,
    "select_layer": 4,
    "max_state_dim": 64,
    "max_action_dim": 32,
    "action_horizon": HORIZON,
    "state_history_length": 1,
    "hidden_size": 40,
    "input_embedding_dim": 48,
    "max_num_embodiments": 32,
    "max_seq_len": 64,
    "add_pos_embed": True,
    "use_vlln": True,
    "use_alternate_vl_dit": True,
    "attend_text_every_n_blocks": 2,
    "diffusion_model_cfg": {
        "positional_embeddings": None,
        "num_layers": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "norm_type": "ada_norm",
        "output_dim": 40,
        "interleave_self_attention": True,
    },
    "vl_self_attention_cfg": {
        "positional_embeddings": None,
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
    },
    "num_inference_timesteps": 4,
    "num_timestep_buckets": 1000,
}
"""``config.json`` of the policy."""

_BACKBONE = "backbone.model.model"
_HEAD = "action_head"


def tiny_weights() -> dict[str, Array]:
    """Return the checkpoint's tensors by official name, float32; equal on every call."""
    draw = _Draw()
    _vision(draw)
    _language(draw)
    _vl(draw)
    _encoders(draw)
    _dit(draw)
    return draw.tensors


class _Draw:
    """Collects tensors; the values of one depend on its name alone."""

    def __init__(self) -> None:
        self.tensors: dict[str, Array] = {}

    def normal(self, name: str, *shape: int, fan_in: int | None = None, scale: float = 1.0) -> None:
        """Add normals of standard deviation scale / sqrt(fan_in)."""
        digest = hashlib.sha256(f"{_SEED}/{name}".encode()).digest()
        values = np.random.default_rng(list(digest)).standard_normal(shape)
        std = scale / math.sqrt(fan_in or math.prod(shape[1:]))
        self.tensors[name] = (values * std).astype(np.float32)

    def linear(self, name: str, out: int, into: int, *, bias: bool = True) -> None:
        self.normal(f"{name}.weight", out, into)
        if bias:
            self.normal(f"{name}.bias", out, fan_in=1, scale=0.02)

    def ones(self, name: str, *shape: int) -> None:
        self.tensors[name] = np.ones(shape, dtype=np.float32)

    def layer_norm(self, name: str, width: int) -> None:
        self.ones(f"{name}.weight", width)
        self.tensors[f"{name}.bias"] = np.zeros(width, dtype=np.float32)

    def category(self, name: str, into: int, out: int) -> None:
        """Add one linear map per projector, [projectors, in, out]."""
        count = CONFIG["max_num_embodiments"]
        self.normal(f"{name}.W", count, into, out, fan_in=into)
        self.normal(f"{name}.b", count, out, fan_in=1, scale=0.02)


def _vision(draw: _Draw) -> None:
    at, width, out = f"{_BACKBONE}.visual", _VISION["hidden_size"], _VISION["out_hidden_size"]
    draw.normal(f"{at}.patch_embed.proj.weight", width, 3, 2, 16, 16)
    draw.normal(f"{at}.patch_embed.proj.bias", width, fan_in=1, scale=0.02)
    draw.normal(f"{at}.pos_embed.weight", _VISION["num_position_embeddings"], width, fan_in=4)
    for i in range(_VISION["depth"]):
        block = f"{at}.blocks.{i}"
        draw.layer_norm(f"{block}.norm1", width)
        draw.layer_norm(f"{block}.norm2", width)
        draw.linear(f"{block}.attn.qkv", 3 * width, width)
        draw.linear(f"{block}.attn.proj", width, width)
        draw.linear(f"{block}.mlp.linear_fc1", _VISION["intermediate_size"], width)
        draw.linear(f"{block}.mlp.linear_fc2", width, _VISION["intermediate_size"])
    mergers = {f"{at}.merger": width}
    for i in range(len(_VISION["deepstack_visual_indexes"])):
        mergers[f"{at}.deepstack_merger_list.{i}"] = 4 * width
    for merger, normed in mergers.items():
        draw.layer_norm(f"{merger}.norm", normed)
        draw.linear(f"{merger}.linear_fc1", 4 * width, 4 * width)
        draw.linear(f"{merger}.linear_fc2", out, 4 * width)


def _language(draw: _Draw) -> None:
    at, width, head = f"{_BACKBONE}.language_model", _TEXT["hidden_size"], _TEXT["head_dim"]
    query, keys = head * _TEXT["num_attention_heads"], head * _TEXT["num_key_value_heads"]
    mlp = _TEXT["intermediate_size"]
    draw.normal(f"{at}.embed_tokens.weight", _TEXT["vocab_size"], width, fan_in=1)
    for i in range(CONFIG["select_layer"]):
        layer = f"{at}.layers.{i}"
        for leg, out, into in (
            ("self_attn.q_proj", query, width),
            ("self_attn.k_proj", keys, width),
            ("self_attn.v_proj", keys, width),
            ("self_attn.o_proj", width, query),
            ("mlp.gate_proj", mlp, width),
            ("mlp.up_proj", mlp, width),
            ("mlp.down_proj", width, mlp),
        ):
            draw.linear(f"{layer}.{leg}", out, into, bias=False)
        draw.ones(f"{layer}.self_attn.q_norm.weight", head)
        draw.ones(f"{layer}.self_attn.k_norm.weight", head)
        draw.ones(f"{layer}.input_layernorm.weight", width)
        draw.ones(f"{layer}.post_attention_layernorm.weight", width)
    draw.ones(f"{at}.norm.weight", width)
    # Tied to the embedding, stored all the same, and never used.
    draw.tensors["backbone.model.lm_head.weight"] = draw.tensors[f"{at}.embed_tokens.weight"].copy()


def _vl(draw: _Draw) -> None:
    width = CONFIG["backbone_embedding_dim"]
    draw.layer_norm(f"{_HEAD}.vlln", width)
    for i in range(CONFIG["vl_self_attention_cfg"]["num_layers"]):
        block = f"{_HEAD}.vl_self_attention.transformer_blocks.{i}"
        draw.layer_norm(f"{block}.norm1", width)
        draw.layer_norm(f"{block}.norm3", width)
        _attention(draw, block, width, width)
        _feed_forward(draw, block, width)


def _encoders(draw: _Draw) -> None:
    hidden, width = CONFIG["hidden_size"], CONFIG["input_embedding_dim"]
    actions = CONFIG["max_action_dim"]
    for name, into, out in (
        ("state_encoder.layer1", CONFIG["max_state_dim"], hidden),
        ("state_encoder.layer2", hidden, width),
        ("action_encoder.W1", actions, width),
        ("action_encoder.W2", 2 * width, width),
        ("action_encoder.W3", width, width),
        ("action_decoder.layer1", hidden, hidden),
        ("action_decoder.layer2", hidden, actions),
    ):
        draw.category(f"{_HEAD}.{name}", into, out)
    draw.normal(f"{_HEAD}.position_embedding.weight", CONFIG["max_seq_len"], width, fan_in=4)


def _dit(draw: _Draw) -> None:
    at, width = f"{_HEAD}.model", CONFIG["input_embedding_dim"]
    draw.linear(f"{at}.timestep_encoder.timestep_embedder.linear_1", width, 256)
    draw.linear(f"{at}.timestep_encoder.timestep_embedder.linear_2", width, width)
    for i in range(CONFIG["diffusion_model_cfg"]["num_layers"]):
        block = f"{at}.transformer_blocks.{i}"
        draw.linear(f"{block}.norm1.linear", 2 * width, width)
        _attention(draw, block, width, width if i % 2 else CONFIG["backbone_embedding_dim"])
        _feed_forward(draw, block, width)
    draw.linear(f"{at}.proj_out_1", 2 * width, width)
    draw.linear(f"{at}.proj_out_2", CONFIG["diffusion_model_cfg"]["output_dim"], width)


def _attention(draw: _Draw, block: str, width: int, keys: int) -> None:
    for leg, into in (("to_q", width), ("to_k", keys), ("to_v", keys), ("to_out.0", width)):
        draw.linear(f"{block}.attn1.{leg}", width, into)


def _feed_forward(draw: _Draw, block: str, width: int) -> None:
    draw.linear(f"{block}.ff.net.0.proj", 4 * width, width)
    draw.linear(f"{block}.ff.net.2", width, 4 * width)
