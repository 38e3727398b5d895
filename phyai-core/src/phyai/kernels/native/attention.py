"""Attention in C++: masks of keys, shared key/value heads, the reference's rounding points."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from phyai.kernels import reference
from phyai.kernels.native.call import CODES, entry, last_dense, watched

_block = struct.Struct("=25qd").pack


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``reference.attention``, with its roundings.

    The kernel takes fp32 and bf16 on the CPU, one dtype and one head dim for q, k and v, and a
    key mask of shape [B, S]. All else, a bias above all, goes to the reference. Keys behind the
    last visible one are not read, where the reference would carry on a NaN that stands there.
    """
    if not q.numel():  # the reference cannot fold nothing
        return q.new_empty(q.shape)
    if watched() or bias is not None or not _fits(q, k, v, key_mask):
        return reference.attention(q, k, v, scale, key_mask, bias)
    out = _run(q, k, v, scale, key_mask, causal=False)
    return reference.attention(q, k, v, scale, key_mask) if out is None else out


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return ``reference.causal_attention``, with its roundings; shapes as ``attention``."""
    if not q.numel():
        return q.new_empty(q.shape)
    if watched() or q.shape[1] != k.shape[1] or not _fits(q, k, v, None):
        return reference.causal_attention(q, k, v, scale)
    out = _run(q, k, v, scale, None, causal=True)
    return reference.causal_attention(q, k, v, scale) if out is None else out


def _run(
    q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None, *, causal: bool
) -> Tensor | None:
    """Return the kernel's result; None when there is no memory for the packed keys."""
    q, k, v = last_dense(q), last_dense(k), last_dense(v)
    rows, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    out = q.new_empty((rows, queries, heads, dim))
    mask = (0, 0, 0) if key_mask is None else (key_mask.data_ptr(), *key_mask.stride())
    sizes = (rows, queries, heads, kv_heads, dim, keys)
    form = (CODES[q.dtype], torch.get_num_threads(), causal)
    args = (*_heads(q), *_heads(k), *_heads(v), *mask, out.data_ptr(), *sizes, *form, scale)
    if entry("phyai_attention")(_block(*args)):
        return None
    return out


def _fits(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> bool:
    """Say whether the kernel takes these."""
    if not (q.dim() == k.dim() == 4 and k.shape == v.shape and q.dtype in CODES):
        return False
    rows, _, heads, dim = q.shape
    if k.shape[0] != rows or k.shape[3] != dim or not (q.numel() and k.numel()):
        return False
    if heads % k.shape[2] or not k.dtype == v.dtype == q.dtype:
        return False
    if not (q.is_cpu and k.is_cpu and v.is_cpu):
        return False
    return key_mask is None or (
        key_mask.dtype == torch.bool and key_mask.shape == k.shape[:2] and key_mask.is_cpu
    )


def _heads(x: Tensor) -> tuple[int, int, int, int]:
    batch, token, head, _ = x.stride()
    return x.data_ptr(), batch, token, head
