"""Names, shapes and released sizes of the video autoencoder (Wan2.2), as diffusers stores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.peers.shapes import Shapes, linear

# fmt: off
CONFIG: dict[str, Any] = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "attn_scales": [], "temperal_downsample": [False, True, True],
    "dropout": 0.0, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2,
    "scale_factor_spatial": 16, "scale_factor_temporal": 4,
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542,
        0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109,
        0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899,
        -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
        0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344,
        0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804,
        0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999,
        0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
        0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}
# fmt: on


def autoencoder(c: Mapping[str, Any]) -> Shapes:
    """Encoder, decoder and the convolutions between them."""
    z, mult, blocks = c["z_dim"], c["dim_mult"], c["num_res_blocks"]
    down = [c["base_dim"] * m for m in (1, *mult)]
    up = [c["decoder_base_dim"] * m for m in (mult[-1], *reversed(mult))]
    in_time = c["temperal_downsample"]
    yield from _conv("encoder.conv_in", down[0], c["in_channels"], 3, 3, 3)
    yield from _levels("encoder.down_blocks", down, blocks, "downsampler", in_time, 1)
    yield from _middle("encoder.mid_block", down[-1])
    yield "encoder.norm_out.gamma", (down[-1], 1, 1, 1)
    yield from _conv("encoder.conv_out", 2 * z, down[-1], 3, 3, 3)
    yield from _conv("quant_conv", 2 * z, 2 * z, 1, 1, 1)
    yield from _conv("post_quant_conv", z, z, 1, 1, 1)
    yield from _conv("decoder.conv_in", up[0], z, 3, 3, 3)
    yield from _middle("decoder.mid_block", up[0])
    backwards = list(reversed(in_time))
    yield from _levels("decoder.up_blocks", up, blocks + 1, "upsampler", backwards, 2)
    yield "decoder.norm_out.gamma", (up[-1], 1, 1, 1)
    yield from _conv("decoder.conv_out", c["out_channels"], up[-1], 3, 3, 3)


def _levels(
    owner: str, widths: list[int], blocks: int, sampler: str, in_time: list[bool], gain: int
) -> Shapes:
    """Levels of so many blocks; between two, space is resampled, and time where ``in_time``.

    gain: channels that resampling time makes of one.
    """
    for i, out in enumerate(widths[1:]):
        level, width = f"{owner}.{i}", widths[i]
        for j in range(blocks):
            yield from _resnet(f"{level}.resnets.{j}", width if j == 0 else out, out)
        if i < len(in_time):
            yield from _conv(f"{level}.{sampler}.resample.1", out, out, 3, 3)
            if in_time[i]:
                yield from _conv(f"{level}.{sampler}.time_conv", gain * out, out, 3, 1, 1)


def _middle(owner: str, width: int) -> Shapes:
    yield from _resnet(f"{owner}.resnets.0", width, width)
    yield f"{owner}.attentions.0.norm.gamma", (width, 1, 1)
    yield from _conv(f"{owner}.attentions.0.to_qkv", 3 * width, width, 1, 1)
    yield from _conv(f"{owner}.attentions.0.proj", width, width, 1, 1)
    yield from _resnet(f"{owner}.resnets.1", width, width)


def _resnet(name: str, width: int, out: int) -> Shapes:
    yield f"{name}.norm1.gamma", (width, 1, 1, 1)
    yield from _conv(f"{name}.conv1", out, width, 3, 3, 3)
    yield f"{name}.norm2.gamma", (out, 1, 1, 1)
    yield from _conv(f"{name}.conv2", out, out, 3, 3, 3)
    if width != out:
        yield from _conv(f"{name}.conv_shortcut", out, width, 1, 1, 1)


def _conv(name: str, out: int, into: int, *kernel: int) -> Shapes:
    for part, shape in linear(name, out, into):
        yield part, (*shape, *kernel) if part.endswith(".weight") else shape
