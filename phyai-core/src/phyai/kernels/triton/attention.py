"""Attention of a short query over a long prefix, the keys split over the processors."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.reference import MASK_VALUE
from phyai.kernels.triton.launch import (
    arch_of,
    check,
    interpreted,
    launch,
    packed,
    processors,
)

_LOG2E = 1.4426950408889634
_COMBINED_ROWS = 16


class Blocks(NamedTuple):
    """queries, keys: tile of one program; warps, stages: options of the launch."""

    queries: int
    keys: int
    warps: int
    stages: int


# The tile must fit the shared memory of one block: 99 KB on 89 and 120, 163 KB and more elsewhere.
_SMALL_MEMORY = (86, 89, 120, 121)


@triton.jit
def attention_split_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, out_ptr, top_ptr, sum_ptr, scale, queries, group,
    keys, dim, kv_heads, split_keys, splits, q_row, q_token, q_head, k_row, k_token, k_head,
    v_row, v_token, v_head, mask_row, bias_row, bias_head, bias_query, bias_key,
    MASK_VALUE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES folded queries of one key/value head against one part of the keys.

    Writes acc = sum_n 2^(s_n - top) v_n, top = max s_n and sum = sum_n 2^(s_n - top) of its part,
    in float32, s in units of log(2). (One number, top + log2(sum), would lose the sum of a part
    that is hidden as a whole.) Folded query m is token m // group of query head
    kv_head * group + m % group.
    """
    m = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    split = tl.program_id(1)
    row = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(2) % kv_heads
    token, head = m // group, kv_head * group + m % group
    d = tl.arange(0, DIM)
    live = m < queries
    in_dim = d < dim
    q_at = q_ptr + row * q_row + (token * q_token + head * q_head)[:, None] + d[None, :]
    q = tl.load(q_at, mask=live[:, None] & in_dim[None, :], other=0.0)
    if DOT_FP32:
        q = q.to(tl.float32)
    k_ptr += row * k_row + kv_head * k_head
    v_ptr += row * v_row + kv_head * v_head
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    first = split * split_keys
    last = tl.minimum(first + split_keys, keys)
    for start in range(first, last, KEYS):
        n = start + tl.arange(0, KEYS)
        here = n < last
        tile = here[:, None] & in_dim[None, :]
        k = tl.load(k_ptr + n[:, None] * k_token + d[None, :], mask=tile, other=0.0)
        v = tl.load(v_ptr + n[:, None] * v_token + d[None, :], mask=tile, other=0.0)
        if DOT_FP32:
            k = k.to(tl.float32)
        # three tf32 products for float32 inputs; 16-bit inputs ignore the word
        score = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        if bias_ptr is not None:
            bias_at = row * bias_row + (token * bias_query + head * bias_head)[:, None]
            bias_at += n[None, :] * bias_key
            both = live[:, None] & here[None, :]
            bias = tl.load(bias_ptr + bias_at, mask=both, other=0.0).to(tl.float32)
            # scale holds log2(e); the clamp keeps a hidden score finite
            score += tl.maximum(bias, MASK_VALUE) * 1.4426950408889634
            score = tl.maximum(score, MASK_VALUE)
        if mask_ptr is not None:
            seen = tl.load(mask_ptr + row * mask_row + n, mask=here, other=0) != 0
            score = tl.where(seen[None, :], score, MASK_VALUE)
        score = tl.where(here[None, :], score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        shrink = tl.exp2(top - new_top)
        probs = tl.exp2(score - new_top[:, None])
        total = total * shrink + tl.sum(probs, axis=1)
        probs = probs.to(v.dtype)
        if DOT_FP32:
            probs = probs.to(tl.float32)
            v = v.to(tl.float32)
        acc = acc * shrink[:, None]
        acc = tl.dot(probs, v, acc, input_precision="tf32x3")
        top = new_top
    part = (tl.program_id(2).to(tl.int64) * splits + split) * queries + m
    out_at = out_ptr + part[:, None] * dim + d[None, :]
    tl.store(out_at, acc, mask=live[:, None] & in_dim[None, :])
    tl.store(top_ptr + part, top, mask=live)
    tl.store(sum_ptr + part, total, mask=live)


@triton.jit
def attention_combine_kernel(
    part_ptr, top_ptr, sum_ptr, out_ptr, queries, group, dim, kv_heads, splits, out_row, out_token,
    out_head, QUERIES: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """out = sum_s 2^top_s acc_s / sum_s 2^top_s sum_s. One program: QUERIES folded queries."""
    m = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    d = tl.arange(0, DIM)
    live = m < queries
    inside = live[:, None] & (d < dim)[None, :]
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    for split in range(splits):
        part = (tl.program_id(1).to(tl.int64) * splits + split) * queries + m
        part_top = tl.load(top_ptr + part, mask=live, other=0.0)
        part_sum = tl.load(sum_ptr + part, mask=live, other=1.0)
        new_top = tl.maximum(top, part_top)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        value = tl.load(part_ptr + part[:, None] * dim + d[None, :], mask=inside, other=0.0)
        acc = acc * shrink[:, None] + value * weight[:, None]
        total = total * shrink + part_sum * weight
        top = new_top
    row = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = (tl.program_id(1) % kv_heads) * group + m % group
    at = row * out_row + ((m // group) * out_token + head * out_head)[:, None] + d[None, :]
    out = acc / total[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T + mask) v per head; shapes and masks as the reference.

    Rounding: scores stay in float32; unnormalised probabilities are rounded to the dtype of v.
    A row's result does not depend on the other rows, nor on how many there are.
    Raises: ConfigError when the shapes do not fit.
    """
    rows, tokens, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    check(k.shape == v.shape, "attention k and v", "must have one shape", k, v)
    fits = k.shape[0] == rows and k.shape[3] == dim and keys > 0
    check(fits, "attention k", "must have keys, and the rows and head dim of q", q, k)
    check(heads % kv_heads == 0, "attention heads of q", "must be a multiple of those of k", q, k)
    group = heads // kv_heads
    queries = tokens * group
    q, k, v = packed(q), packed(k), packed(v)
    if bias is not None:
        bias = bias.expand(rows, heads, tokens, keys)
    if key_mask is not None:
        key_mask = packed(key_mask.expand(rows, keys)).view(torch.uint8)
    blocks = blocks_for(arch_of(q), dim, q.element_size())
    query_blocks = triton.cdiv(queries, blocks.queries)
    split_keys = _split(keys, blocks.keys, query_blocks * kv_heads, processors(q))
    splits = triton.cdiv(keys, split_keys)
    parts = q.new_empty(rows * kv_heads, splits, queries, dim, dtype=torch.float32)
    tops = q.new_empty(rows * kv_heads, splits, queries, dtype=torch.float32)
    sums = torch.empty_like(tops)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_dim = max(16, int(triton.next_power_of_2(dim)))
    launch(
        attention_split_kernel,
        (query_blocks, splits, rows * kv_heads),
        q,
        k,
        v,
        key_mask,
        bias,
        parts,
        tops,
        sums,
        scale * _LOG2E,
        queries,
        group,
        keys,
        dim,
        kv_heads,
        split_keys,
        splits,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        0 if key_mask is None else key_mask.stride(0),
        *((0,) * 4 if bias is None else bias.stride()),
        MASK_VALUE=MASK_VALUE,
        QUERIES=blocks.queries,
        KEYS=blocks.keys,
        DIM=block_dim,
        DOT_FP32=interpreted(attention_split_kernel),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    launch(
        attention_combine_kernel,
        (triton.cdiv(queries, _COMBINED_ROWS), rows * kv_heads),
        parts,
        tops,
        sums,
        out,
        queries,
        group,
        dim,
        kv_heads,
        splits,
        *out.stride()[:3],
        QUERIES=_COMBINED_ROWS,
        DIM=block_dim,
        num_warps=4,
    )
    return out


def blocks_for(arch: int, dim: int, element_size: int) -> Blocks:
    """Return the tile for a head dim (up to 128, or up to 256) and an element size in bytes."""
    wide, small = dim > 128, arch in _SMALL_MEMORY
    if element_size == 4:
        return Blocks(16, 16, 8 if dim > 64 else 4, 1)  # three products per float32 product
    if wide:
        return Blocks(32, 32, 4, 1) if small else Blocks(64, 32, 8, 2)
    return Blocks(64, 64, 4, 2)


def _split(keys: int, block: int, programs: int, processors: int) -> int:
    """Return the keys of one split, a multiple of ``block``: every processor gets a program."""
    splits = max(1, min(triton.cdiv(processors, programs), triton.cdiv(keys, 2 * block)))
    return int(triton.cdiv(triton.cdiv(keys, splits), block)) * block
