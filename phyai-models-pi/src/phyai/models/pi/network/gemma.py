"""One decoder layer, shared by the language model and the action expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from phyai.layers import Linear, Placement, RMSNorm
from phyai.models.pi.config import GemmaConfig
from phyai.weights import claim

NormOut = tuple[Tensor, Tensor | None]
"""Normalised activations and the gate of the residual that follows (None = 1)."""


class PlainNorm(nn.Module):
    """RMSNorm with weights stored as the offset from one; no gate."""

    def __init__(self, name: str, width: int, eps: float, at: Placement) -> None:
        super().__init__()
        self.norm = RMSNorm(name, width, eps, at)

    def forward(self, x: Tensor, modulation: Any = None) -> NormOut:
        return self.norm(x), None


class AdaptiveNorm(nn.Module):
    """adaRMS: y = x/rms(x)*(1 + scale) + shift; (scale, shift, gate) come from a table.

    ``dense`` (width -> 3*width, float32) builds the table after load and is not used per request.
    """

    def __init__(self, name: str, width: int, eps: float, at: Placement) -> None:
        super().__init__()
        self.eps = eps
        wide = at.with_dtype(torch.float32)
        self.dense = Linear(f"{name}.dense", width, 3 * width, wide, bias=True)
        self._norm = at.select("ada_rms_norm", width=width)

    def forward(self, x: Tensor, modulation: Tensor) -> NormOut:
        """modulation: float32 [3, W], or [3, B, T, W] per token."""
        scale, shift, gate = modulation.unbind(0)
        return self._norm(x, scale, shift, self.eps), gate


class DecoderLayer(nn.Module):
    """x += gate * o_proj(Attn(norm1(x))); x += gate * down(gelu_tanh(gate_proj n) * up_proj n).

    norm: PlainNorm or AdaptiveNorm.
    """

    def __init__(
        self,
        name: str,
        config: GemmaConfig,
        at: Placement,
        norm: Callable[[str, int, float, Placement], nn.Module],
    ) -> None:
        super().__init__()
        width, eps, attn, mlp = (
            config.hidden_size,
            config.rms_norm_eps,
            f"{name}.self_attn",
            f"{name}.mlp",
        )
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_size, self.kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.norm1 = norm(f"{name}.input_layernorm", width, eps, at)
        self.qkv = Linear(
            [f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"],
            width,
            [self.q_size, self.kv_size, self.kv_size],
            at,
        )
        self.out = Linear(f"{attn}.o_proj", self.q_size, width, at)
        self.norm2 = norm(f"{name}.post_attention_layernorm", width, eps, at)
        self.gate_up = Linear(
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"], width, [config.intermediate_size] * 2, at
        )
        self.down = Linear(f"{mlp}.down_proj", config.intermediate_size, width, at)
        self._rope = at.select("apply_rope", head_dim=self.head_dim)
        self._gelu_mul = at.select("gelu_tanh_mul")
        self._gated = at.select("gated_residual")

    def project(self, n: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, T, H, D], k and v [B, T, K, D] of n [B, T, W]; cos, sin [B, T, D] rotate."""
        batch, tokens, _ = n.shape
        q, k, v = torch.split(self.qkv(n), [self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self._rope(q.view(batch, tokens, self.heads, self.head_dim), cos, sin)
        k = self._rope(k.view(batch, tokens, self.kv_heads, self.head_dim), cos, sin)
        return q, k, v.view(batch, tokens, self.kv_heads, self.head_dim)

    def project_kv(self, n: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return only k and v of ``project``, at their cost."""
        batch, tokens, _ = n.shape
        k, v = torch.split(self.qkv.tail(n, 1), self.kv_size, dim=-1)
        k = self._rope(k.view(batch, tokens, self.kv_heads, self.head_dim), cos, sin)
        return k, v.view(batch, tokens, self.kv_heads, self.head_dim)

    def finish(
        self, x: Tensor, mixed: Tensor, gate1: Tensor | None, modulation2: Tensor | None
    ) -> Tensor:
        """Return the layer's output from its input x and the attention's result."""
        x = self._add(x, self.out(mixed.flatten(-2)), gate1)
        n, gate2 = self.norm2(x, modulation2)
        return self._add(x, self.down(self._gelu_mul(self.gate_up(n))), gate2)

    def _add(self, x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        if gate is None:
            return x + y
        out: Tensor = self._gated(x, y, gate)
        return out


class Embedding(nn.Module):
    """Token embedding times sqrt(width).

    The scale is rounded to the table's dtype when ``rounded_scale`` (LeRobot), exact otherwise
    (openpi).
    """

    def __init__(
        self, names: tuple[str, ...], config: GemmaConfig, at: Placement, rounded_scale: bool
    ) -> None:
        super().__init__()
        self.weight = claim(at.parameter(config.vocab_size, config.hidden_size), names)
        scale = config.hidden_size**0.5
        self.scale = float(torch.tensor(scale, dtype=at.dtype)) if rounded_scale else scale

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight) * self.scale
