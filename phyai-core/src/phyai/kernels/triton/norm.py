"""RMSNorm, alone or behind a residual sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.triton.launch import as_rows, block_of, check, launch, warps_of


@triton.jit
def rms_norm_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    width,
    x_stride,
    y_stride,
    eps,
    offset,
    BLOCK: tl.constexpr,
):
    """s = x + y; out = s * rsqrt(mean(s^2) + eps) * (offset + weight). One program per row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if y_ptr is not None:
        y = tl.load(y_ptr + row * y_stride + cols, mask=inside, other=0.0).to(tl.float32)
        x = (x + y).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + cols, x, mask=inside)
        x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    out = normed * (weight + offset)
    tl.store(out_ptr + row * width + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 1.0) -> Tensor:
    """Return ``reference.rms_norm``, with its roundings."""
    return _launch(x, None, weight, eps, offset)[1]


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return ``reference.add_rms_norm``, with its roundings."""
    check(x.shape == y.shape, "add_rms_norm x and y", "must have one shape", x, y)
    return _launch(x, y, weight, eps, offset)


def _launch(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    check(weight.shape == (width,), "rms_norm weight", "must be as wide as x", weight, x)
    rows, added = as_rows(x), None if y is None else as_rows(y)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if y is None else torch.empty_like(out)
    block = block_of(width)
    launch(
        rms_norm_kernel,
        (rows.shape[0],),
        rows,
        added,
        weight.contiguous(),
        total,
        out,
        width,
        rows.stride(0),
        0 if added is None else added.stride(0),
        eps,
        float(offset),
        BLOCK=block,
        num_warps=warps_of(block),
    )
    return out if total is None else total, out
