"""Layouts of token rows for the decoder: packed tokens, their places, their rotation tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phyai.backbones.qwen3_vl import TextLayout
from phyai.models.minicpm_robot.config import TextSizes


def mrope_tables(positions: Tensor, config: TextSizes) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each token's rotation, float32 [..., rotary_dim].

    Frequency i turns with axis i mod 3 (time, row, column) below 3 * mrope_section[axis], else with
    the time axis; equal positions on all axes give ordinary rotary tables. Both halves of a table
    are equal.
    Shapes: positions int64 [3, ...].
    """
    dim = config.rotary_dim
    even = torch.arange(0, dim, 2, dtype=torch.float32)
    frequencies = 1.0 / config.rope_theta ** (even / dim)
    axis_of = torch.zeros(dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        axis_of[axis : 3 * config.mrope_section[axis] : 3] = axis
    angles = positions.float().movedim(0, -1)[..., axis_of] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def text_layout(
    rows: Sequence[Tensor], config: TextSizes, image_token_id: int, *, start: int = 0
) -> TextLayout:
    """Return the layout of prompts: exact, nothing is padded; ``taps`` means nothing here.

    Positions count 0, 1, ... over text and image tokens alike; start: those of rows that continue
    rows of so many tokens.
    Shapes: rows int64 [S_i].

    >>> layout = text_layout([torch.tensor([5, 9, 6]), torch.tensor([7])], TextSizes(), 9)
    >>> layout.order.tolist(), layout.slots.tolist(), layout.dense, layout.cos.shape
    ([1, 0, 3, 4], [0, 1, 2, 3], False, torch.Size([4, 64]))
    """
    ids = torch.cat([torch.zeros(0, dtype=torch.int64), *rows])
    lengths = [len(row) for row in rows]
    longest = max(lengths, default=0)
    places = torch.arange(longest)
    own = [places[:count] for count in lengths]
    cos, sin = mrope_tables((torch.cat([places[:0], *own]) + start).expand(3, -1), config)
    is_image = ids == image_token_id
    images = int(is_image.sum())
    return TextLayout(
        token_ids=ids,
        order=torch.where(is_image, is_image.cumsum(0) - 1, torch.arange(len(ids)) + images),
        taps=torch.full((len(ids),), images),
        slots=torch.cat([places[:0], *(part + i * longest for i, part in enumerate(own))]),
        cos=cos,
        sin=sin,
        rows=len(lengths),
        longest=longest,
        tokens=len(ids),
        image_tokens=images,
        dense=len(set(lengths)) <= 1,
    )


def static_layout(
    layout: TextLayout, tokens: int, image_tokens: int, rows: int, longest: int
) -> TextLayout:
    """Return an exact layout at the sizes of a bucket, for regions that are captured.

    Which path it makes the decoder take hangs on these sizes alone; padding tokens are told by
    their place, which is none.
    Raises: CapacityError when the batch does not fit.
    """
    padded = layout.padded(tokens, image_tokens, rows, longest)
    slots = padded.slots.clone()
    slots[len(layout.token_ids) :] = rows * longest
    return replace(padded, slots=slots, dense=rows == 1 and tokens == longest)


def own_tokens(layout: TextLayout) -> Tensor:
    """Return which packed tokens are no padding, bool [M]."""
    return layout.slots < layout.rows * layout.longest


def row_lengths(layout: TextLayout) -> Tensor:
    """Return the tokens of each row, int64 [B]."""
    row = layout.slots // max(layout.longest, 1)
    count = torch.zeros(layout.rows + 1, dtype=torch.int64, device=row.device)
    return count.index_add(0, row, torch.ones_like(row))[:-1]


def to_places(packed: Tensor, layout: TextLayout) -> Tensor:
    """Return packed [M, ...] as rows [B, S, ...]; places without a token hold zeros."""
    places = (layout.rows, layout.longest)
    if layout.dense:
        return packed.reshape(*places, *packed.shape[1:])
    size = layout.rows * layout.longest
    # one place more, where padding tokens go
    padded = packed.new_zeros(size + 1, *packed.shape[1:])
    padded.index_copy_(0, layout.slots, packed)
    return padded[:-1].view(*places, *packed.shape[1:])


def from_places(rows: Tensor, layout: TextLayout) -> Tensor:
    """Return rows [B, S, ...] as packed [M, ...]; padding tokens get those of the last place."""
    flat = rows.flatten(0, 1)
    if layout.dense:
        return flat
    return flat.index_select(0, layout.slots.clamp(max=layout.rows * layout.longest - 1))
