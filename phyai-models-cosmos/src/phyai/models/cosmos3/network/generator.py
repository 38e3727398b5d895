"""The media expert (GEN): every media token attends to the text and to all media tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Placement, RMSNorm
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.network.layer import ExpertLayer, media_names
from phyai.models.cosmos3.network.layout import MediaLayout, TextPlan
from phyai.models.cosmos3.network.positions import text_positions
from phyai.models.cosmos3.network.recording import first_step, record, records
from phyai.models.cosmos3.network.rope import MRope
from phyai.timers import Profile
from phyai.types import BufferSpec, Key, Step


class Generator(nn.Module):
    """Layers and final norm over media tokens [B, N, W].

    Buffers ``gen.k``, ``gen.v`` [B, n + N, K, D] hold the keys and values of one layer at a time:
    the text's in front, the media's behind each row's text. Where rows have shorter texts than the
    bucket, ``gen.key_mask`` hides what is left over.
    """

    def __init__(self, config: Cosmos3Config, at: Placement, profile: Profile) -> None:
        super().__init__()
        self.config, self.profile, self.dtype = config, profile, at.dtype
        stack = at.with_role("expert")
        self.layers = nn.ModuleList(
            ExpertLayer(media_names(i), config, stack) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(
            "norm_moe_gen", config.hidden_size, config.rms_norm_eps, stack, offset=0.0
        )
        self.rope = MRope(config, stack)
        first = self.layers[0]
        assert isinstance(first, ExpertLayer)
        self.kv_heads, self.scale = first.shards.kv_heads, config.head_dim**-0.5
        facts = {
            "head_dim": config.head_dim,
            "heads": first.shards.heads,
            "kv_heads": self.kv_heads,
        }
        self._dense = stack.select("attention", masked=False, **facts)
        self._masked = stack.select("attention", masked=True, **facts)
        self._write = stack.select("kv_write")

    def cache_buffers(self, key: Key) -> Mapping[str, BufferSpec]:
        layout, head_dim = MediaLayout.of(key, self.config), self.config.head_dim
        kv = BufferSpec((layout.keys, self.kv_heads, head_dim), self.dtype, scratch=True)
        rotation = BufferSpec((layout.tokens, head_dim), self.dtype)
        return {
            "gen.k": kv,
            "gen.v": kv,
            "gen.cos": rotation,
            "gen.sin": rotation,
            "gen.slots": BufferSpec((layout.tokens,), torch.int64),
            "gen.key_mask": BufferSpec((layout.keys,), torch.bool),
        }

    def encode(self, cache: Cache) -> None:
        """Fill rotation, slots and key mask; inputs ``positions`` [B, 3, N] and ``token_len``."""
        lens, positions = cache.inputs["token_len"], cache.inputs["positions"]
        places = torch.arange(cache["gen.k"].shape[1], device=lens.device)
        behind = lens[:, None] + places[: positions.shape[2]]
        row_start = torch.arange(lens.shape[0], device=lens.device)[:, None] * len(places)
        cache["gen.slots"].copy_(behind + row_start)
        visible = places < lens[:, None] + positions.shape[2]
        cache["gen.key_mask"].copy_(visible)
        for name in ("gen.k", "gen.v"):  # weight 0 of a NaN that another request left is NaN
            cache[name].masked_fill_(~visible[..., None, None], 0.0)
        absolute = positions.clone()
        absolute[:, 0] += (lens + self.config.margin).float()[:, None]
        cos, sin = self.rope(absolute)
        cache["gen.cos"].copy_(cos)
        cache["gen.sin"].copy_(sin)
        if records(self.profile):
            plan: TextPlan = cache.plan
            text = text_positions(max(plan.lens)).to(absolute.device)
            joined = torch.cat([text.expand(len(absolute), -1, -1), absolute], dim=2)
            record(self.profile, cache, "position_ids", joined[: cache.rows])

    def forward(self, x: Tensor, step: Step, cache: Cache) -> Tensor:
        """Return the final norm [B, N, W] of tokens x."""
        cos, sin, y = cache["gen.cos"], cache["gen.sin"], None
        watched = records(self.profile) and first_step(step)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, ExpertLayer)
            x, q, k, v = layer.project(x, y, cos, sin)
            mixed = self._attend(q, k, v, cache, i)
            if watched and i == 0:
                self._record_first(cache, q, mixed)
            x, y = layer.finish(x, mixed)
            if watched:
                record(self.profile, cache, f"gen.{i}.out", (x + y)[: cache.rows])
        assert y is not None
        out: Tensor = self.norm(x, y)[1]
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, layer: int) -> Tensor:
        """Return attention [B, N, H, D] of media queries over text and media of layer ``layer``."""
        plan: TextPlan = cache.plan
        slots = cache["gen.slots"].view(-1)
        both = []
        for name, media in (("k", k), ("v", v)):
            text, joined = cache[f"und.{name}"][:, layer], cache[f"gen.{name}"]
            joined[:, : text.shape[1]].copy_(text)  # before the media: they overwrite its padding
            self._write(joined.flatten(0, 1), slots, media.flatten(0, 1))
            both.append(joined)
        if plan.uniform:
            out: Tensor = self._dense(q, *both, self.scale)
            return out
        out = self._masked(q, *both, self.scale, key_mask=cache["gen.key_mask"])
        return out

    def _record_first(self, cache: Cache, q: Tensor, mixed: Tensor) -> None:
        plan: TextPlan = cache.plan
        keys = cache["gen.k"][:, : max(plan.lens) + q.shape[1]]  # without those of padded texts
        for name, value in (("q", q), ("k_all", keys), ("attn_out", mixed)):
            record(self.profile, cache, f"gen.0.{name}", value[: cache.rows])
