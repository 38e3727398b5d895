"""The presets' video autoencoder: sizes and random weights, under the official names."""

from __future__ import annotations

from typing import Any

from phyai.models.cosmos3.presets.drawing import Array, Draw
from phyai.models.cosmos3.presets.tiny_transformer import LATENT_CHANNELS

CONFIG: dict[str, Any] = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 4,
    "decoder_base_dim": 4,
    "z_dim": LATENT_CHANNELS,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "latents_mean": [0.05 * (channel - 3) for channel in range(LATENT_CHANNELS)],
    "latents_std": [0.8 + 0.05 * channel for channel in range(LATENT_CHANNELS)],
}
"""``vae/config.json``; the spelling of temperal_downsample is the official one."""


def vae_weights(seed: str) -> dict[str, Array]:
    """Return the tensors by official name, float32; equal on every call."""
    draw = Draw(seed)
    _encoder(draw)
    _decoder(draw)
    channels = CONFIG["z_dim"]
    draw.conv("quant_conv", (2 * channels, 2 * channels, 1, 1, 1))
    draw.conv("post_quant_conv", (channels, channels, 1, 1, 1))
    return draw.tensors


def _encoder(draw: Draw) -> None:
    widths = [CONFIG["base_dim"] * factor for factor in (1, *CONFIG["dim_mult"])]
    draw.conv("encoder.conv_in", (widths[0], CONFIG["in_channels"], 3, 3, 3))
    last = len(CONFIG["dim_mult"]) - 1
    for block in range(last + 1):
        name = f"encoder.down_blocks.{block}"
        width = widths[block]
        for index in range(CONFIG["num_res_blocks"]):
            _resnet(draw, f"{name}.resnets.{index}", width, widths[block + 1])
            width = widths[block + 1]
        if block < last:
            draw.conv(f"{name}.downsampler.resample.1", (width, width, 3, 3))
            if CONFIG["temperal_downsample"][block]:
                draw.conv(f"{name}.downsampler.time_conv", (width, width, 3, 1, 1))
    _middle(draw, "encoder", widths[-1])
    draw.norm("encoder.norm_out.gamma", (widths[-1], 1, 1, 1))
    draw.conv("encoder.conv_out", (2 * CONFIG["z_dim"], widths[-1], 3, 3, 3))


def _decoder(draw: Draw) -> None:
    factors = CONFIG["dim_mult"]
    base = CONFIG["decoder_base_dim"]
    widths = [base * factor for factor in (factors[-1], *reversed(factors))]
    draw.conv("decoder.conv_in", (widths[0], CONFIG["z_dim"], 3, 3, 3))
    _middle(draw, "decoder", widths[0])
    last = len(factors) - 1
    in_time = list(reversed(CONFIG["temperal_downsample"]))
    for block in range(last + 1):
        name = f"decoder.up_blocks.{block}"
        width = widths[block]
        for index in range(CONFIG["num_res_blocks"] + 1):
            _resnet(draw, f"{name}.resnets.{index}", width, widths[block + 1])
            width = widths[block + 1]
        if block < last:
            draw.conv(f"{name}.upsampler.resample.1", (width, width, 3, 3))
            if in_time[block]:
                draw.conv(f"{name}.upsampler.time_conv", (2 * width, width, 3, 1, 1))
    draw.norm("decoder.norm_out.gamma", (widths[-1], 1, 1, 1))
    draw.conv("decoder.conv_out", (CONFIG["out_channels"], widths[-1], 3, 3, 3))


def _resnet(draw: Draw, name: str, width: int, out: int) -> None:
    draw.norm(f"{name}.norm1.gamma", (width, 1, 1, 1))
    draw.conv(f"{name}.conv1", (out, width, 3, 3, 3))
    draw.norm(f"{name}.norm2.gamma", (out, 1, 1, 1))
    draw.conv(f"{name}.conv2", (out, out, 3, 3, 3))
    if width != out:
        draw.conv(f"{name}.conv_shortcut", (out, width, 1, 1, 1))


def _middle(draw: Draw, name: str, width: int) -> None:
    for index in range(2):
        _resnet(draw, f"{name}.mid_block.resnets.{index}", width, width)
    attention = f"{name}.mid_block.attentions.0"
    draw.norm(f"{attention}.norm.gamma", (width, 1, 1))
    draw.conv(f"{attention}.to_qkv", (3 * width, width, 1, 1))
    draw.conv(f"{attention}.proj", (width, width, 1, 1))
