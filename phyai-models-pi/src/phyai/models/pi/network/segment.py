"""Tokens behind the prefix: where their keys go, what they see, how they are rotated.

pi0.5 has one segment (the actions), pi0 two: the state token, once per request, then the actions.
A segment's tokens see the row's prefix, the segments before it and each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from phyai.cache import Cache
from phyai.layers import Placement
from phyai.models.pi.config import GemmaConfig
from phyai.models.pi.network.gemma import Rotation, Target, head_shards
from phyai.models.pi.network.plan import PrefixPlan
from phyai.types import BufferSpec


class Segment:
    """``count`` tokens per row, ``offset`` slots behind the row's last valid prefix token."""

    def __init__(
        self,
        name: str,
        offset: int,
        count: int,
        config: GemmaConfig,
        at: Placement,
        rope_freq: torch.dtype,
    ) -> None:
        self.name, self.offset, self.count, self.rope_freq = name, offset, count, rope_freq
        self.head_dim, self.dtype, self.theta = config.head_dim, at.dtype, config.rope_theta
        self.scale = config.head_dim**-0.5
        self._rope: Callable[..., tuple[Tensor, Tensor]] = at.select("rope_cos_sin")
        shards = head_shards(config, at)
        facts = {
            "head_dim": config.head_dim,
            "heads": shards.heads,
            "kv_heads": shards.kv_heads,
            "queries": count,
        }
        self._dense = at.select("attention", masked=False, **facts)
        self._masked = at.select("attention", masked=True, **facts)

    def cache_buffers(self, stride: int) -> Mapping[str, BufferSpec]:
        name, rotation = self.name, BufferSpec((self.count, self.head_dim), self.dtype)
        return {
            f"{name}.cos": rotation,
            f"{name}.sin": rotation,
            f"{name}.slots": BufferSpec((self.count,), torch.int64),
            f"{name}.key_mask": BufferSpec((stride - 1,), torch.bool),
        }

    def encode(self, cache: Cache) -> None:
        """Fill rotation, slots and key mask from ``prefix.lens``; once per request."""
        lens, stride = cache["prefix.lens"], cache["k.0"].shape[1]
        places = torch.arange(self.count, device=lens.device)
        positions = lens[:, None] + self.offset + places
        cos, sin = self._rope(positions, self.head_dim, self.theta, self.dtype, self.rope_freq)
        cache[f"{self.name}.cos"].copy_(cos)
        cache[f"{self.name}.sin"].copy_(sin)
        row_start = torch.arange(lens.shape[0], device=lens.device)[:, None] * stride
        cache[f"{self.name}.slots"].copy_(positions + row_start)
        visible = lens[:, None] + self.offset + self.count
        cache[f"{self.name}.key_mask"].copy_(
            torch.arange(stride - 1, device=lens.device)[None] < visible
        )

    def target(self, cache: Cache, layer: int) -> Target:
        """Return where K and V of this segment go, behind the prefix."""
        slots = cache[f"{self.name}.slots"].view(-1)
        return Target(cache[f"k.{layer}"].flatten(0, 1), cache[f"v.{layer}"].flatten(0, 1), slots)

    def rotation(self, cache: Cache) -> Rotation:
        return Rotation(cache[f"{self.name}.cos"], cache[f"{self.name}.sin"])

    def attend(self, cache: Cache, layer: int, q: Tensor) -> Tensor:
        """Return attention of q [B, count, H, D] over the prefix and what stands behind it."""
        plan: PrefixPlan = cache.plan
        seen = plan.max_len + self.offset + self.count
        k, v = cache[f"k.{layer}"][:, :seen], cache[f"v.{layer}"][:, :seen]
        if plan.uniform is not None:
            out: Tensor = self._dense(q, k, v, self.scale)
            return out
        mask = cache[f"{self.name}.key_mask"][:, :seen]
        out = self._masked(q, k, v, self.scale, key_mask=mask)
        return out
