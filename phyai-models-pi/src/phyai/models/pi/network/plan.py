"""Packs the valid prefix tokens of a batch: masked cameras and padding are left out here.

The prefix of row i is its valid cameras' patches, then its valid prompt tokens; its positions run
0..len_i-1. All rows are packed into one token list, so nothing else ever reaches the vision tower
or a prefix layer. With static shapes the lists are padded to full buckets and the surplus entries
write into a sentinel slot nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefixShape:
    """Capacities of one cache.

    rows B, cameras C, patches P per camera, tokens: prompt bucket, tail: slots behind the prefix
    (state token and action tokens).
    """

    rows: int
    cameras: int
    patches: int
    tokens: int
    tail: int

    @property
    def prefix(self) -> int:
        """Largest prefix length of a row."""
        return self.cameras * self.patches + self.tokens

    @property
    def stride(self) -> int:
        """K/V slots per row; the last is the sentinel."""
        return self.prefix + self.tail + 1


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """Index lists of one batch (CPU int64 tensors) and the shapes they lead to.

    images [n]: flat camera indices (row*C + camera) to encode.
    token_ids [m]: prompt tokens to embed.
    order [N]: source of each packed token in cat(image tokens [n*P], text tokens [m]).
    positions [N]; slots [N]: K/V slot; q_slots [N]: place in the padded [B, max_len] layout.
    lens [B]: valid prefix length of each row.
    uniform: the length when all rows are equally long and shapes are exact, else None.
    valid: how many packed tokens, the first ones, are the batch's own; the rest is padding.
    """

    images: Tensor
    token_ids: Tensor
    order: Tensor
    positions: Tensor
    slots: Tensor
    q_slots: Tensor
    lens: Tensor
    rows: int
    max_len: int
    uniform: int | None
    valid: int

    @property
    def num_tokens(self) -> int:
        return int(self.order.numel())


def pack_prefix(
    image_mask: Tensor, tokens: Tensor, token_len: Tensor, shape: PrefixShape, static: bool
) -> PrefixPlan:
    """Return the plan of a batch.

    image_mask [b, C] bool; tokens [b, bucket] int64; token_len [b] int64, b <= shape.rows.
    static: pad every list to its bucket and rows to shape.rows.
    """
    batch = image_mask.shape[0]
    if static and image_mask.shape[0] < shape.rows:
        missing = shape.rows - image_mask.shape[0]
        image_mask = torch.cat([image_mask, image_mask[:1].expand(missing, -1)])
        tokens = torch.cat([tokens, tokens[:1].expand(missing, -1)])
        token_len = torch.cat([token_len, token_len[:1].expand(missing)])
    rows, cameras, patches = image_mask.shape[0], shape.cameras, shape.patches
    images = image_mask.reshape(-1).nonzero().reshape(-1)
    num_images = int(images.numel())
    token_counts = [int(n) for n in token_len]
    token_ids = torch.cat([tokens[i, :n] for i, n in enumerate(token_counts)])
    capacity_images = rows * cameras if static else num_images
    lens, order, slots, positions = [], [], [], []
    image_at, text_at = 0, capacity_images * patches
    for row in range(rows):
        image_tokens = int(image_mask[row].sum()) * patches
        length = image_tokens + token_counts[row]
        order += [
            torch.arange(image_at, image_at + image_tokens),
            torch.arange(text_at, text_at + token_counts[row]),
        ]
        image_at += image_tokens
        text_at += token_counts[row]
        places = torch.arange(length)
        positions.append(places)
        slots.append(places + row * shape.stride)
        lens.append(length)
    max_len = shape.prefix if static else max(lens)
    q_slots = [p + row * max_len for row, p in enumerate(positions)]
    uniform = lens[0] if not static and len(set(lens)) == 1 else None
    plan = PrefixPlan(
        images,
        token_ids,
        torch.cat(order),
        torch.cat(positions),
        torch.cat(slots),
        torch.cat(q_slots),
        torch.tensor(lens),
        rows,
        max_len,
        uniform,
        sum(lens[:batch]),
    )
    return _padded(plan, shape) if static else plan


def _padded(plan: PrefixPlan, shape: PrefixShape) -> PrefixPlan:
    """Return the plan with every list at its bucket's size; surplus tokens go to the sentinels."""

    def pad(values: Tensor, size: int, fill: int) -> Tensor:
        return torch.cat([values, torch.full((size - values.numel(),), fill, dtype=values.dtype)])

    total = shape.rows * shape.prefix
    return PrefixPlan(
        pad(plan.images, shape.rows * shape.cameras, 0),
        pad(plan.token_ids, shape.rows * shape.tokens, 0),
        pad(plan.order, total, 0),
        pad(plan.positions, total, 0),
        pad(plan.slots, total, shape.stride - 1),
        pad(plan.q_slots, total, shape.rows * plan.max_len),
        plan.lens,
        plan.rows,
        plan.max_len,
        None,
        plan.valid,
    )
