"""Positions of text and image tokens on three axes, and the rotary tables of them. Host only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from phyai.backbones.qwen3_vl.config import Qwen3VLTextConfig
from phyai.errors import RequestError

Grid: TypeAlias = tuple[int, int, int]
"""Frames, patch rows and patch columns of one image."""


def image_tokens(grid: Grid, merge: int) -> int:
    """Return how many tokens an image becomes; ``merge`` patches per token and side.

    >>> from phyai.backbones.qwen3_vl import image_tokens
    >>> image_tokens((1, 16, 16), 2)
    64
    """
    frames, height, width = grid
    return frames * (height // merge) * (width // merge)


def text_positions(
    rows: Sequence[Tensor], grids: Sequence[Sequence[Grid]], image_token_id: int, merge: int
) -> Tensor:
    """Return the time, row and column position of each token, [3, M] int64, rows one after another.

    A text token has one number on all axes, the next of a counter. Token (t, r, c) of an image
    that starts at n has n + t, n + r, n + c; the counter goes on behind the largest of them.
    Shapes: rows: int64 [S_i] without padding; grids: the images of each row, in patches.
    Raises: RequestError when a row's image tokens are not those of its grids.

    >>> import torch
    >>> from phyai.backbones.qwen3_vl import text_positions
    >>> text_positions([torch.tensor([5, 9, 9, 6])], [[(1, 2, 4)]], 9, 2).tolist()
    [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    parts = []
    for ids, images in zip(rows, grids, strict=True):
        parts += _row_positions(ids, images, image_token_id, merge)
    return torch.cat(parts, dim=1) if parts else torch.zeros(3, 0, dtype=torch.int64)


def _row_positions(
    ids: Tensor, grids: Sequence[Grid], image_token_id: int, merge: int
) -> list[Tensor]:
    """Return the positions of one row, a part [3, n] per run of text and per image."""
    is_image = ids == image_token_id
    counts = [image_tokens(grid, merge) for grid in grids]
    found = int(is_image.sum())
    if found != sum(counts):
        raise RequestError(
            f"prompt must have one image token per merged patch; got {found} for images of "
            f"{counts} tokens. Expand each image's placeholder to its number of tokens."
        )
    places = is_image.nonzero().flatten().tolist()
    parts, at, counter, used = [], 0, 0, 0
    for (frames, height, width), count in zip(grids, counts, strict=True):
        if not count:
            continue
        start = places[used]
        if places[used + count - 1] != start + count - 1:
            raise RequestError(
                "image tokens of one image must stand side by side; got text between token "
                f"{start} and {places[used + count - 1]}. Do not split an image's placeholder."
            )
        parts.append(_run(counter, start - at))
        counter += start - at
        sides = (frames, height // merge, width // merge)
        axes = torch.meshgrid(*(torch.arange(side) for side in sides), indexing="ij")
        parts.append(torch.stack([axis.reshape(-1) for axis in axes]) + counter)
        counter += max(sides)
        at, used = start + count, used + count
    return [*parts, _run(counter, len(ids) - at)]


def _run(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count).expand(3, count)


def rope_tables(positions: Tensor, config: Qwen3VLTextConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotation of each token, float32 [..., head_dim].

    Frequency i turns with the row position when i mod 3 is 1 and i < 3 * mrope_section[1], with
    the column position when i mod 3 is 2 and i < 3 * mrope_section[2], else with the time position.
    Shapes: positions int64 [3, ...]. Both halves of a table are equal (rotation by halves).
    """
    half = config.head_dim // 2
    even = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / config.rope_theta ** (even / config.head_dim)
    axis_of = torch.zeros(half, dtype=torch.int64)
    for axis in (1, 2):
        axis_of[axis : 3 * config.mrope_section[axis] : 3] = axis
    turned = positions.float().movedim(0, -1)[..., axis_of] * frequencies
    angles = torch.cat((turned, turned), dim=-1)
    return angles.cos(), angles.sin()
