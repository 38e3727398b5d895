"""Latents -> frames, whole or in tiles, on one rank or shared by all of them.

Row by row: convolutions of another batch size round differently, and a row must not depend on
those beside it. Nothing is lost, for one clip fills the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from phyai.errors import RequestError
from phyai.models.cosmos3.vae import RankTiling, SpatialTiling, Tiling, WanVAE
from phyai.models.cosmos3.vae.rank_tiling import grid_of

if TYPE_CHECKING:
    from phyai.models.cosmos3.adapter import Cosmos3Base

LEAST_PART = 16
"""Latents along the shorter side of a rank's part of a frame; 256 pixels."""


def decode_frames(adapter: Cosmos3Base, latents: Tensor) -> np.ndarray:
    """Return uint8 [B, F, H, W, 3] of normalised latents [B, C, T, h, w]."""
    vae, how = _vae(adapter), tiling(adapter, *latents.shape[3:])
    with adapter.services.profile.stage("vae"):
        clips = _joined([partial(vae.decode_frames, row, tiling=how) for row in _rows(latents)])
    return np.asarray(clips.cpu().numpy())


def decode_pixels(adapter: Cosmos3Base, latents: Tensor) -> Tensor:
    """Return pixels [B, 3, F, H, W] in [0, 1] of normalised latents [B, C, T, h, w]."""
    vae, how = _vae(adapter), tiling(adapter, *latents.shape[3:])
    with adapter.services.profile.stage("vae"):
        rows = _rows(vae.denormalise(latents))
        clips = _joined([partial(vae.decode, row, tiling=how) for row in rows])
    return clips.add_(1.0).mul_(0.5)


def tiling(adapter: Cosmos3Base, height: int, width: int) -> Tiling | None:
    """Return how frames are cut up: one part per rank, tiles of the arguments' size, or not.

    height, width: of the latents. Parts see less of the frame, so small frames stay whole.
    """
    parallel = adapter.services.parallel
    if parallel.world.size > 1 and adapter.args.vae_rank_tiles:
        rows, columns = grid_of(parallel.world.size, height, width)
        if min(height // rows, width // columns) >= LEAST_PART:
            return RankTiling(groups=(parallel.tp, parallel.cfg))
    return spatial_tiling(adapter)


def spatial_tiling(adapter: Cosmos3Base) -> SpatialTiling | None:
    """Return the tiles of the arguments; None = whole frames. Raises ConfigError."""
    tile = getattr(adapter.args, "vae_tile", 0)
    if not tile:
        return None
    return SpatialTiling(tile, getattr(adapter.args, "vae_tile_stride", 0) or 3 * tile // 4)


def _vae(adapter: Cosmos3Base) -> WanVAE:
    if adapter.vae is None:
        raise RequestError(
            "frames need a checkpoint with its video autoencoder; got an engine with random "
            "weights. Take the latents."
        )
    return adapter.vae


def _rows(batch: Tensor) -> list[Tensor]:
    """Return the rows, each a batch of one."""
    return [row[None] for row in batch]


def _joined(decode: Sequence[Callable[[], Tensor]]) -> Tensor:
    """Return the clips as one batch; videos are large, so there is one copy of them."""
    first = decode[0]()
    if len(decode) == 1:
        return first
    out = first.new_empty((len(decode), *first.shape[1:]))
    out[0] = first[0]
    for place, other in zip(out[1:], decode[1:], strict=True):
        place.copy_(other()[0])
    return out
