"""LayerNorm with weight and bias, alone or behind a residual sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.triton.launch import as_rows, block_of, check, launch, warps_of


@triton.jit
def layer_norm_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    out_ptr,
    width,
    x_stride,
    y_stride,
    eps,
    BLOCK: tl.constexpr,
):
    """s = x + y; out = (s - mean) * rsqrt(var + eps) * weight + bias. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if y_ptr is not None:
        y = tl.load(y_ptr + row * y_stride + cols, mask=inside, other=0.0).to(tl.float32)
        x = (x + y).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + cols, x, mask=inside)
        x = x.to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, axis=0) / width, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    out = normed * weight + bias
    tl.store(out_ptr + row * width + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return ``reference.layer_norm``, with its roundings."""
    return _launch(x, None, weight, bias, eps)[1]


def add_layer_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``reference.add_layer_norm``, with its roundings."""
    check(x.shape == y.shape, "add_layer_norm x and y", "must have one shape", x, y)
    return _launch(x, y, weight, bias, eps)


def _launch(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    fits = weight.shape == bias.shape == (width,)
    check(fits, "layer_norm weight and bias", "must be as wide as x", weight, bias, x)
    rows, added = as_rows(x), None if y is None else as_rows(y)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if y is None else torch.empty_like(out)
    block = block_of(width)
    launch(
        layer_norm_kernel,
        (rows.shape[0],),
        rows,
        added,
        weight.contiguous(),
        bias.contiguous(),
        total,
        out,
        width,
        rows.stride(0),
        0 if added is None else added.stride(0),
        eps,
        BLOCK=block,
        num_warps=warps_of(block),
    )
    return out if total is None else total, out
