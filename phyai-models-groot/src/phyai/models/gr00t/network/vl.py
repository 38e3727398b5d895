"""The head's view of the backbone: a norm and self-attention over the tokens of each row.

The official code attends without a mask, so the padding of shorter prompts is seen by the tokens
of its row. Here a row sees its own valid tokens, unless the plan has official padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import LayerNorm, Linear, Placement
from phyai.models.gr00t.checkpoint import HEAD
from phyai.models.gr00t.config import GrootConfig, SelfAttentionConfig
from phyai.models.gr00t.network.blocks import EPS, FeedForward, Stream
from phyai.models.gr00t.network.plan import BatchPlan, RowShape
from phyai.timers import Profile
from phyai.types import BufferSpec


class VLBlock(nn.Module):
    """h += attention(LN(h)); h += feed-forward(LN(h)) on packed tokens."""

    def __init__(self, index: int, config: SelfAttentionConfig, at: Placement) -> None:
        super().__init__()
        name, width = f"{HEAD}.vl_self_attention.transformer_blocks.{index}", config.width
        self.heads, self.head_dim = config.num_attention_heads, config.attention_head_dim
        self.norm1 = LayerNorm(f"{name}.norm1", width, EPS, at)
        legs = [f"{name}.attn1.{leg}" for leg in ("to_q", "to_k", "to_v")]
        self.qkv = Linear(legs, width, [width] * 3, at, bias=True)
        self.out = Linear(f"{name}.attn1.to_out.0", width, width, at, bias=True)
        self.norm3 = LayerNorm(f"{name}.norm3", width, EPS, at)
        self.ff = FeedForward(f"{name}.ff", width, at)

    def forward(self, stream: Stream, attend: Callable[[Tensor], Tensor]) -> Stream:
        """stream [N, W]; attend: qkv [N, 3, H, D] -> [N, H, D]."""
        x = stream.x
        if stream.y is None:
            n = self.norm1(x)
        else:
            x, n = self.norm1(x, stream.y)
        qkv = self.qkv(n).view(-1, 3, self.heads, self.head_dim)
        x, n = self.norm3(x, self.out(attend(qkv).flatten(-2)))
        return Stream(x, self.ff(n))


class VLProjection(nn.Module):
    """Layer norm and self-attention blocks over the backbone's features [N, W]."""

    def __init__(self, config: GrootConfig, at: Placement, profile: Profile) -> None:
        super().__init__()
        self.profile = profile
        width, vl = config.backbone_embedding_dim, config.vl_self_attention_cfg
        self.norm = LayerNorm(f"{HEAD}.vlln", width, EPS, at) if config.use_vlln else None
        layers = 0 if vl is None else vl.num_layers
        self.blocks = nn.ModuleList(VLBlock(i, vl, at) for i in range(layers) if vl is not None)
        if vl is not None:
            facts = {
                "head_dim": vl.attention_head_dim,
                "heads": vl.num_attention_heads,
                "kv_heads": vl.num_attention_heads,
            }
            self.scale = vl.attention_head_dim**-0.5
            self._dense = at.select("attention", masked=False, **facts)
            self._masked = at.select("attention", masked=True, **facts)

    def cache_buffers(self, shape: RowShape) -> Mapping[str, BufferSpec]:
        places = {"vl.mask": BufferSpec((shape.tokens,), torch.bool)}
        padded = {"vl.padded": BufferSpec((shape.padded,), torch.int64)} if shape.padded else {}
        return {**places, **padded}

    def load_plan(self, cache: Cache, plan: BatchPlan) -> None:
        """Put the plan's lists into the cache; host side."""
        mask = cache["vl.mask"]
        mask.copy_(plan.sequence.mask(mask.shape[1]))
        if plan.padded is not None:
            cache["vl.padded"].view(-1)[: plan.padded.numel()].copy_(plan.padded)

    def forward(self, cache: Cache, features: Tensor, see: Callable[[str, Tensor], None]) -> Tensor:
        """Return the tokens the diffusion transformer attends to, [N, W] of features [N, W].

        see: told the norm's and every block's output.
        """
        h = features if self.norm is None else self.norm(features)
        see("vlln", h)
        self.profile.count("vl_tokens", h.shape[0])
        stream = Stream(h)

        def attend(qkv: Tensor) -> Tensor:
            return self._attend(cache, qkv)

        for i, block in enumerate(self.blocks):
            stream = block(stream, attend)
            see(f"vlsa_block_{i}", stream.total())
        return stream.total()

    def _attend(self, cache: Cache, qkv: Tensor) -> Tensor:
        plan: BatchPlan = cache.plan.batch
        heads, dim = qkv.shape[2:]
        if plan.padded is not None or plan.sequence.uniform is not None:
            rows = qkv.view(plan.rows, -1, 3, heads, dim)
            out: Tensor = self._dense(*rows.unbind(2), self.scale)
            return out.flatten(0, 1)
        slots, stride = cache.plan.text.slots, plan.sequence.longest
        padded = qkv.new_zeros(plan.rows * stride + 1, 3, heads, dim)
        padded.index_copy_(0, slots, qkv)
        rows = padded[:-1].view(plan.rows, stride, 3, heads, dim)
        mask = cache["vl.mask"][:, :stride]
        mixed: Tensor = self._masked(*rows.unbind(2), self.scale, key_mask=mask).flatten(0, 1)
        # the sentinel entries of a static plan read some place again; nobody uses them
        return mixed.index_select(0, slots.clamp(max=mixed.shape[0] - 1))
