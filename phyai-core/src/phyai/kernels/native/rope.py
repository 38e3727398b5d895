"""Rotary embedding and cache writes in C++; what the kernel does not take goes to the reference.

It takes fp32 and bf16 on the CPU with an even head dim; q, k and v may be strided views, such as
parts of one fused projection; slots are int64.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from phyai.kernels import reference
from phyai.kernels.native.call import CODES, entry, last_dense, watched
from phyai.kernels.native.norm import rms_norm

_rope_block = struct.Struct("=17q").pack
_rope_write_block = struct.Struct("=34q").pack
_write_block = struct.Struct("=9q").pack


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``reference.apply_rope``, with its roundings."""
    if watched() or not _rotates(x, cos, sin):
        return reference.apply_rope(x, cos, sin)
    out = x.new_empty(x.shape)
    x, cos, sin = last_dense(x), _angles(cos, x), _angles(sin, x)
    args = (*_heads(x), *_turn(cos), *_turn(sin), out.data_ptr(), *x.shape)
    entry("phyai_rope")(_rope_block(*args, CODES[x.dtype], torch.get_num_threads()))
    return out


def apply_rope_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``reference.apply_rope_fp32``, with its roundings."""
    if watched() or not _rotates(x, cos, sin):
        return reference.apply_rope_fp32(x, cos, sin)
    return apply_rope(x.float(), cos, sin).to(x.dtype)


def rms_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return ``reference.rms_norm_rope``, with its roundings."""
    if watched() or not _rotates(x, cos, sin):
        return reference.rms_norm_rope(x, weight, cos, sin, eps)
    return apply_rope(rms_norm(x, weight, eps, 0.0), cos, sin)


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Return ``reference.rope_kv_write``, with its roundings."""
    if watched() or not (_rotates(q, cos, sin) and _stores(q, k, v, k_cache, v_cache, slots)):
        return reference.rope_kv_write(q, k, v, cos, sin, k_cache, v_cache, slots)
    rows, tokens, heads, dim = q.shape
    out = q.new_empty((rows, tokens, heads, dim))
    dense_q, dense_k, dense_v = last_dense(q), last_dense(k), last_dense(v)
    turn_cos, turn_sin = _angles(cos, q), _angles(sin, q)
    inputs = (*_heads(dense_q), *_heads(dense_k), *_heads(dense_v), *_turn(turn_cos))
    caches = (*_turn(turn_sin), *_slot_rows(k_cache), *_slot_rows(v_cache), out.data_ptr())
    sizes = (slots.data_ptr(), k_cache.shape[0], rows, tokens, heads, k.shape[2], dim)
    block = _rope_write_block(*inputs, *caches, *sizes, CODES[q.dtype], torch.get_num_threads())
    if entry("phyai_rope_write")(block):
        return reference.rope_kv_write(q, k, v, cos, sin, k_cache, v_cache, slots)  # it raises
    return out


def kv_write(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """Do ``reference.kv_write``; any dtype, rows of cache and values dense."""
    if (
        watched()
        or not (cache.is_cpu and values.is_cpu and cache.dtype == values.dtype)
        or not (cache.dim() == values.dim() == 3 and cache.shape[1:] == values.shape[1:])
        or not (values.numel() and _dense_rows(cache) and _dense_rows(values))
        or not _slots(slots, values.shape[0])
    ):
        reference.kv_write(cache, slots, values)
        return
    size, count = cache.element_size(), values.shape[0]
    args = (cache.data_ptr(), cache.stride(0) * size, values.data_ptr(), values.stride(0) * size)
    sizes = (cache.shape[1] * cache.shape[2] * size, slots.data_ptr(), cache.shape[0], count)
    if entry("phyai_kv_write")(_write_block(*args, *sizes, torch.get_num_threads())):
        reference.kv_write(cache, slots, values)  # it raises


def _rotates(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Say whether the kernel takes x [B, T, H, D] with cos, sin [B or 1, T, D]."""
    if x.dtype not in CODES or x.dim() != 4 or not x.is_cpu or not x.numel() or x.shape[3] % 2:
        return False
    batch, tokens, _, dim = x.shape
    turn = cos.shape
    return (
        (turn == (batch, tokens, dim) or turn == (1, tokens, dim))
        and sin.shape == turn
        and cos.is_cpu
        and sin.is_cpu
    )


def _stores(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> bool:
    """Say whether the kernel takes k, v [B, T, K, D] beside q, and caches [N, K, D] for them."""
    shape, cache, dtype = k.shape, k_cache.shape, q.dtype
    rows, tokens, _, dim = q.shape
    return (
        len(shape) == 4
        and len(cache) == 3
        and shape == v.shape
        and cache == v_cache.shape
        and (shape[0], shape[1], shape[3]) == (rows, tokens, dim)
        and shape[2:] == cache[1:]
        and k.dtype == v.dtype == k_cache.dtype == v_cache.dtype == dtype
        and k_cache.stride(2) == v_cache.stride(2) == 1
        and k.is_cpu
        and v.is_cpu
        and k_cache.is_cpu
        and v_cache.is_cpu
        and _slots(slots, rows * tokens)
    )


def _slots(slots: Tensor, count: int) -> bool:
    return (
        slots.dtype == torch.int64
        and slots.shape == (count,)
        and slots.is_contiguous()
        and slots.is_cpu
    )


def _dense_rows(x: Tensor) -> bool:
    stride = x.stride()
    return (stride[2] == 1 or x.shape[2] == 1) and (stride[1] == x.shape[2] or x.shape[1] == 1)


def _angles(turn: Tensor, x: Tensor) -> Tensor:
    return last_dense(turn if turn.dtype == x.dtype else turn.to(x.dtype))


def _heads(x: Tensor) -> tuple[int, int, int, int]:
    batch, token, head, _ = x.stride()
    return x.data_ptr(), batch, token, head


def _turn(x: Tensor) -> tuple[int, int, int]:
    batch, token, _ = x.stride()
    return x.data_ptr(), 0 if x.shape[0] == 1 else batch, token


def _slot_rows(cache: Tensor) -> tuple[int, int, int]:
    slot, head, _ = cache.stride()
    return cache.data_ptr(), slot, head
