"""RMSNorm, alone or behind a residual sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.quant import QuantizedActivations
from phyai.kernels.triton.launch import as_rows, block_of, check, launch, warps_of
from phyai.kernels.triton.quant_linear import options, results, store_int8


@triton.jit
def rms_norm_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    int8_scale_ptr,
    width,
    x_stride,
    y_stride,
    eps,
    offset,
    BLOCK: tl.constexpr,
):
    """s = x + y; out = s * rsqrt(mean(s^2) + eps) * (offset + weight). One program per row.

    With int8_scale the result is rounded to x's type and then to int8.
    """
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
    out = (normed * (weight + offset)).to(x_ptr.dtype.element_ty)
    out_at = out_ptr + row * width + cols
    if int8_scale_ptr is not None:
        store_int8(out.to(tl.float32), out_at, int8_scale_ptr + row, inside)
    else:
        tl.store(out_at, out, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 1.0) -> Tensor:
    """Return ``reference.rms_norm``, with its roundings."""
    return _launch(x, None, weight, eps, offset)[1]


def rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, offset: float = 1.0
) -> QuantizedActivations:
    """Return ``quant_norm.rms_norm_quant``, with its roundings."""
    return QuantizedActivations(*_launch(x, None, weight, eps, offset, to_int8=True)[1:])


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return ``reference.add_rms_norm``, with its roundings."""
    check(x.shape == y.shape, "add_rms_norm x and y", "must have one shape", x, y)
    return _launch(x, y, weight, eps, offset)[:2]


def add_rms_norm_quant(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float = 1.0
) -> tuple[Tensor, QuantizedActivations]:
    """Return ``quant_norm.add_rms_norm_quant``, with its roundings."""
    check(x.shape == y.shape, "add_rms_norm x and y", "must have one shape", x, y)
    total, *rounded = _launch(x, y, weight, eps, offset, to_int8=True)
    return total, QuantizedActivations(*rounded)


def _launch(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, offset: float, to_int8: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum, its norm, and the norm's scales; what is not wanted stands for another."""
    width = x.shape[-1]
    check(weight.shape == (width,), "rms_norm weight", "must be as wide as x", weight, x)
    rows, added = as_rows(x), None if y is None else as_rows(y)
    out, scales = results(x, to_int8)
    total = None if y is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = block_of(width)
    launch(
        rms_norm_kernel,
        (rows.shape[0],),
        rows,
        added,
        weight.contiguous(),
        total,
        out,
        scales,
        width,
        rows.stride(0),
        0 if added is None else added.stride(0),
        eps,
        float(offset),
        BLOCK=block,
        num_warps=warps_of(block),
        **options(to_int8),
    )
    return out if total is None else total, out, out if scales is None else scales
