"""One decoder layer, shared by the language model and the action expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phyai.layers import (
    ColumnLinear,
    Linear,
    Placement,
    QKVLinear,
    RMSNorm,
    RowLinear,
    TableLinear,
    VocabParallelEmbedding,
    norm_op,
)
from phyai.models.pi.config import GemmaConfig
from phyai.parallel import HeadShards


class Rotation(NamedTuple):
    """cos and sin [B, T, D] of each token's position."""

    cos: Tensor
    sin: Tensor


class Target(NamedTuple):
    """Where the keys and values of some tokens go: caches [N, K, D] and slots [B * T]."""

    k: Tensor
    v: Tensor
    slots: Tensor


class Stream(NamedTuple):
    """Activations x [B, T, W] and what is still to be added to them: y, times gate unless None.

    The sum is made together with the norm that reads it.
    """

    x: Tensor
    y: Tensor | None = None
    gate: Tensor | None = None


class NormOut(NamedTuple):
    """x with its residual added, n its norm, gate of the residual to come (None = 1)."""

    x: Tensor
    n: Tensor
    gate: Tensor | None


class PlainNorm(nn.Module):
    """RMSNorm with weights stored as the offset from one; no gate."""

    def __init__(self, name: str, width: int, eps: float, at: Placement) -> None:
        super().__init__()
        self.norm = RMSNorm(name, width, eps, at)

    def feed(self, *layers: Linear) -> None:
        """Say which layers read n, and nothing else does: they may want it rounded."""
        self.norm.feed(*layers)

    def forward(self, stream: Stream, modulation: Any = None) -> NormOut:
        if stream.y is None:
            return NormOut(stream.x, self.norm(stream.x), None)
        x, n = self.norm(stream.x, stream.y)
        return NormOut(x, n, None)


class ModulatedNorm(nn.Module):
    """n = s/rms(s)*(1 + scale) + shift of s = x + gate * y, or of x alone; no weights of its own.

    Returns s and n. A module, so that what listens to a model's leaves hears it.
    """

    def __init__(self, width: int, eps: float, at: Placement) -> None:
        super().__init__()
        self.eps = eps
        self._at, self._width = at, width
        self.feed()

    def feed(self, *layers: Linear) -> None:
        """Say which layers read n, and nothing else does: they may want it rounded."""
        self._norm = self._at.select(norm_op("ada_rms_norm", layers), width=self._width)
        self._add_norm = self._at.select(norm_op("gated_ada_rms_norm", layers), width=self._width)

    def forward(self, stream: Stream, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        x, y, gate = stream
        if y is None:
            return x, self._norm(x, scale, shift, self.eps)
        out: tuple[Tensor, Tensor] = self._add_norm(x, y, gate, scale, shift, self.eps)
        return out


class AdaptiveNorm(nn.Module):
    """adaRMS: a norm whose scale and shift, and the gate of what follows, come from a table.

    ``dense`` (width -> 3*width, float32) builds the table after load and is not used per request.
    """

    def __init__(self, name: str, width: int, eps: float, at: Placement) -> None:
        super().__init__()
        self.dense = TableLinear(f"{name}.dense", width, 3 * width, at)
        self.norm = ModulatedNorm(width, eps, at)

    def feed(self, *layers: Linear) -> None:
        """Say which layers read n, and nothing else does: they may want it rounded."""
        self.norm.feed(*layers)

    def forward(self, stream: Stream, modulation: Tensor) -> NormOut:
        """modulation: float32 [3, W], or [3, B, T, W] per token."""
        scale, shift, gate = modulation.unbind(0)
        x, n = self.norm(stream, scale, shift)
        return NormOut(x, n, gate)


class DecoderLayer(nn.Module):
    """x += gate * o_proj(Attn(norm1(x))); x += gate * down(gelu_tanh(gate_proj n) * up_proj n).

    Tensor parallel: this rank has ``heads`` query and ``kv_heads`` key heads and a part of the MLP;
    one sum after ``o_proj`` and one after ``down``.

    norm: PlainNorm or AdaptiveNorm.  split_kv: K and V get a matrix of their own, because they may
    be all that is wanted of this layer.
    """

    def __init__(
        self,
        name: str,
        config: GemmaConfig,
        at: Placement,
        norm: Callable[[str, int, float, Placement], PlainNorm | AdaptiveNorm],
        *,
        split_kv: bool = False,
    ) -> None:
        super().__init__()
        width, eps, attn, mlp = (
            config.hidden_size,
            config.rms_norm_eps,
            f"{name}.self_attn",
            f"{name}.mlp",
        )
        shards, self.head_dim = head_shards(config, at), config.head_dim
        self.heads, self.kv_heads = shards.heads, shards.kv_heads
        self.q_size, self.kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.norm1 = norm(f"{name}.input_layernorm", width, eps, at)
        legs = [f"{attn}.{leg}" for leg in ("q_proj", "k_proj", "v_proj")]
        first = 1 if split_kv else 3

        def project(names: list[str], which: str) -> QKVLinear:
            return QKVLinear(names, width, shards, self.head_dim, at, legs=which)

        self.qkv = project(legs[:first], "qkv"[:first])
        self.kv = project(legs[1:], "kv") if split_kv else None
        self.out = RowLinear(f"{attn}.o_proj", shards.total_heads * self.head_dim, width, at)
        self.norm2 = norm(f"{name}.post_attention_layernorm", width, eps, at)
        self.gate_up = ColumnLinear(
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
            width,
            [config.intermediate_size] * 2,
            at,
            epilogue="gelu_tanh_mul",
        )
        self.down = RowLinear(f"{mlp}.down_proj", config.intermediate_size, width, at)
        self._rope = at.select("apply_rope", head_dim=self.head_dim)
        self._write = at.select("kv_write")
        self._rope_write = at.select("rope_kv_write", head_dim=self.head_dim)
        self.norm1.feed(self.qkv, *([] if self.kv is None else [self.kv]))
        self.norm2.feed(self.gate_up)

    def project(self, n: Tensor, rotation: Rotation, target: Target) -> Tensor:
        """Return q [B, T, H, D] of n [B, T, W], rotated; K, rotated, and V go to their slots."""
        q, k, v = self._split(n)
        out: Tensor = self._rope_write(q, k, v, *rotation, *target)
        return out

    def project_kv(self, n: Tensor, rotation: Rotation, target: Target) -> None:
        """Do only the K/V part of ``project``, at its cost; needs ``split_kv``."""
        assert self.kv is not None
        k, v = self._heads(self.kv(n), self.kv_heads, self.kv_heads)
        self._write(target.k, target.slots, self._rope(k, *rotation).flatten(0, 1))
        self._write(target.v, target.slots, v.flatten(0, 1))

    def finish(self, x: Tensor, mixed: Tensor, gate1: Tensor | None, modulation2: Any) -> Stream:
        """Return the layer's output from its input x and the attention's result."""
        x, n, gate2 = self.norm2(Stream(x, self.out(mixed.flatten(-2)), gate1), modulation2)
        return Stream(x, self.down(self.gate_up(n)), gate2)

    def _split(self, n: Tensor) -> list[Tensor]:
        counts = (self.heads, self.kv_heads, self.kv_heads)
        if self.kv is None:
            return self._heads(self.qkv(n), *counts)
        return [*self._heads(self.qkv(n), self.heads), *self._heads(self.kv(n), *counts[1:])]

    def _heads(self, joined: Tensor, *counts: int) -> list[Tensor]:
        """Return the parts [B, T, count, D] of a fused projection."""
        per_head = joined.view(*joined.shape[:-1], sum(counts), self.head_dim)
        return list(torch.split(per_head, list(counts), dim=-2))


class Embedding(VocabParallelEmbedding):
    """Token embedding times sqrt(width).

    The scale is rounded to the table's dtype when ``rounded_scale`` (LeRobot), exact otherwise
    (openpi). ``in_file``: the rows stay in the checkpoint's file, where device and dtype fit.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        config: GemmaConfig,
        at: Placement,
        *,
        rounded_scale: bool,
        in_file: bool = False,
    ) -> None:
        super().__init__(names, config.vocab_size, config.hidden_size, at, in_file=in_file)
        scale = config.hidden_size**0.5
        self.scale = float(torch.tensor(scale, dtype=at.dtype)) if rounded_scale else scale

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


def head_shards(config: GemmaConfig, at: Placement) -> HeadShards:
    """Return this rank's share of the attention heads; ConfigError when they cannot be shared."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return HeadShards.of(heads, kv_heads, at.tp.size, at.tp.rank)
