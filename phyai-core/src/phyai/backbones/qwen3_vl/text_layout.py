"""What a language model must know about the tokens of a batch: index lists, tables. Host only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phyai.backbones.qwen3_vl.config import Qwen3VLTextConfig
from phyai.backbones.qwen3_vl.positions import Grid, rope_tables, text_positions
from phyai.errors import CapacityError


@dataclass(frozen=True, slots=True)
class TextLayout:
    """Tensors and sizes of one batch of tokens.

    M tokens, packed: those of the first row first, without padding between rows. V image tokens in
    the same order. B rows of at most S tokens.

    token_ids int64 [M]; image tokens too.
    order int64 [M]: source of the token's input in cat(image features [V], embeddings [M]).
    taps int64 [M]: source of what deepstack adds, in cat(features [V], one row of zeros).
    slots int64 [M]: place in the padded [B * S]; padding tokens have B * S.
    cos, sin float32 [M, head_dim]: rotation of the token.
    tokens: how many tokens, the first ones, are the batch's own; the rest is padding.
    image_tokens: V.
    dense: token m stands at place m: nothing is moved.
    """

    token_ids: Tensor
    order: Tensor
    taps: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    rows: int
    longest: int
    tokens: int
    image_tokens: int
    dense: bool

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, for buffers that graphs read."""
        names = ("token_ids", "order", "taps", "slots", "cos", "sin")
        return {name: getattr(self, name) for name in names}

    def on(self, tensors: Mapping[str, Tensor]) -> TextLayout:
        """Return the layout with other tensors of the same shapes, such as those of a device."""
        changed: dict[str, Any] = dict(tensors)
        return replace(self, **changed)

    def to(self, device: torch.device) -> TextLayout:
        return self.on({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def padded(self, tokens: int, image_tokens: int, rows: int, longest: int) -> TextLayout:
        """Return the layout at the sizes of a bucket: M, V, B and S.

        Raises: CapacityError when the batch does not fit.
        """
        wanted = {"tokens": tokens, "image_tokens": image_tokens, "rows": rows, "longest": longest}
        low = [name for name, size in wanted.items() if getattr(self, name) > size]
        if low:
            raise CapacityError(
                f"prompt must fit the bucket of {wanted}; got "
                f"{ {name: getattr(self, name) for name in low} }. Use a larger bucket."
            )
        count, own = len(self.token_ids), self.image_tokens
        more, own_longest = tokens - count, max(self.longest, 1)
        text = self.order >= own
        order = torch.where(text, self.order - own + image_tokens, self.order)
        taps = torch.where(self.taps == own, image_tokens, self.taps)
        # Behind a single row its padding tokens take the places that follow: still nothing moves.
        single = rows == 1 and tokens == longest
        dense = self.dense and (single or (longest == self.longest and tokens == rows * longest))
        slots = self.slots // own_longest * longest + self.slots % own_longest
        fill = torch.arange(count, tokens) if dense else torch.full((more,), rows * longest)
        return TextLayout(
            token_ids=torch.cat([self.token_ids, self.token_ids.new_zeros(more)]),
            order=torch.cat([order, torch.arange(count, tokens) + image_tokens]),
            taps=torch.cat([taps, torch.full((more,), image_tokens)]),
            slots=torch.cat([slots, fill]),
            cos=torch.cat([self.cos, self.cos.new_ones(more, self.cos.shape[1])]),
            sin=torch.cat([self.sin, self.sin.new_zeros(more, self.sin.shape[1])]),
            rows=rows,
            longest=longest,
            tokens=self.tokens,
            image_tokens=image_tokens,
            dense=dense,
        )


def text_layout(
    rows: Sequence[Tensor],
    grids: Sequence[Sequence[Grid]],
    config: Qwen3VLTextConfig,
    *,
    image_token_id: int,
    merge: int = 2,
) -> TextLayout:
    """Return the layout of prompts and the images in them.

    rows: int64 [S_i], without padding; grids: the images of each row, in patches, in order; merge:
    patches per side of an image token.
    Raises: RequestError when a row's image tokens are not those of its grids.

    >>> import torch
    >>> from phyai.backbones.qwen3_vl import Qwen3VLTextConfig, text_layout
    >>> config = Qwen3VLTextConfig(16, 64, 2, 4, 2, 16, 96, (4, 2, 2))
    >>> layout = text_layout([torch.tensor([5, 9, 6])], [[(1, 2, 2)]], config, image_token_id=9)
    >>> layout.order.tolist(), layout.taps.tolist(), layout.dense
    ([1, 0, 3], [1, 0, 1], True)
    """
    positions = text_positions(rows, grids, image_token_id, merge)
    cos, sin = rope_tables(positions, config)
    ids = torch.cat([torch.zeros(0, dtype=torch.int64), *rows])
    is_image = ids == image_token_id
    number = is_image.cumsum(0) - 1
    images = int(is_image.sum())
    lengths = [len(row) for row in rows]
    longest = max(lengths, default=0)
    places = torch.arange(longest)
    return TextLayout(
        token_ids=ids,
        order=torch.where(is_image, number, torch.arange(len(ids)) + images),
        taps=torch.where(is_image, number, images),
        slots=torch.cat([places[:0], *(places[:n] + i * longest for i, n in enumerate(lengths))]),
        cos=cos,
        sin=sin,
        rows=len(lengths),
        longest=longest,
        tokens=len(ids),
        image_tokens=images,
        dense=len(set(lengths)) <= 1,
    )
