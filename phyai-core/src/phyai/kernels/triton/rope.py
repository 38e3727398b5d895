"""Rotary embedding and K/V cache writes, apart or in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.triton.launch import block_of, check, launch, packed

_BLOCK = 1024
_HEADS = 8  # heads per program


@triton.jit
def rotate_heads(
    in_ptr, in_head, out_ptr, out_head, cos_ptr, sin_ptr, first, heads, half, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Rotate heads first .. first + HEADS - 1 of one token: x * cos + (-x_hi, x_lo) * sin.

    Each product and the sum are rounded to NARROW, the result to the type of its place.
    """
    head = first + tl.arange(0, HEADS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (cols < half)
    wide = cols < half
    at = in_ptr + head * in_head + cols
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + cols, mask=wide, other=0.0).to(NARROW).to(tl.float32)
    sin = tl.load(sin_ptr + cols, mask=wide, other=0.0).to(NARROW).to(tl.float32)
    out = (low * cos).to(NARROW).to(tl.float32) - (high * sin).to(NARROW).to(tl.float32)
    to = out_ptr + head * out_head + cols
    tl.store(to, out.to(NARROW).to(out_ptr.dtype.element_ty), mask=inside)
    cos = tl.load(cos_ptr + half + cols, mask=wide, other=0.0).to(NARROW).to(tl.float32)
    sin = tl.load(sin_ptr + half + cols, mask=wide, other=0.0).to(NARROW).to(tl.float32)
    out = (high * cos).to(NARROW).to(tl.float32) + (low * sin).to(NARROW).to(tl.float32)
    tl.store(to + half, out.to(NARROW).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def apply_rope_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, length, heads, half, x_row, x_token, x_head,
    cos_row, cos_token, sin_row, sin_token, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program per token and group of HEADS heads. WIDE: only the result is rounded."""
    narrow: tl.constexpr = tl.float32 if WIDE else out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    row, place = token // length, token % length
    rotate_heads(
        x_ptr + row * x_row + place * x_token,
        x_head,
        out_ptr + token * heads * half * 2,
        half * 2,
        cos_ptr + row * cos_row + place * cos_token,
        sin_ptr + row * sin_row + place * sin_token,
        tl.program_id(1) * HEADS,
        heads,
        half,
        BLOCK,
        HEADS,
        narrow,
    )


@triton.jit
def rope_kv_write_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    length, q_heads, kv_heads, half, num_slots, q_row, q_token, q_head, k_row, k_token, k_head,
    v_row, v_token, v_head, cos_row, cos_token, sin_row, sin_token, k_slot, k_slot_head,
    v_slot, v_slot_head, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program per token and group of HEADS heads: first those of q, then those of k and v."""
    token = tl.program_id(0).to(tl.int64)
    row, place = token // length, token % length
    group = tl.program_id(1)
    q_groups = tl.cdiv(q_heads, HEADS)
    narrow: tl.constexpr = q_out_ptr.dtype.element_ty
    cos_ptr += row * cos_row + place * cos_token
    sin_ptr += row * sin_row + place * sin_token
    if group < q_groups:
        rotate_heads(
            q_ptr + row * q_row + place * q_token,
            q_head,
            q_out_ptr + token * q_heads * half * 2,
            half * 2,
            cos_ptr,
            sin_ptr,
            group * HEADS,
            q_heads,
            half,
            BLOCK,
            HEADS,
            narrow,
        )
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        first = (group - q_groups) * HEADS
        # a slot outside the cache is not written: there is no way to report it from here
        heads = tl.where((slot >= 0) & (slot < num_slots), kv_heads, 0)
        rotate_heads(
            k_ptr + row * k_row + place * k_token,
            k_head,
            k_cache_ptr + slot * k_slot,
            k_slot_head,
            cos_ptr,
            sin_ptr,
            first,
            heads,
            half,
            BLOCK,
            HEADS,
            narrow,
        )
        head = first + tl.arange(0, HEADS)[:, None]
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        inside = (head < heads) & (cols < 2 * half)
        at = v_ptr + row * v_row + place * v_token + head * v_head + cols
        to = v_cache_ptr + slot * v_slot + head * v_slot_head + cols
        tl.store(to, tl.load(at, mask=inside), mask=inside)


@triton.jit
def kv_write_kernel(
    cache_ptr, slots_ptr, values_ptr, dim, size, num_slots, cache_slot, cache_head, value_slot,
    value_head, BLOCK: tl.constexpr,
):  # fmt: skip
    """cache[slots[m]] = values[m]. One program per m and block of its K * D values."""
    m = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + m).to(tl.int64)
    inside = (places < size) & (slot >= 0) & (slot < num_slots)
    head, col = places // dim, places % dim
    value = tl.load(values_ptr + m * value_slot + head * value_head + col, mask=inside)
    tl.store(cache_ptr + slot * cache_slot + head * cache_head + col, value, mask=inside)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``reference.apply_rope``, with its roundings."""
    return _rotate(x, cos, sin, wide=False)


def apply_rope_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``reference.apply_rope_fp32``, with its roundings."""
    return _rotate(x, cos, sin, wide=True)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, wide: bool) -> Tensor:
    rows, length, heads, dim = x.shape
    check(dim % 2 == 0, "apply_rope head dim", "must be even", x)
    x, cos, sin = packed(x), angles_for(cos, x), angles_for(sin, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        apply_rope_kernel,
        (rows * length, triton.cdiv(heads, _HEADS)),
        x,
        cos,
        sin,
        out,
        length,
        heads,
        dim // 2,
        *x.stride()[:3],
        *cos.stride()[:2],
        *sin.stride()[:2],
        BLOCK=block_of(dim // 2),
        HEADS=_HEADS,
        WIDE=wide,
        num_warps=4,
    )
    return out


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
    """Return ``reference.rope_kv_write``, with its roundings; a slot outside the cache is skipped.

    Raises: ConfigError when shapes, dtypes or the layout of the caches do not fit.
    """
    rows, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    check(dim % 2 == 0, "rope_kv_write head dim", "must be even", q)
    fits = k.shape == v.shape == (rows, length, kv_heads, dim)
    check(fits, "rope_kv_write k and v", "must have the rows, tokens and head dim of q", q, k, v)
    for cache in (k_cache, v_cache):
        _check_cache(cache, slots, (rows * length, kv_heads, dim), q.dtype)
    check(len(k_cache) == len(v_cache), "k_cache and v_cache", "must match", k_cache, v_cache)
    q, k, v, cos, sin = packed(q), packed(k), packed(v), angles_for(cos, q), angles_for(sin, q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        rope_kv_write_kernel,
        (rows * length, triton.cdiv(heads, _HEADS) + triton.cdiv(kv_heads, _HEADS)),
        q,
        k,
        v,
        cos,
        sin,
        out,
        k_cache,
        v_cache,
        slots.contiguous(),
        length,
        heads,
        kv_heads,
        dim // 2,
        len(k_cache),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *cos.stride()[:2],
        *sin.stride()[:2],
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        BLOCK=block_of(dim // 2),
        HEADS=_HEADS,
        num_warps=4,
    )
    return out


def kv_write(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """Do ``reference.kv_write``; a slot outside the cache is skipped."""
    _check_cache(cache, slots, values.shape, values.dtype)
    values = packed(values)
    _, heads, dim = cache.shape
    launch(
        kv_write_kernel,
        (len(values), triton.cdiv(heads * dim, _BLOCK)),
        cache,
        slots.contiguous(),
        values,
        dim,
        heads * dim,
        len(cache),
        *cache.stride()[:2],
        *values.stride()[:2],
        BLOCK=_BLOCK,
        num_warps=4,
    )


def angles_for(x: Tensor, like: Tensor) -> Tensor:
    rows, length, _, dim = like.shape
    return packed(x.expand(rows, length, dim))


def _check_cache(cache: Tensor, slots: Tensor, values: tuple[int, ...], dtype: torch.dtype) -> None:
    count, *inner = values
    fits = list(cache.shape[1:]) == inner and slots.shape == (count,)
    check(
        fits and cache.dtype == dtype and cache.stride(-1) == 1,
        "kv cache, slots and values",
        "must be [N, K, D], [M] and [M, K, D] of one dtype, the cache packed in D",
        cache,
        slots,
        values,
    )
