"""The two token mixers of the decoder: gated delta layers and gated full attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.backbones.qwen3_vl import TextLayout
from phyai.kernels import MASK_VALUE
from phyai.layers import Linear, Placement, RMSNorm
from phyai.models.minicpm_robot.config import TextSizes
from phyai.models.minicpm_robot.network.text_layout import (
    from_places,
    own_tokens,
    row_lengths,
    to_places,
)
from phyai.models.minicpm_robot.ops import CONV, DELTA, NORM
from phyai.weights import Loader, claim

Record: TypeAlias = Callable[[str, Tensor], None]

MixerState: TypeAlias = tuple[Tensor, Tensor]
"""What a layer knows of the tokens so far, per row.

Gated delta: the last inputs of the convolution [B, taps, C], the oldest first, zeros where there
was none; the recurrent state float32 [B, H, D, E]; both after the row's last token.
Full attention: keys (rotated) and values [B, S, K, D], behind a row's tokens zeros.
"""


@dataclass(frozen=True)
class _Taps(Loader):
    """A depthwise convolution's weight [C, 1, taps] as [taps, C]."""

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        taps, width = param.shape
        return (width, 1, taps)

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        param.copy_(tensor.squeeze(1).t())


class DeltaMixer(nn.Module):
    """Short convolution and gated delta rule. Shapes: n [M, W] -> [M, W].

    Decay rates, their biases and the weight of the gated norm stay float32 in every precision, as
    do decays, write strengths and states.
    """

    def __init__(self, name: str, config: TextSizes, at: Placement) -> None:
        super().__init__()
        heads, taps = config.linear_num_value_heads, config.linear_conv_kernel_dim
        key, value, self.eps = config.key_size, config.value_size, config.rms_norm_eps
        self.dims = (config.linear_key_head_dim, config.linear_value_head_dim)
        self.mixed = [key, key, value]
        self.sizes = [2 * key + value, value, heads, heads]
        self.project = Linear(
            [f"{name}.in_proj_{leg}" for leg in ("qkv", "z", "a", "b")],
            config.hidden_size,
            self.sizes,
            at,
        )
        self.taps = claim(at.parameter(taps, 2 * key + value), f"{name}.conv1d.weight",
                          loader=_Taps())  # fmt: skip
        self.decay = claim(at.parameter(heads, dtype=torch.float32), f"{name}.A_log")
        self.decay_bias = claim(at.parameter(heads, dtype=torch.float32), f"{name}.dt_bias")
        self.norm = claim(at.parameter(self.dims[1], dtype=torch.float32), f"{name}.norm.weight")
        self.out = Linear(f"{name}.out_proj", value, config.hidden_size, at)
        self._conv = at.select(CONV, width=2 * key + value, taps=taps)
        self._delta = at.select(DELTA, key_dim=self.dims[0], value_dim=self.dims[1])
        self._norm = at.select(NORM, width=self.dims[1])

    def forward(
        self,
        n: Tensor,
        layout: TextLayout,
        before: MixerState | None = None,
        keep: Callable[[MixerState], None] | None = None,
        record: Record | None = None,
    ) -> Tensor:
        qkv, z, a, b = self.project(n).split(self.sizes, dim=-1)
        # float64: a token's decay must not hang on where it stands in the vectors of a batch
        rate = -self.decay.double().exp()
        g = (rate * functional.softplus(a.double() + self.decay_bias)).float()
        beta = b.double().sigmoid().to(b.dtype).float()
        if keep is not None:  # padding leaves the state as it is
            own = own_tokens(layout)[:, None]
            g, beta = torch.where(own, g, 0.0), torch.where(own, beta, 0.0)
        columns, state = (None, None) if before is None else before
        rows = to_places(qkv, layout)
        mixed = self._conv(rows, self.taps, columns)
        q, k, v = mixed.split(self.mixed, dim=-1)
        read, state = self._delta(
            _heads(q, self.dims[0]),
            _heads(k, self.dims[0]),
            _heads(v, self.dims[1]),
            to_places(g, layout),
            to_places(beta, layout),
            state,
            keep is not None,
        )
        if keep is not None and state is not None:
            keep((_last_columns(rows, columns, len(self.taps), row_lengths(layout)), state))
        core = from_places(read, layout)
        normed = self._norm(core, _heads(z, self.dims[1]), self.norm, self.eps)
        if record is not None:
            told = {"conv_silu": from_places(mixed, layout), "g": g, "beta": beta,
                    "core_out": core, "norm_gated": normed}  # fmt: skip
            for name, value in told.items():
                record(name, value)
        out: Tensor = self.out(normed.flatten(1))
        return out


def _last_columns(rows: Tensor, before: Tensor | None, taps: int, lengths: Tensor) -> Tensor:
    """Return the last inputs [B, taps, C] up to each row's last token."""
    batch, _, width = rows.shape
    front = rows.new_zeros(batch, taps, width) if before is None else before[:, -taps:]
    joined = torch.cat([front, rows], dim=1)
    index = lengths[:, None] + torch.arange(taps, device=lengths.device)
    return joined.gather(1, index[..., None].expand(-1, -1, width))


class GatedAttention(nn.Module):
    """Causal attention whose result is gated per head; a part of each head rotates.

    Shapes: n [M, W] -> [M, W].
    """

    def __init__(self, name: str, config: TextSizes, at: Placement) -> None:
        super().__init__()
        width, eps, dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.rotary = dim, config.rotary_dim
        # a query head is followed by its gate
        self.sizes = [2 * heads * dim, kv_heads * dim, kv_heads * dim]
        self.project = Linear([f"{name}.{leg}_proj" for leg in "qkv"], width, self.sizes, at)
        self.q_norm = RMSNorm(f"{name}.q_norm", dim, eps, at)
        self.k_norm = RMSNorm(f"{name}.k_norm", dim, eps, at)
        self.out = Linear(f"{name}.o_proj", heads * dim, width, at)
        self._rope = at.select("apply_rope", head_dim=self.rotary)
        facts = {"head_dim": dim, "heads": heads, "kv_heads": kv_heads}
        self._causal = at.select("causal_attention", **facts)
        self._attention = at.select("attention", masked=True, **facts)

    def forward(
        self,
        n: Tensor,
        layout: TextLayout,
        before: MixerState | None = None,
        keep: Callable[[MixerState], None] | None = None,
        record: Record | None = None,
    ) -> Tensor:
        joined, k, v = self.project(n).split(self.sizes, dim=-1)
        q, gate = _heads(joined, 2 * self.head_dim).chunk(2, dim=-1)
        q, k = self.q_norm(q), self.k_norm(_heads(k, self.head_dim))
        if record is not None:
            record("q_norm", q)
            record("k_norm", k)
        rows = [self._rotated(q, layout), self._rotated(k, layout), _heads(v, self.head_dim)]
        q, k, v = (to_places(part, layout) for part in rows)
        if before is not None:
            k, v = (torch.cat(pair, dim=1) for pair in zip(before, (k, v), strict=True))
        if keep is not None:
            keep((k, v))
        mixed = from_places(self._attend(q, k, v), layout)
        out: Tensor = self.out((mixed * gate.sigmoid()).flatten(1))
        return out

    def _rotated(self, x: Tensor, layout: TextLayout) -> Tensor:
        """Rotate the first dims of each head of a norm's result, in place."""
        part = x[None, ..., : self.rotary]
        part.copy_(self._rope(part, layout.cos[None], layout.sin[None]))
        return x

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention [B, S, H, D] of q [B, S, H, D] over k, v [B, P + S, K, D]."""
        tokens, earlier, scale = q.shape[1], k.shape[1] - q.shape[1], self.head_dim**-0.5
        if not earlier:
            mixed: Tensor = self._causal(q, k, v, scale)
            return mixed
        later = torch.ones(tokens, k.shape[1], dtype=torch.bool, device=q.device).triu(earlier + 1)
        bias = torch.zeros(later.shape, device=q.device).masked_fill(later, MASK_VALUE)
        mixed = self._attention(q, k, v, scale, bias=bias)
        return mixed


def _heads(x: Tensor, dim: int) -> Tensor:
    """Return x [..., H * dim], also a part of a fused tensor, as [..., H, dim]; a view."""
    return x.view(*x.shape[:-1], -1, dim)
