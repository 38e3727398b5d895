"""Faster rows built from torch's own fused operators, for the CPU first of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from phyai.kernels.reference import (
    additive_mask,
    attention_by,
    check_causal,
    fold_mask,
    fold_queries,
    unfold_queries,
)

_BLOCK = 2**22  # weights in fp32 at a time: 16 MB


def upcast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias computed in fp32, some rows of the weight at a time.

    Shapes and rounding: as ``reference.linear``. For CPUs without 16-bit arithmetic, where
    torch's own product of bfloat16 matrices is several times slower.
    """
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    wide = x.float()
    step = max(_BLOCK // weight.shape[1], 1)
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        part = None if bias is None else bias[rows].float()
        out[..., rows] = F.linear(wide, weight[rows].float(), part)
    return out


def upcast_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``reference.attention`` with both products computed in fp32 and rounded once.

    Same rounding points as the reference; for CPUs without 16-bit arithmetic.
    """
    return attention_by(_upcast_product, q, k, v, scale, key_mask, bias)


def _upcast_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a.float(), b.float()).to(a.dtype)


def no_16_bit_arithmetic(facts: Mapping[str, Any]) -> bool | str:
    """Accept CPUs whose vector unit is older than AVX-512."""
    return not has_16_bit_arithmetic() or "this CPU multiplies 16-bit matrices itself"


def has_16_bit_arithmetic() -> bool:
    return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T + mask) v per head, without storing the scores.

    Shapes and masks: as ``reference.attention``.
    Rounding: scores and probabilities stay in fp32 inside the fused operator, so 16-bit inputs
        give other (closer to exact) values than the reference.
    """
    kv_heads = k.shape[2]
    folded = fold_queries(q, kv_heads)
    mask = additive_mask(key_mask, bias)
    if mask is not None and mask.shape[1:3] != (1, 1):
        grouped = fold_mask(mask, kv_heads)
        group = q.shape[2] // kv_heads
        mask = grouped.expand(-1, -1, q.shape[1], group, -1).flatten(2, 3)
    if mask is not None:
        mask = mask.clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
    out = F.scaled_dot_product_attention(
        folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return unfold_queries(out, q.shape[2])


def sdpa_causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return ``reference.causal_attention`` without storing the scores; no mask is read.

    Rounding: as ``sdpa_attention``.
    """
    check_causal(q, k)
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads == 0 and heads != kv_heads:
        # The fused operators of most devices want one key/value head per query head.
        k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale
    )
    return mixed.transpose(1, 2)


def rounding_may_differ(facts: Mapping[str, Any]) -> bool | str:
    """Accept fp32 always, 16-bit only where the caller gave up the official rounding points."""
    if facts["dtype"] == "float32" or facts["rounding"] == "free":
        return True
    return f"rounds elsewhere than the official {facts['dtype']} numerics; needs rounding='free'"
