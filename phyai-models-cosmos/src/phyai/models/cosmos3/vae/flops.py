"""Operations and weights of the video autoencoder, from the sizes alone. Torch-free.

A multiply-add counts as two; convolutions and attention only. Clips are streamed: the first frame
has no past, of its temporal kernels one tap counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from phyai.models.cosmos3.vae.config import VAEConfig

_SPACE = 9
_PAST = 3
"""Taps of a kernel in space, and in time."""


@dataclass(frozen=True, slots=True)
class _Conv:
    """One convolution.  places: output places of one frame; taps: in space; causal: 3 in time."""

    inputs: int
    outputs: int
    places: int
    taps: int = _SPACE
    causal: bool = True

    def flops(self, *, first: bool) -> int:
        time = _PAST if self.causal and not first else 1
        return 2 * self.inputs * self.outputs * self.places * self.taps * time

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.taps * (_PAST if self.causal else 1)


def encode_flops(config: VAEConfig, frames: int, height: int, width: int) -> int:
    """Return the operations of encoding a clip of so many pixel frames."""
    convs, attention = (
        list(_encoder(config, height, width)),
        _middle_attention(config.encoder_widths[-1], height, width, config),
    )
    # Of four frames together deeper levels see two, then one.
    chunks = (frames - 1) // config.scale_factor_temporal
    once = sum(conv.flops(first=True) for conv, _ in convs) + attention
    later = sum(conv.flops(first=False) * count for conv, count in convs) + attention
    return once + chunks * later


def encoder_weights(config: VAEConfig) -> int:
    return sum(conv.weights for conv, _ in _encoder(config, 16, 16))


def decode_flops(config: VAEConfig, latents: int, height: int, width: int) -> int:
    """Return the operations of decoding so many latent frames to frames of this size."""
    convs, attention = (
        list(_decoder(config, height, width)),
        _middle_attention(config.decoder_widths[0], height, width, config),
    )
    once = sum(conv.flops(first=True) for conv, _ in convs) + attention
    later = sum(conv.flops(first=False) * count for conv, count in convs) + attention
    return once + (latents - 1) * later


def decoder_weights(config: VAEConfig) -> int:
    return sum(conv.weights for conv, _ in _decoder(config, 16, 16))


def _encoder(config: VAEConfig, height: int, width: int) -> Iterator[tuple[_Conv, int]]:
    """Yield each convolution with the frames it sees per chunk."""
    places = height * width // config.patch_size**2
    frames, widths = config.scale_factor_temporal, config.encoder_widths
    yield _Conv(config.in_channels, widths[0], places), frames
    last = len(config.dim_mult) - 1
    for level, (into, out) in enumerate(pairwise(widths)):
        yield from ((conv, frames) for conv in _level(into, out, config.num_res_blocks, places))
        if level < last:
            places //= 4
            yield _Conv(out, out, places, causal=False), frames
            if config.temperal_downsample[level]:
                frames //= 2
                yield _Conv(out, out, places, taps=1), frames
    yield from ((conv, 1) for conv in _middle(widths[-1], places))
    yield _Conv(widths[-1], 2 * config.z_dim, places), 1


def _decoder(config: VAEConfig, height: int, width: int) -> Iterator[tuple[_Conv, int]]:
    side, widths = config.scale_factor_spatial, config.decoder_widths
    places, frames = (height // side) * (width // side), 1
    yield _Conv(config.z_dim, widths[0], places), 1
    yield from ((conv, 1) for conv in _middle(widths[0], places))
    last = len(config.dim_mult) - 1
    in_time = tuple(reversed(config.temperal_downsample))
    for level, (into, out) in enumerate(pairwise(widths)):
        blocks = config.num_res_blocks + 1
        yield from ((conv, frames) for conv in _level(into, out, blocks, places))
        if level < last:
            if in_time[level]:
                yield _Conv(out, 2 * out, places, taps=1), frames
                frames *= 2
            places *= 4
            yield _Conv(out, out, places, causal=False), frames
    yield _Conv(widths[-1], config.out_channels, places), frames


def _level(into: int, out: int, blocks: int, places: int) -> Iterator[_Conv]:
    for _ in range(blocks):
        yield _Conv(into, out, places)
        yield _Conv(out, out, places)
        if into != out:
            yield _Conv(into, out, places, taps=1, causal=False)
        into = out


def _middle(width: int, places: int) -> Iterator[_Conv]:
    yield from _level(width, width, 2, places)
    yield _Conv(width, 3 * width, places, taps=1, causal=False)
    yield _Conv(width, width, places, taps=1, causal=False)


def _middle_attention(width: int, height: int, columns: int, config: VAEConfig) -> int:
    places = (height // config.scale_factor_spatial) * (columns // config.scale_factor_spatial)
    return 4 * places * places * width
