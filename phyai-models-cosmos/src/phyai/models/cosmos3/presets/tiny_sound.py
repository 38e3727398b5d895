"""The preset's sound decoder: sizes and random weights, under the official names."""

from __future__ import annotations

from typing import Any

import numpy as np

from phyai.models.cosmos3.presets.drawing import Array, Draw
from phyai.models.cosmos3.presets.tiny_transformer import SOUND_CHANNELS

CONFIG: dict[str, Any] = {
    "_class_name": "Cosmos3AVAEAudioTokenizer",
    "model_type": "autoencoder_v2",
    "dec_type": "oobleck",
    "activation": "snakebeta",
    "snake_logscale": True,
    "dec_use_snake": True,
    "dec_dim": 2,
    "dec_c_mults": [1, 2, 2, 4, 4],
    "dec_strides": [2, 4, 5, 6, 8],
    "dec_out_channels": 2,
    "dec_use_tanh_at_final": False,
    "dec_final_tanh": False,
    "dec_use_nearest_upsample": False,
    "dec_anti_aliasing": False,
    "causal": False,
    "padding_mode": "zeros",
    "stereo": True,
    "vocoder_input_dim": SOUND_CHANNELS,
    "sampling_rate": 48000,
    "hop_size": 1920,
    "latent_mean": None,
    "latent_std": None,
    "encoder_enabled": False,
}
_OUT_GAIN = 0.02
"""Random weights are loud; this keeps most of a waveform inside [-1, 1]."""


def sound_weights(seed: str) -> dict[str, Array]:
    """Return the decoder's tensors by official name, float32; equal on every call."""
    draw = Draw(seed)
    widths = [CONFIG["dec_dim"] * factor for factor in (1, *CONFIG["dec_c_mults"])]
    _weight_norm(draw, "decoder.conv1", (widths[-1], CONFIG["vocoder_input_dim"], 7), widths[-1])
    for block, stride in enumerate(reversed(CONFIG["dec_strides"])):
        name = f"decoder.block.{block}"
        width, out = widths[-1 - block], widths[-2 - block]
        _snake(draw, f"{name}.snake1", width)
        _weight_norm(draw, f"{name}.conv_t1", (width, out, 2 * stride), out)
        for unit in range(1, 4):
            _snake(draw, f"{name}.res_unit{unit}.snake1", out)
            _weight_norm(draw, f"{name}.res_unit{unit}.conv1", (out, out, 7), out)
            _snake(draw, f"{name}.res_unit{unit}.snake2", out)
            _weight_norm(draw, f"{name}.res_unit{unit}.conv2", (out, out, 1), out)
    _snake(draw, "decoder.snake1", widths[0])
    _weight_norm(draw, "decoder.conv2", (CONFIG["dec_out_channels"], widths[0], 7), 0, _OUT_GAIN)
    return draw.tensors


def _snake(draw: Draw, name: str, width: int) -> None:
    draw.bias(f"{name}.alpha", (1, width, 1))
    draw.bias(f"{name}.beta", (1, width, 1))


def _weight_norm(
    draw: Draw, name: str, shape: tuple[int, int, int], bias: int, gain: float = 1.0
) -> None:
    """Add direction and length of a kernel, and its bias where it has one."""
    direction = draw.weight(f"{name}.weight_v", shape)
    length = np.sqrt(np.square(direction).sum(axis=(1, 2), keepdims=True))
    draw.tensors[f"{name}.weight_g"] = np.asarray(gain * length, dtype=np.float32)
    if bias:
        draw.bias(f"{name}.bias", (bias,))
