"""RMSNorm over each head and the rotary embedding of the result, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.triton.launch import block_of, check, launch, packed
from phyai.kernels.triton.rope import angles_for

_HEADS = 8  # heads per program


@triton.jit
def rms_norm_rope_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, length, heads, half, x_row, x_token, x_head,
    cos_row, cos_token, sin_row, sin_token, eps, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """n = x * rsqrt(mean(x^2) + eps) * weight; out = n * cos + (-n_hi, n_lo) * sin.

    n, each product and the sum are rounded. One program per token and group of HEADS heads.
    """
    token = tl.program_id(0).to(tl.int64)
    row, place = token // length, token % length
    narrow: tl.constexpr = out_ptr.dtype.element_ty
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    wide = cols < half
    inside = (head < heads) & wide
    at = x_ptr + row * x_row + place * x_token + head * x_head + cols
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    square = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
    inverse = tl.rsqrt(square / (2 * half) + eps)[:, None]
    w_low = tl.load(weight_ptr + cols, mask=wide, other=0.0).to(tl.float32)
    w_high = tl.load(weight_ptr + half + cols, mask=wide, other=0.0).to(tl.float32)
    low = (low * inverse * w_low).to(narrow).to(tl.float32)
    high = (high * inverse * w_high).to(narrow).to(tl.float32)
    cos_ptr += row * cos_row + place * cos_token
    sin_ptr += row * sin_row + place * sin_token
    to = out_ptr + (token * heads + head) * half * 2 + cols
    cos = tl.load(cos_ptr + cols, mask=wide, other=0.0).to(narrow).to(tl.float32)
    sin = tl.load(sin_ptr + cols, mask=wide, other=0.0).to(narrow).to(tl.float32)
    out = (low * cos).to(narrow).to(tl.float32) - (high * sin).to(narrow).to(tl.float32)
    tl.store(to, out.to(narrow), mask=inside)
    cos = tl.load(cos_ptr + half + cols, mask=wide, other=0.0).to(narrow).to(tl.float32)
    sin = tl.load(sin_ptr + half + cols, mask=wide, other=0.0).to(narrow).to(tl.float32)
    out = (high * cos).to(narrow).to(tl.float32) + (low * sin).to(narrow).to(tl.float32)
    tl.store(to + half, out.to(narrow), mask=inside)


def rms_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return ``reference.rms_norm_rope``, with its roundings."""
    rows, length, heads, dim = x.shape
    check(dim % 2 == 0, "rms_norm_rope head dim", "must be even", x)
    check(weight.shape == (dim,), "rms_norm_rope weight", "must be as wide as a head", weight, x)
    x, cos, sin = packed(x), angles_for(cos, x), angles_for(sin, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        rms_norm_rope_kernel,
        (rows * length, triton.cdiv(heads, _HEADS)),
        x,
        weight.contiguous(),
        cos,
        sin,
        out,
        length,
        heads,
        dim // 2,
        *x.stride()[:3],
        *cos.stride()[:2],
        *sin.stride()[:2],
        eps,
        BLOCK=block_of(dim // 2),
        HEADS=_HEADS,
        num_warps=4,
    )
    return out
