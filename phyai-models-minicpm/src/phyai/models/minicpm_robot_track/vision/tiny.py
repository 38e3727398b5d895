"""Writes two tiny tower folders in the layout of the released ones, for presets and tests."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from phyai.models.minicpm_robot_track.vision.pixels import HALF, IMAGENET, PixelScale

Array: TypeAlias = NDArray[np.float32]

DINO_FOLDER, SIGLIP_FOLDER = "dinov3", "siglip"
TINY_DINO: dict[str, Any] = {
    "architectures": ["DINOv3ViTModel"],
    "model_type": "dinov3_vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "patch_size": 16,
    "image_size": 112,
    "num_channels": 3,
    "num_register_tokens": 4,
    "layer_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "hidden_act": "gelu",
    "use_gated_mlp": False,
    "query_bias": True,
    "key_bias": False,
    "value_bias": True,
    "proj_bias": True,
    "mlp_bias": True,
    "layerscale_value": 1.0,
}
"""``config.json`` of the tiny DINOv3: a 7 x 7 grid of a frame of 112 pixels."""
TINY_SIGLIP: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "patch_size": 14,
    "image_size": 112,
    "model_type": "siglip_vision_model",
}
"""``vision_config`` of the tiny SigLIP: an 8 x 8 grid."""
_TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "vocab_size": 32,
    "max_position_embeddings": 16,
    "projection_size": 48,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "model_type": "siglip_text_model",
}
_SEED = "tiny-towers-1"


def write_tiny_towers(
    folder: Path,
    *,
    dino: Mapping[str, Any] | None = None,
    siglip: Mapping[str, Any] | None = None,
) -> tuple[Path, Path]:
    """Write both folders below ``folder`` and return them; equal bytes every time.

    dino, siglip: changes of ``TINY_DINO`` and ``TINY_SIGLIP``. The frame's side is SigLIP's
    ``image_size``. As in the released file SigLIP comes whole, with a text half nobody reads.
    """
    sizes = {**TINY_DINO, **(dino or {})}
    _write(folder / DINO_FOLDER, sizes, _dino(sizes), IMAGENET, int(sizes["image_size"]))
    vision = {**TINY_SIGLIP, **(siglip or {})}
    text = {**_TEXT, "hidden_size": vision["hidden_size"], "projection_size": vision["hidden_size"]}
    text |= {"num_attention_heads": vision["num_attention_heads"]}
    config = {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "text_config": text,
        "vision_config": vision,
    }
    tensors = _siglip(vision, text)
    _write(folder / SIGLIP_FOLDER, config, tensors, HALF, int(vision["image_size"]))
    return folder / DINO_FOLDER, folder / SIGLIP_FOLDER


def _write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: dict[str, Array],
    pixels: PixelScale,
    side: int,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    preprocessor = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": pixels.factor,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
        "size": {"height": side, "width": side},
    }
    for name, data in (("config.json", config), ("preprocessor_config.json", preprocessor)):
        (folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    held = dict(sorted(tensors.items()))
    save_file(held, folder / "model.safetensors", {"format": "pt"})


class _Draw:
    """Collects tensors; the values of one depend on the tower and its name alone."""

    def __init__(self, tower: str) -> None:
        self.tower = tower
        self.tensors: dict[str, Array] = {}

    def normal(
        self, name: str, *shape: int, fan_in: int | None = None, scale: float = 1.0, mean: float = 0
    ) -> None:
        """Add normals of standard deviation scale / sqrt(fan_in)."""
        digest = hashlib.sha256(f"{_SEED}/{self.tower}/{name}".encode()).digest()
        values = np.random.default_rng(list(digest)).standard_normal(shape)
        std = scale / math.sqrt(fan_in or math.prod(shape[1:]))
        self.tensors[name] = (mean + values * std).astype(np.float32)

    def vector(self, name: str, width: int, *, mean: float = 0) -> None:
        self.normal(name, width, fan_in=1, scale=0.05, mean=mean)

    def linear(self, name: str, out: int, into: int, *, bias: bool = True) -> None:
        self.normal(f"{name}.weight", out, into)
        if bias:
            self.vector(f"{name}.bias", out)

    def norm(self, name: str, width: int) -> None:
        self.vector(f"{name}.weight", width, mean=1)
        self.vector(f"{name}.bias", width)


def _dino(sizes: Mapping[str, Any]) -> dict[str, Array]:
    draw, width, inner = _Draw(DINO_FOLDER), sizes["hidden_size"], sizes["intermediate_size"]
    patch, at = sizes["patch_size"], "embeddings"
    draw.normal(f"{at}.cls_token", 1, 1, width, fan_in=1)
    draw.normal(f"{at}.mask_token", 1, 1, width, fan_in=1)
    draw.normal(f"{at}.register_tokens", 1, sizes["num_register_tokens"], width, fan_in=1)
    draw.normal(f"{at}.patch_embeddings.weight", width, 3, patch, patch)
    draw.vector(f"{at}.patch_embeddings.bias", width)
    for i in range(sizes["num_hidden_layers"]):
        layer = f"layer.{i}"
        for j in (1, 2):
            draw.norm(f"{layer}.norm{j}", width)
            draw.vector(f"{layer}.layer_scale{j}.lambda1", width, mean=0.5)
        for leg, flag in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "proj")):
            name = f"{layer}.attention.{leg}_proj"
            draw.linear(name, width, width, bias=sizes[f"{flag}_bias"])
        for leg in ("gate", "up") if sizes["use_gated_mlp"] else ("up",):
            draw.linear(f"{layer}.mlp.{leg}_proj", inner, width, bias=sizes["mlp_bias"])
        draw.linear(f"{layer}.mlp.down_proj", width, inner, bias=sizes["mlp_bias"])
    draw.norm("norm", width)
    return draw.tensors


def _siglip(vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Array]:
    draw, width, patch = _Draw(SIGLIP_FOLDER), vision["hidden_size"], vision["patch_size"]
    at = "vision_model"
    draw.normal(f"{at}.embeddings.patch_embedding.weight", width, 3, patch, patch)
    draw.vector(f"{at}.embeddings.patch_embedding.bias", width)
    places = (vision["image_size"] // patch) ** 2
    draw.normal(f"{at}.embeddings.position_embedding.weight", places, width, fan_in=4)
    _encoder(draw, at, vision)
    draw.norm(f"{at}.post_layernorm", width)
    head = f"{at}.head"
    draw.normal(f"{head}.probe", 1, 1, width, fan_in=1)
    draw.normal(f"{head}.attention.in_proj_weight", 3 * width, width)
    draw.vector(f"{head}.attention.in_proj_bias", 3 * width)
    draw.linear(f"{head}.attention.out_proj", width, width)
    draw.norm(f"{head}.layernorm", width)
    _mlp(draw, head, vision)
    at, width = "text_model", text["hidden_size"]
    draw.normal(f"{at}.embeddings.token_embedding.weight", text["vocab_size"], width)
    draw.normal(
        f"{at}.embeddings.position_embedding.weight", text["max_position_embeddings"], width
    )
    _encoder(draw, at, text)
    draw.norm(f"{at}.final_layer_norm", width)
    draw.linear(f"{at}.head", text["projection_size"], width)
    for name in ("logit_scale", "logit_bias"):
        draw.vector(name, 1)
    return draw.tensors


def _encoder(draw: _Draw, at: str, sizes: Mapping[str, Any]) -> None:
    width = sizes["hidden_size"]
    for i in range(sizes["num_hidden_layers"]):
        layer = f"{at}.encoder.layers.{i}"
        draw.norm(f"{layer}.layer_norm1", width)
        draw.norm(f"{layer}.layer_norm2", width)
        for leg in ("q_proj", "k_proj", "v_proj", "out_proj"):
            draw.linear(f"{layer}.self_attn.{leg}", width, width)
        _mlp(draw, layer, sizes)


def _mlp(draw: _Draw, at: str, sizes: Mapping[str, Any]) -> None:
    draw.linear(f"{at}.mlp.fc1", sizes["intermediate_size"], sizes["hidden_size"])
    draw.linear(f"{at}.mlp.fc2", sizes["hidden_size"], sizes["intermediate_size"])
