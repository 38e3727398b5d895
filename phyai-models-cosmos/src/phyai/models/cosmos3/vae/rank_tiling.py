"""Tiles of one frame on several ranks: each decodes one, all get the whole.

Every latent frame is decoded, gathered and blended before the next one, so a rank never holds more
than one stretch of frames beside the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt, prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.models.cosmos3.vae.config import VAEConfig
from phyai.models.cosmos3.vae.pixels import RGB, Canvas, unfold
from phyai.models.cosmos3.vae.tiling import DecodeChunks

if TYPE_CHECKING:
    from phyai.parallel import Group

HALO = 2
"""Latents a tile reaches beyond its own part of the frame."""


@dataclass(frozen=True, slots=True)
class Span:
    """Latents [start, stop) along one side; ``fades``: whether it has a neighbour at each end."""

    start: int
    stop: int
    fades: tuple[bool, bool]


@dataclass(frozen=True, slots=True)
class RankTiling:
    """A near-square grid of overlapping tiles, blended by weights that fall off linearly.

    groups: the fastest-varying one first, as (tp, cfg); one all-gather each per latent frame.
        None = this process decodes all tiles.
    grid: (rows, columns); None = one tile per rank, as ``grid_of``. With groups, at most as many
        tiles as ranks.
    halo: latents a tile reaches beyond its part.
    All ranks get bit-identical frames. They differ from an untiled decode, in which attention and
    convolutions see the whole frame.

    >>> from phyai.models.cosmos3.vae import RankTiling
    >>> RankTiling(grid=(1, 2)).spans(30, 52)[1]
    (Span(start=0, stop=28, fades=(False, True)), Span(start=24, stop=52, fades=(True, False)))
    """

    groups: tuple[Group, ...] = ()
    grid: tuple[int, int] | None = None
    halo: int = HALO

    def __post_init__(self) -> None:
        if self.halo < 0 or (self.grid is not None and min(self.grid) < 1):
            raise ConfigError(
                f"VAE tiles need a halo >= 0 and a grid of positive numbers; got halo {self.halo} "
                f"and grid {self.grid}. Leave the grid out to have one tile per rank."
            )
        if self.ranks > 1 and self.grid is not None and prod(self.grid) > self.ranks:
            raise ConfigError(
                f"VAE grid must have at most one tile per rank; got {self.grid} for {self.ranks} "
                "ranks. Leave the grid out to have one tile per rank."
            )

    @property
    def ranks(self) -> int:
        return prod(group.size for group in self.groups)

    @property
    def rank(self) -> int:
        """This process among all of them, the first group varying fastest."""
        place, stride = 0, 1
        for group in self.groups:
            place += group.rank * stride
            stride *= group.size
        return place

    def spans(self, height: int, width: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Return the rows and columns of tiles over latents of this size."""
        rows, columns = self.grid or grid_of(self.ranks, height, width)
        return (
            _split(height, min(rows, height), self.halo),
            _split(width, min(columns, width), self.halo),
        )

    def draw(
        self, decode: DecodeChunks, latents: Tensor, config: VAEConfig, canvas: Canvas
    ) -> None:
        """Decode raw latents [B, z, T, h, w] onto the canvas; every rank must call this."""
        rows, _, frames, height, width = latents.shape
        side, feather = config.scale_factor_spatial, 2 * self.halo * config.scale_factor_spatial
        tiles = list(product(*self.spans(height, width)))
        weights = [
            _ramp(y, side, feather, latents.device)[:, None]
            * _ramp(x, side, feather, latents.device)
            for y, x in tiles
        ]
        total = torch.zeros(height * side, width * side, device=latents.device)
        for (y, x), weight in zip(tiles, weights, strict=True):
            _window(total, y, x, side).add_(weight)
        own = range(len(tiles)) if self.ranks == 1 else range(self.rank, len(tiles), self.ranks)
        streams = [
            decode(latents[..., y.start : y.stop, x.start : x.stop])
            for y, x in (tiles[i] for i in own)
        ]
        largest = (
            max(y.stop - y.start for y, _ in tiles) * side,
            max(x.stop - x.start for _, x in tiles) * side,
        )
        at = 0
        for index in range(frames):
            number = 1 if index == 0 else config.scale_factor_temporal
            decoded = [unfold(next(stream), config.patch_size) for stream in streams]
            if self.ranks > 1:
                decoded = self._gathered(decoded, number * rows, largest, latents)
            blended = torch.zeros(number * rows, RGB, *total.shape, device=latents.device)
            for (y, x), weight, pixels in zip(tiles, weights, decoded, strict=False):
                place = _window(blended, y, x, side)
                place.add_(pixels[..., : place.shape[-2], : place.shape[-1]].float() * weight)
            canvas.put(blended.div_(total), at)
            at += number

    def _gathered(
        self, decoded: Sequence[Tensor], frames: int, size: tuple[int, int], like: Tensor
    ) -> list[Tensor]:
        """Every rank's tile of these frames, padded to one size, in order of rank."""
        padded = torch.zeros(frames, RGB, *size, device=like.device, dtype=like.dtype)
        for pixels in decoded:
            padded[..., : pixels.shape[-2], : pixels.shape[-1]] = pixels
        for group in self.groups:
            if group.size > 1:
                padded = group.all_gather(padded)
        return list(padded.reshape(self.ranks, frames, RGB, *size))


def grid_of(ranks: int, height: int, width: int) -> tuple[int, int]:
    """Return the most nearly square (rows, columns) of so many tiles; the longer side has more.

    Where a side has fewer latents than tiles, fewer tiles are made.

    >>> from phyai.models.cosmos3.vae.rank_tiling import grid_of
    >>> [grid_of(n, 30, 52) for n in (1, 2, 4, 8)], grid_of(8, 52, 30), grid_of(8, 1, 3)
    ([(1, 1), (1, 2), (2, 2), (2, 4)], (4, 2), (1, 3))
    """
    for number in range(ranks, 0, -1):
        short = next(n for n in range(isqrt(number), 0, -1) if number % n == 0)
        grid = (short, number // short) if width >= height else (number // short, short)
        if grid[0] <= height and grid[1] <= width:
            return grid
    return 1, 1


def _split(length: int, parts: int, halo: int) -> tuple[Span, ...]:
    bounds = [length * i // parts for i in range(parts + 1)]
    return tuple(
        Span(max(bounds[i] - halo, 0), min(bounds[i + 1] + halo, length), (i > 0, i < parts - 1))
        for i in range(parts)
    )


def _ramp(span: Span, side: int, feather: int, device: torch.device) -> Tensor:
    """Weights along one side of a tile: (i + 1) / (feather + 1) from a shared end, at most 1."""
    number = (span.stop - span.start) * side
    index = torch.arange(1, number + 1, device=device, dtype=torch.float32)
    weight = torch.ones(number, device=device)
    if span.fades[0]:
        weight = torch.minimum(weight, index / (feather + 1))
    if span.fades[1]:
        weight = torch.minimum(weight, index.flip(0) / (feather + 1))
    return weight


def _window(pixels: Tensor, y: Span, x: Span, side: int) -> Tensor:
    return pixels[..., y.start * side : y.stop * side, x.start * side : x.stop * side]
