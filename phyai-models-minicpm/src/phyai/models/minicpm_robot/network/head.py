"""The diffusion transformer: even blocks attend to the prefix, odd ones to their own tokens.

Every modulation comes from a table over steps; keys and values of the prefix lie in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Linear, Placement, TableLinear
from phyai.models.minicpm_robot.config import HeadSizes
from phyai.models.minicpm_robot.network.cross import BLOCKS, HEAD, CrossReader, cross_blocks
from phyai.models.minicpm_robot.network.time_codes import TIME_CHANNELS

MODEL = f"{HEAD}.model"
EPS = 1e-5
"""Of the norms inside the blocks."""
LAST_EPS = 1e-6


class Stream(NamedTuple):
    """Activations x [B, T, W] and what is still to be added to them, None = nothing.

    The sum is made together with the norm that reads it.
    """

    x: Tensor
    y: Tensor | None = None

    def total(self) -> Tensor:
        """Return the sum, for those who want it without the norm."""
        return self.x if self.y is None else self.x + self.y


class TimeEncoder(nn.Module):
    """temb = linear_2(silu(linear_1(code))) and every modulation made of it; for tables only."""

    def __init__(self, config: HeadSizes, at: Placement) -> None:
        super().__init__()
        width, name = config.width, f"{MODEL}.timestep_encoder.timestep_embedder"
        self.linear_1 = TableLinear(f"{name}.linear_1", TIME_CHANNELS, width, at)
        self.linear_2 = TableLinear(f"{name}.linear_2", width, width, at)
        self.norms = nn.ModuleList(
            TableLinear(f"{BLOCKS}.{i}.norm1.linear", width, 2 * width, at)
            for i in range(config.num_layers)
        )
        self.last = TableLinear(f"{MODEL}.proj_out_1", width, 2 * width, at)
        self._silu = at.with_dtype(torch.float32).select("silu")

    def tables(self, code: Tensor) -> dict[str, Tensor]:
        """Return the tables of time codes [N, TIME_CHANNELS] float32.

        temb [N, W]; modulation [N, blocks, 2, W], scale before shift; last [N, 2, W], turned into
        that order too: in the checkpoint the last norm alone has the shift first.
        """
        temb = self.linear_2(self._silu(self.linear_1(code)))
        active, width = self._silu(temb), temb.shape[-1]
        blocks = [norm(active).view(-1, 2, width) for norm in self.norms]
        last = self.last(active).view(-1, 2, width).flip(1)
        return {
            "temb": temb,
            "modulation": torch.stack(blocks, dim=1),
            "last": last.contiguous(),
        }


class ModulatedNorm(nn.Module):
    """n = LN(s) * (1 + scale) + shift of s = x + y; no weights of its own."""

    one: Tensor

    def __init__(self, width: int, eps: float, at: Placement) -> None:
        super().__init__()
        self.eps = eps
        # The residual has no gate here: a gate of one changes no bit.
        self.register_buffer("one", torch.ones(width, device=at.device), persistent=False)
        self._norm = at.select("ada_layer_norm", width=width)
        self._add_norm = at.select("gated_ada_layer_norm", width=width)

    def forward(self, stream: Stream, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return s and n [B, T, W]; scale, shift float32 [W]."""
        x, y = stream
        if y is None:
            return x, self._norm(x, scale, shift, self.eps)
        out: tuple[Tensor, Tensor] = self._add_norm(x, y, self.one, scale, shift, self.eps)
        return out


class Block(nn.Module):
    """z += attention(LN(z) * (1 + scale) + shift); z += feed-forward(LN(z)). No gates.

    reader: where a cross-attending block finds its keys and values; None: self-attention.
    """

    zero: Tensor

    def __init__(
        self, index: int, config: HeadSizes, at: Placement, reader: CrossReader | None
    ) -> None:
        super().__init__()
        name, width, inner = f"{BLOCKS}.{index}", config.width, config.ff_dim
        attn = f"{name}.attn1"
        self.index, self.reader = index, reader
        self.heads, self.head_dim = config.num_attention_heads, config.attention_head_dim
        self.norm1 = ModulatedNorm(width, EPS, at)
        legs = [f"{attn}.to_{leg}" for leg in ("q" if reader else "qkv")]
        self.project = Linear(legs, width, [width] * len(legs), at, bias=True)
        self.out = Linear(f"{attn}.to_out.0", width, width, at, bias=True)
        self.norm3 = ModulatedNorm(width, EPS, at)
        self.register_buffer("zero", torch.zeros(width, device=at.device), persistent=False)
        self.fc1 = Linear(
            f"{name}.ff.net.0.proj", width, inner, at, bias=True, epilogue="gelu_tanh"
        )
        self.fc2 = Linear(f"{name}.ff.net.2", inner, width, at, bias=True)
        tokens = config.num_target_vision_tokens + config.action_horizon
        facts = {"head_dim": self.head_dim, "heads": self.heads, "kv_heads": self.heads}
        self._attention = at.select("attention", queries=tokens, keys=tokens, masked=False, **facts)

    def forward(
        self, stream: Stream, modulation: Tensor, cache: Cache, last: int | None = None
    ) -> Stream:
        """Return the new activations of stream [B, T, W]; modulation float32 [2, W].

        last: only the last so many tokens are wanted, [B, last, W]; None = all.
        """
        scale, shift = modulation.unbind(0)
        x, n = self.norm1(stream, scale, shift)
        wanted = slice(None) if last is None else slice(-last, None)
        x = x[:, wanted]
        if self.reader is None:
            q, k, v = self._heads(n, 3).unbind(2)
            mixed = self._attention(q[:, wanted], k, v, self.head_dim**-0.5)
        else:
            q = self._heads(n[:, wanted], 1)[:, :, 0]
            mixed = self.reader.attend(cache, self.index, q)
        x, n = self.norm3(Stream(x, self.out(mixed.flatten(2))), self.zero, self.zero)
        return Stream(x, self.fc2(self.fc1(n)))

    def _heads(self, n: Tensor, legs: int) -> Tensor:
        heads: Tensor = self.project(n)
        return heads.view(*n.shape[:2], legs, self.heads, self.head_dim)


class DiT(nn.Module):
    """All blocks, the last norm and the output projection."""

    def __init__(self, config: HeadSizes, at: Placement) -> None:
        super().__init__()
        self.time = TimeEncoder(config, at)
        reader, cross = CrossReader(config, at), cross_blocks(config)
        self.blocks = nn.ModuleList(
            Block(i, config, at, reader if i in cross else None) for i in range(config.num_layers)
        )
        self.norm_out = ModulatedNorm(config.width, LAST_EPS, at)
        self.proj_out = Linear(
            f"{MODEL}.proj_out_2", config.width, config.output_dim, at, bias=True
        )

    def forward(
        self,
        z: Tensor,
        modulation: Tensor,
        last_modulation: Tensor,
        cache: Cache,
        last: int | None = None,
        see: Callable[[str, Tensor], None] | None = None,
    ) -> Tensor:
        """Return the normed last activations [B, T, W] of z [B, T, W], before ``proj_out``.

        modulation float32 [blocks, 2, W]; last_modulation float32 [2, W].
        last: of the output only the last so many tokens are wanted; None = all.
        see: told every block's output.
        """
        stream = Stream(z)
        final = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            stream = block(stream, modulation[i], cache, last if i == final else None)
            if see is not None:
                see(f"dit.block.{i}", stream.total())
        _, n = self.norm_out(stream, *last_modulation.unbind(0))
        out: Tensor = n
        return out
