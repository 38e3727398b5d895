"""Writes the tiny preset's folder in the layout of the released checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from phyai.models.minicpm_robot_track.presets.tiny_tokenizer import (
    TINY_VOCAB,
    write_tiny_tokenizer,
)

Array: TypeAlias = NDArray[np.float32]

_SEED = "minicpm-robot-track-tiny-1"
_BACKBONE: dict[str, Any] = {
    "model_type": "minicpm",
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.6, 3.4, 4.4],
        "long_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.6, 3.4, 4.4],
        "original_max_position_embeddings": 512,
    },
}
CONFIG: dict[str, Any] = {
    "model_type": "minicpm_robot_track",
    "architectures": ["MiniCPMRobotTrackForWaypoint"],
    "vision_feature_dim": 80,
    "history_frames": 7,
    "coarse_tokens_per_frame": 4,
    "fine_tokens_current_frame": 16,
    "num_waypoints": 8,
    "action_dim": 3,
    "max_text_tokens": 32,
    "max_time_steps": 64,
    "trajectory_dropout": 0.4,
    "xy_scale": 2.0,
    "use_tanh_actions": True,
    "trajectory_hidden_dims": [96, 64, 48, 32, 24],
    "backbone_config": _BACKBONE,
}
"""``config.json`` of the tracker; its vision features are those of the tiny towers."""


def write_tiny_checkpoint(folder: Path) -> None:
    """Fill ``folder`` with config, weights and tokenizer; equal bytes every time."""
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    write_tiny_tokenizer(folder)
    held = dict(sorted(tiny_weights().items()))
    save_file(held, folder / "model.safetensors", {"format": "pt"})


def tiny_weights() -> dict[str, Array]:
    """Return the checkpoint's tensors by released name, float32; equal on every call."""
    draw = _Draw()
    _backbone(draw)
    width, features = _BACKBONE["hidden_size"], CONFIG["vision_feature_dim"]
    draw.norm("vision_projector.layers.0", features)
    draw.linear("vision_projector.layers.1", width, features)
    draw.linear("vision_projector.layers.3", width, width)
    for part, rows in (("time", CONFIG["max_time_steps"]), ("stream", 2), ("camera", 1)):
        draw.normal(f"temporal_markers.{part}_embedding.weight", rows, width, fan_in=9)
    draw.normal("control_query", 1, 1, width, fan_in=1)
    widths = [width, *CONFIG["trajectory_hidden_dims"]]
    draw.norm("trajectory_head.layers.0", width)
    for i, (into, out) in enumerate(pairwise(widths)):
        draw.linear(f"trajectory_head.layers.{1 + 3 * i}", out, into, scale=1.5)
    draw.norm("trajectory_head.layers.16", widths[-1])
    outputs = CONFIG["num_waypoints"] * CONFIG["action_dim"]
    draw.linear("trajectory_head.layers.17", outputs, widths[-1], scale=0.5)
    scale = [CONFIG["xy_scale"], CONFIG["xy_scale"], 1.0]
    draw.tensors["output_scale"] = np.asarray(scale, dtype=np.float32).reshape(1, 1, 3)
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

    def linear(
        self, name: str, out: int, into: int, *, bias: bool = True, scale: float = 1.0
    ) -> None:
        self.normal(f"{name}.weight", out, into, scale=scale)
        if bias:
            self.normal(f"{name}.bias", out, fan_in=1, scale=0.02)

    def ones(self, name: str, width: int) -> None:
        self.tensors[name] = np.ones(width, dtype=np.float32)

    def norm(self, name: str, width: int) -> None:
        self.ones(f"{name}.weight", width)
        self.tensors[f"{name}.bias"] = np.zeros(width, dtype=np.float32)


def _backbone(draw: _Draw) -> None:
    width, mlp = _BACKBONE["hidden_size"], _BACKBONE["intermediate_size"]
    heads, kept = _BACKBONE["num_attention_heads"], _BACKBONE["num_key_value_heads"]
    keys = width // heads * kept
    draw.normal("backbone.embed_tokens.weight", TINY_VOCAB, width, fan_in=1)
    for i in range(_BACKBONE["num_hidden_layers"]):
        layer = f"backbone.layers.{i}"
        for leg, out, into in (
            ("self_attn.q_proj", width, width),
            ("self_attn.k_proj", keys, width),
            ("self_attn.v_proj", keys, width),
            ("self_attn.o_proj", width, width),
            ("mlp.gate_proj", mlp, width),
            ("mlp.up_proj", mlp, width),
            ("mlp.down_proj", width, mlp),
        ):
            draw.linear(f"{layer}.{leg}", out, into, bias=False)
        draw.ones(f"{layer}.input_layernorm.weight", width)
        draw.ones(f"{layer}.post_attention_layernorm.weight", width)
    draw.ones("backbone.norm.weight", width)
