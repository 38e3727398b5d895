"""The diffusion transformer: blocks that attend to the backbone's tokens or to their own.

Every modulation comes from a table over steps; keys and values of the backbone's tokens are
projected once per request and lie in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Linear, Placement, TableLinear
from phyai.models.gr00t.checkpoint import HEAD
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.network.blocks import (
    EPS,
    BareLayerNorm,
    FeedForward,
    ModulatedLayerNorm,
    Stream,
)
from phyai.models.gr00t.network.cross import CrossReader
from phyai.models.gr00t.network.time_embedding import TIME_CHANNELS

MODEL = f"{HEAD}.model"
LAST_EPS = 1e-6


class TimeEncoder(nn.Module):
    """temb = linear_2(silu(linear_1(g))) and every modulation made of it; for tables only."""

    def __init__(self, config: GrootConfig, at: Placement) -> None:
        super().__init__()
        width, name = config.diffusion_model_cfg.width, f"{MODEL}.timestep_encoder"
        embedder = f"{name}.timestep_embedder"
        self.linear_1 = TableLinear(f"{embedder}.linear_1", TIME_CHANNELS, width, at)
        self.linear_2 = TableLinear(f"{embedder}.linear_2", width, width, at)
        self.norms = nn.ModuleList(
            TableLinear(f"{MODEL}.transformer_blocks.{i}.norm1.linear", width, 2 * width, at)
            for i in range(config.diffusion_model_cfg.num_layers)
        )
        self.last = TableLinear(f"{MODEL}.proj_out_1", width, 2 * width, at)
        self._silu = at.with_dtype(torch.float32).select("silu")

    def tables(self, embedding: Tensor) -> dict[str, Tensor]:
        """Return the tables of embeddings [N, 256] float32.

        temb [N, W]; modulation [N, blocks, 2, W], scale before shift; last [N, 2, W], turned into
        that order too: here the checkpoint has the shift first.
        """
        temb = self.linear_2(self._silu(self.linear_1(embedding)))
        active, width = self._silu(temb), temb.shape[-1]
        blocks = [norm(active).view(-1, 2, width) for norm in self.norms]
        last = self.last(active).view(-1, 2, width).flip(1)
        return {
            "temb": temb,
            "modulation": torch.stack(blocks, dim=1),
            "last": last.contiguous(),
        }


class DiTBlock(nn.Module):
    """z += attention(LN(z) * (1 + scale) + shift); z += feed-forward(LN(z)). No gates.

    reader: where a cross-attending block finds its keys and values; None: self-attention.
    """

    def __init__(self, index: int, config: GrootConfig, at: Placement, reader: CrossReader | None):
        super().__init__()
        dit, name = config.diffusion_model_cfg, f"{MODEL}.transformer_blocks.{index}"
        width, attn = dit.width, f"{name}.attn1"
        self.index, self.reader = index, reader
        self.heads, self.head_dim = dit.num_attention_heads, dit.attention_head_dim
        self.norm1 = ModulatedLayerNorm(width, EPS, at)
        if reader is None:
            legs = [f"{attn}.{leg}" for leg in ("to_q", "to_k", "to_v")]
            self.project = Linear(legs, width, [width] * 3, at, bias=True)
        else:
            self.project = Linear(f"{attn}.to_q", width, width, at, bias=True)
        self.out = Linear(f"{attn}.to_out.0", width, width, at, bias=True)
        self.norm3 = BareLayerNorm(width, EPS, at)
        self.ff = FeedForward(f"{name}.ff", width, at)
        tokens = 1 + config.action_horizon
        self._attention = at.select(
            "attention",
            head_dim=self.head_dim,
            heads=self.heads,
            kv_heads=self.heads,
            queries=tokens,
            keys=tokens,
            masked=False,
        )

    def forward(self, stream: Stream, modulation: Tensor, cache: Cache) -> Stream:
        """stream [B, T, W]; modulation float32 [2, W]."""
        scale, shift = modulation.unbind(0)
        x, n = self.norm1(stream, scale, shift)
        heads = self.project(n).view(*n.shape[:2], -1, self.heads, self.head_dim)
        if self.reader is None:
            mixed = self._attention(*heads.unbind(2), self.head_dim**-0.5)
        else:
            mixed = self.reader.attend(cache, self.index, heads[:, :, 0])
        x, n = self.norm3(Stream(x, self.out(mixed.flatten(-2))))
        return Stream(x, self.ff(n))


class DiT(nn.Module):
    """All blocks, the last norm and the output projection of the action tokens.

    readers: block index -> where its keys are, for the blocks that cross-attend.
    """

    def __init__(
        self, config: GrootConfig, at: Placement, readers: Mapping[int, CrossReader]
    ) -> None:
        super().__init__()
        dit = config.diffusion_model_cfg
        self.time = TimeEncoder(config, at)
        self.blocks = nn.ModuleList(
            DiTBlock(i, config, at, readers.get(i)) for i in range(dit.num_layers)
        )
        self.norm_out = ModulatedLayerNorm(dit.width, LAST_EPS, at)
        self.proj_out = Linear(f"{MODEL}.proj_out_2", dit.width, dit.output_dim, at, bias=True)

    def forward(
        self,
        z: Tensor,
        modulation: Tensor,
        last: Tensor,
        cache: Cache,
        see: Callable[[str, Tensor], None] | None = None,
    ) -> Tensor:
        """Return the normed last activations [B, T, W] of z [B, T, W], before ``proj_out``.

        modulation float32 [blocks, 2, W]; last float32 [2, W]; see: told every block's output.
        """
        stream = Stream(z)
        for i, block in enumerate(self.blocks):
            stream = block(stream, modulation[i], cache)
            if see is not None:
                see(f"dit_block_{i}", stream.total())
        _, n = self.norm_out(stream, *last.unbind(0))
        out: Tensor = n
        return out
