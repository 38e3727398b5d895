"""Spatial tiling on one device: less memory per step, blended as in diffusers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.models.cosmos3.vae.config import VAEConfig
from phyai.models.cosmos3.vae.pixels import Canvas, unfold

DecodeChunks = Callable[[Tensor], Iterator[Tensor]]
"""Latents [B, z, T, h, w] -> folded pixels of each latent frame, [T' * B, channels, H, W]."""


@dataclass(frozen=True, slots=True)
class SpatialTiling:
    """Square tiles decoded one by one, each with its own history, blended where they overlap.

    tile, stride: in pixels; multiples of the autoencoder's spatial factor, stride < tile.
    Source: diffusers AutoencoderKLWan, whose tiles also blend in the folded domain.

    >>> from phyai.models.cosmos3.vae import SpatialTiling
    >>> SpatialTiling().tile, SpatialTiling().stride
    (256, 192)
    """

    tile: int = 256
    stride: int = 192

    def __post_init__(self) -> None:
        if not 0 < self.stride <= self.tile:
            raise ConfigError(
                f"VAE stride must be from 1 to tile; got stride {self.stride} and tile "
                f"{self.tile}. Use 192 and 256."
            )

    def check(self, side: int) -> None:
        """Raise ConfigError unless latents of ``side`` pixels fill tile and stride."""
        if self.tile % side or self.stride % side:
            raise ConfigError(
                f"VAE tile and stride must be multiples of {side}; got {self.tile} and "
                f"{self.stride}. Use 192 and 256."
            )

    def draw(
        self, decode: DecodeChunks, latents: Tensor, config: VAEConfig, canvas: Canvas
    ) -> None:
        """Decode raw latents [B, z, T, h, w] onto the canvas, one row of tiles after the other."""
        side, patch = config.scale_factor_spatial, config.patch_size
        self.check(side)
        tile, step = self.tile // side, self.stride // side
        kept, overlap = self.stride // patch, (self.tile - self.stride) // patch
        height, width = latents.shape[-2:]
        limits = height * side // patch, width * side // patch
        above: list[Tensor] = []
        for row, top in enumerate(range(0, height, step)):
            tiles: list[Tensor] = []
            for column, left in enumerate(range(0, width, step)):
                part = latents[..., top : top + tile, left : left + tile]
                pixels = torch.cat(list(decode(part))).contiguous()
                if above:
                    _blend(above[column], pixels, overlap, dim=-2)
                if tiles:
                    _blend(tiles[-1], pixels, overlap, dim=-1)
                tiles.append(pixels)
                y, x = row * kept, column * kept
                piece = pixels[..., : min(kept, limits[0] - y), : min(kept, limits[1] - x)]
                canvas.put(unfold(piece, patch), 0, y * patch, x * patch)
            above = tiles


def _blend(before: Tensor, tile: Tensor, overlap: int, *, dim: int) -> None:
    """Fade, in place, from the end of the tile before into the beginning of ``tile``."""
    size = min(before.shape[dim], tile.shape[dim], overlap)
    if size == 0:
        return
    ramp = torch.arange(size, device=tile.device, dtype=torch.float32) / size
    ramp = ramp.unsqueeze(-1) if dim == -2 else ramp
    start = tile.narrow(dim, 0, size)
    end = before.narrow(dim, before.shape[dim] - size, size)
    start.copy_(end.float() * (1.0 - ramp) + start.float() * ramp)
