"""Faster rows built from torch's own fused operators, for the CPU first of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from phyai.kernels.reference import additive_mask, fold_mask, fold_queries, unfold_queries


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


def rounding_may_differ(facts: Mapping[str, Any]) -> bool | str:
    """Accept fp32 always, 16-bit only where the caller gave up the official rounding points."""
    if facts["dtype"] == "float32" or facts["rounding"] == "free":
        return True
    return f"rounds elsewhere than the official {facts['dtype']} numerics; needs rounding='free'"
