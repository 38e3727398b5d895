"""Packs the valid tokens of a batch and says which of them every part of the network sees.

All rows are packed into one list of tokens; padding and absent images are left out here. Which
tokens are text and which are image is resolved into index lists, so nobody multiplies by a mask.
With static shapes the lists are padded to their buckets and surplus entries write into a sentinel
slot nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowShape:
    """Capacities of one row of a cache.

    images; patches: of all its images; image_patches: of its largest image; text: tokens that are
    no image tokens; merge: patches per image token.
    even: every row has ``images`` images of ``image_patches`` patches each.
    padded: with official padding, the length every row's sequence is padded to; else 0.
    """

    images: int
    patches: int
    image_patches: int
    text: int
    merge: int
    even: bool = False
    padded: int = 0

    @property
    def image_tokens(self) -> int:
        return self.patches // self.merge

    @property
    def tokens(self) -> int:
        """Largest number of valid tokens."""
        return self.padded or self.text + self.image_tokens


@dataclass(frozen=True, slots=True)
class Places:
    """Where packed entries lie in a padded [rows, stride] layout. CPU tensors.

    slots [N] int64; lens [rows] int64: entries per row; longest of them.
    uniform: the length when all rows are equally long and shapes are exact, else None.
    """

    slots: Tensor
    lens: Tensor
    longest: int
    uniform: int | None

    def mask(self, stride: int) -> Tensor:
        """Return which of ``stride`` places of each row are taken, bool [rows, stride]."""
        return torch.arange(stride)[None] < self.lens[:, None]


@dataclass(frozen=True, slots=True)
class Keys:
    """The tokens one group of cross-attending blocks sees: where they come from and go to."""

    index: Tensor
    places: Places


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Index lists of one batch (CPU int64 tensors) and the shapes they lead to.

    sequence: places of the packed tokens.
    padded [rows * S]: with official padding, the source of every place of the padded layout in
        cat(packed tokens, one padding token); None without.
    keys: per group of cross-attending blocks; indices count what the VL layers work on.
    """

    sequence: Places
    padded: Tensor | None
    keys: dict[str, Keys]
    rows: int


def plan_batch(
    tokens: Tensor,
    token_len: Tensor,
    image_token: int,
    shape: RowShape,
    groups: Sequence[str],
    *,
    static: bool,
) -> BatchPlan:
    """Return the plan of the rows given.

    tokens int64 [rows, n] right padded; token_len int64 [rows].
    groups: of ``text``, ``image``, ``all``.  static: pad every list to its bucket.
    """
    rows = tokens.shape[0]
    valid = torch.arange(tokens.shape[1])[None] < token_len[:, None]
    packed = tokens[valid]
    row_of = torch.arange(rows).repeat_interleave(token_len)
    is_image = packed == image_token
    sequence = _places(row_of, token_len, shape.tokens, static)
    image_at, text_at = is_image.nonzero().flatten(), (~is_image).nonzero().flatten()
    total = int(packed.numel())
    padded, work = None, torch.arange(total)
    if shape.padded:
        padding = rows * shape.tokens if static else total  # behind all packed tokens
        padded, work = _padded_sequence(token_len, row_of, shape.padded, padding)
        everything = torch.arange(rows * shape.padded)
        all_rows = torch.arange(rows).repeat_interleave(shape.padded)
    else:
        everything, all_rows = work, row_of
    members = {
        "text": (work[text_at], row_of[text_at], shape.padded or shape.text),
        "image": (work[image_at], row_of[image_at], shape.image_tokens),
        "all": (everything, all_rows, shape.tokens),
    }
    keys = {group: _keys(*members[group], rows=rows, static=static) for group in groups}
    return BatchPlan(sequence, padded, keys, rows)


def group_capacity(group: str, shape: RowShape) -> int:
    """Return the keys one row of a group may have."""
    sizes = {
        "text": shape.padded or shape.text,
        "image": shape.image_tokens,
        "all": shape.tokens,
    }
    return sizes[group]


def _padded_sequence(
    token_len: Tensor, row_of: Tensor, stride: int, padding: int
) -> tuple[Tensor, Tensor]:
    """Return the source of each padded place, and the place of each packed token.

    padding: source of the places without a token.

    Padding stands on the left, as the official tokenizer puts it; nothing but the order of sums
    depends on the side.
    """
    start = torch.cumsum(token_len, 0) - token_len
    within = torch.arange(row_of.numel()) - start[row_of]
    place = row_of * stride + (stride - token_len)[row_of] + within
    source = torch.full((token_len.numel() * stride,), padding)
    source[place] = torch.arange(row_of.numel())
    return source, place


def _keys(index: Tensor, row_of: Tensor, capacity: int, *, rows: int, static: bool) -> Keys:
    lens = torch.bincount(row_of, minlength=rows)
    # One slot more than keys per row: the sentinel of static lists.
    places = _places(row_of, lens, capacity, static, stride=capacity + 1)
    if static:
        index = _fill(index, rows * capacity, 0)
    return Keys(index, places)


def _places(
    row_of: Tensor, lens: Tensor, capacity: int, static: bool, stride: int | None = None
) -> Places:
    """Return the places of entries that come row by row.

    stride: of the layout; None = the longest row's, or ``capacity`` with static shapes, whose
    sentinel is the entry behind the layout.
    """
    longest = capacity if static else int(lens.max())
    start = torch.cumsum(lens, 0) - lens
    within = torch.arange(row_of.numel()) - start[row_of]
    step = longest if stride is None else stride
    slots = row_of * step + within
    if static:
        sentinel = lens.numel() * step if stride is None else step - 1
        slots = _fill(slots, lens.numel() * capacity, sentinel)
    same = bool((lens == lens[0]).all())
    return Places(slots, lens, longest, int(lens[0]) if same and not static else None)


def _fill(values: Tensor, size: int, fill: int) -> Tensor:
    return torch.cat([values, torch.full((size - values.numel(),), fill, dtype=values.dtype)])
