"""Keys and values of the backbone's tokens for the cross-attending blocks, once per request.

Blocks are grouped by what they see: text tokens, image tokens, or all. The tokens of a group are
an index list; its blocks' keys and values come out of one matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Linear, Placement
from phyai.models.gr00t.checkpoint import HEAD
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.network.plan import BatchPlan, Keys, RowShape, group_capacity
from phyai.timers import Profile
from phyai.types import BufferSpec


def key_groups(config: GrootConfig) -> dict[str, tuple[int, ...]]:
    """Return group -> blocks: every ``attend_text_every_n_blocks``-th even block sees text.

    >>> from phyai.models.gr00t.config import GrootConfig
    >>> key_groups(GrootConfig.released())["text"]
    (0, 4, 8, 12, 16, 20, 24, 28)
    """
    even = range(0, config.diffusion_model_cfg.num_layers, 2)
    if not config.use_alternate_vl_dit:
        return {"all": tuple(even)}
    every = 2 * config.attend_text_every_n_blocks
    groups = {
        "text": tuple(i for i in even if i % every == 0),
        "image": tuple(i for i in even if i % every),
    }
    return {name: blocks for name, blocks in groups.items() if blocks}


class CrossReader:
    """Attention of queries over the keys of one group, wherever a batch has them in the cache."""

    def __init__(self, group: str, config: GrootConfig, at: Placement) -> None:
        dit = config.diffusion_model_cfg
        self.group, self.scale = group, dit.attention_head_dim**-0.5
        facts = {
            "head_dim": dit.attention_head_dim,
            "heads": dit.num_attention_heads,
            "kv_heads": dit.num_attention_heads,
            "queries": 1 + config.action_horizon,
        }
        self._dense = at.select("attention", masked=False, **facts)
        self._masked = at.select("attention", masked=True, **facts)

    def attend(self, cache: Cache, block: int, q: Tensor) -> Tensor:
        """Return attention [B, T, H, D] of q [B, T, H, D]."""
        plan: BatchPlan = cache.plan.batch
        places = plan.keys[self.group].places
        seen = places.longest
        k, v = cache[f"cross.k.{block}"][:, :seen], cache[f"cross.v.{block}"][:, :seen]
        if places.uniform is not None:
            out: Tensor = self._dense(q, k, v, self.scale)
            return out
        mask = cache[f"cross.{self.group}.mask"][:, :seen]
        out = self._masked(q, k, v, self.scale, key_mask=mask)
        return out


class CrossKeys(nn.Module):
    """The key and value projections of one group's blocks.

    Writes cache buffers ``cross.k.<block>``, ``cross.v.<block>`` [B, keys + 1, H, D].
    """

    def __init__(
        self,
        group: str,
        blocks: tuple[int, ...],
        config: GrootConfig,
        at: Placement,
        profile: Profile,
    ) -> None:
        super().__init__()
        dit = config.diffusion_model_cfg
        self.group, self.blocks, self.profile, self.dtype = group, blocks, profile, at.dtype
        self.heads, self.head_dim = dit.num_attention_heads, dit.attention_head_dim
        legs = [
            f"{HEAD}.model.transformer_blocks.{i}.attn1.to_{leg}" for i in blocks for leg in "kv"
        ]
        self.project = Linear(
            legs, config.backbone_embedding_dim, [dit.width] * len(legs), at, bias=True
        )
        self.reader = CrossReader(group, config, at)
        self._write = at.select("kv_write")

    def cache_buffers(self, shape: RowShape) -> Mapping[str, BufferSpec]:
        capacity = group_capacity(self.group, shape)
        kv = BufferSpec((capacity + 1, self.heads, self.head_dim), self.dtype)
        specs = {f"cross.{leg}.{block}": kv for block in self.blocks for leg in "kv"}
        specs[f"cross.{self.group}.mask"] = BufferSpec((capacity,), torch.bool)
        for name in ("index", "slots"):
            specs[f"cross.{self.group}.{name}"] = BufferSpec((capacity,), torch.int64)
        return specs

    def load_plan(self, cache: Cache, keys: Keys) -> None:
        """Put the group's lists into the cache; host side."""
        name = f"cross.{self.group}"
        mask = cache[f"{name}.mask"]
        mask.copy_(keys.places.mask(mask.shape[1]))
        for part, values in (("index", keys.index), ("slots", keys.places.slots)):
            cache[f"{name}.{part}"].view(-1)[: values.numel()].copy_(values)

    def encode(self, cache: Cache, features: Tensor) -> None:
        """Fill keys and values from the tokens' features [N, W]; once per request."""
        count = cache.plan.batch.keys[self.group].index.numel()
        index, slots = (
            cache[f"cross.{self.group}.{part}"].view(-1)[:count] for part in ("index", "slots")
        )
        self.profile.count(f"cross_kv_tokens.{self.group}", count)
        both = self.project(features.index_select(0, index))
        parts = both.view(count, len(self.blocks), 2, self.heads, self.head_dim)
        for i, block in enumerate(self.blocks):
            for j, leg in enumerate("kv"):
                target = cache[f"cross.{leg}.{block}"].flatten(0, 1)
                self._write(target, slots, parts[:, i, j])
