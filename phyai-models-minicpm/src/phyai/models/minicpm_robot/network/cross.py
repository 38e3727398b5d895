"""Keys and values of the prefix for the cross-attending blocks, once per request.

Tokens arrive packed; each row's keys go to places of its own, and a row sees only those. All
blocks' keys and values come out of one matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.errors import CapacityError
from phyai.layers import Linear, Placement
from phyai.models.minicpm_robot.config import HeadSizes
from phyai.timers import Profile
from phyai.types import BufferSpec

HEAD = "action_head"
"""Prefix of the head's tensors in a checkpoint."""

BLOCKS = f"{HEAD}.model.transformer_blocks"


@dataclass(frozen=True, slots=True)
class CrossPlan:
    """How many keys the rows of a batch have.

    longest: keys a row may see.  uniform: every row sees exactly ``longest``: no mask is read.
    """

    longest: int
    uniform: bool


def cross_blocks(config: HeadSizes) -> tuple[int, ...]:
    """Return the blocks that attend to the prefix, the even ones; the others to their own tokens.

    >>> cross_blocks(HeadSizes(num_layers=5))
    (0, 2, 4)
    """
    return tuple(range(0, config.num_layers, 2))


class CrossKeys(nn.Module):
    """The key and value projections of all cross-attending blocks.

    Writes cache buffers ``cross.k.<block>``, ``cross.v.<block>`` [B, tokens + 1, H, D]: one place
    more than keys, for the tokens that only fill a bucket.
    """

    def __init__(self, config: HeadSizes, at: Placement, profile: Profile) -> None:
        super().__init__()
        self.blocks, self.profile, self.dtype = cross_blocks(config), profile, at.dtype
        self.heads, self.head_dim = config.num_attention_heads, config.attention_head_dim
        legs = [f"{BLOCKS}.{i}.attn1.to_{leg}" for i in self.blocks for leg in "kv"]
        sizes = [config.width] * len(legs)
        self.project = Linear(legs, config.cross_attention_dim, sizes, at, bias=True)
        self._write = at.select("kv_write")

    def cache_buffers(self, tokens: int) -> Mapping[str, BufferSpec]:
        """Return the buffers for rows of at most so many prefix tokens."""
        kv = BufferSpec((tokens + 1, self.heads, self.head_dim), self.dtype)
        return {
            "cross.slots": BufferSpec((tokens,), torch.int64),
            "cross.mask": BufferSpec((tokens,), torch.bool),
            **{f"cross.{leg}.{block}": kv for block in self.blocks for leg in "kv"},
        }

    def load_plan(self, cache: Cache, lens: Sequence[int], *, static: bool) -> CrossPlan:
        """Put the places of the tokens into the cache; see ``MiniCPMDenoiser.load_plan``."""
        mask, slots = cache["cross.mask"], cache["cross.slots"].view(-1)
        rows, tokens = mask.shape
        if len(lens) > rows or max(lens, default=0) > tokens:
            raise CapacityError(
                f"prefix rows must fit the cache of {rows} rows of {tokens} tokens; got lengths "
                f"{list(lens)}. Use a larger bucket."
            )
        stride, places = tokens + 1, torch.arange(tokens)
        own = [places[:n] + row * stride for row, n in enumerate(lens)]
        packed = torch.cat(own) if own else places[:0]
        taken = torch.zeros(rows, dtype=torch.int64)
        taken[: len(lens)] = torch.tensor(list(lens), dtype=torch.int64)
        slots.fill_(stride - 1)
        slots[: len(packed)].copy_(packed)
        mask.copy_(places[None] < taken[:, None])
        longest = tokens if static else max(lens, default=0)
        return CrossPlan(longest, not static and all(n == longest for n in lens))

    def encode(self, cache: Cache, features: Tensor) -> None:
        """Fill keys and values from features [M, cross_attention_dim]; once per request."""
        count = features.shape[0]
        slots = cache["cross.slots"].view(-1)[:count]
        self.profile.count("cross_kv_calls")
        self.profile.count("cross_kv_tokens", count)
        both = self.project(features.to(self.dtype))
        parts = both.view(count, len(self.blocks), 2, self.heads, self.head_dim)
        for i, block in enumerate(self.blocks):
            for j, leg in enumerate("kv"):
                target = cache[f"cross.{leg}.{block}"].flatten(0, 1)
                self._write(target, slots, parts[:, i, j])


class CrossReader:
    """Attention of queries over the keys of their rows."""

    def __init__(self, config: HeadSizes, at: Placement) -> None:
        self.scale = config.attention_head_dim**-0.5
        facts = {
            "head_dim": config.attention_head_dim,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_attention_heads,
            "queries": config.num_target_vision_tokens + config.action_horizon,
        }
        self._dense = at.select("attention", masked=False, **facts)
        self._masked = at.select("attention", masked=True, **facts)

    def attend(self, cache: Cache, block: int, q: Tensor) -> Tensor:
        """Return attention [B, T, H, D] of q [B, T, H, D]."""
        plan: CrossPlan = cache.plan.cross
        k, v = (cache[f"cross.{leg}.{block}"][:, : plan.longest] for leg in "kv")
        if plan.uniform:
            out: Tensor = self._dense(q, k, v, self.scale)
            return out
        mask = cache["cross.mask"][:, : plan.longest]
        out = self._masked(q, k, v, self.scale, key_mask=mask)
        return out
