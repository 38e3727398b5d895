"""What follows a matrix product: bias and activation, or the scales of an integer product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.triton.gate import gelu_tanh_of
from phyai.kernels.triton.launch import as_rows, check, launch

_BLOCK = 1024


@triton.jit
def bias_gelu_tanh_kernel(x_ptr, bias_ptr, out_ptr, width, stride, BLOCK: tl.constexpr):
    """out = gelu_tanh(x + bias). One program per row and block of its width."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    narrow: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    total = (x + bias).to(narrow).to(tl.float32)
    tl.store(out_ptr + row * width + cols, gelu_tanh_of(total).to(narrow), mask=inside)


@triton.jit
def scale_bias_kernel(
    x_ptr, row_scale_ptr, scale_ptr, bias_ptr, out_ptr, width, stride, BLOCK: tl.constexpr
):
    """out = x * row_scale * scale + bias. One program per row and block of its width."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    x = tl.load(x_ptr + row * stride + cols, mask=inside, other=0).to(tl.float32)
    if row_scale_ptr is not None:
        x = x * tl.load(row_scale_ptr + row).to(tl.float32)
    x = x * tl.load(scale_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x = x + tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + cols, x.to(out_ptr.dtype.element_ty), mask=inside)


def bias_gelu_tanh(x: Tensor, bias: Tensor) -> Tensor:
    """Return ``reference.bias_gelu_tanh``, with its roundings."""
    width = x.shape[-1]
    check(bias.shape == (width,), "bias_gelu_tanh bias", "must be as wide as x", bias, x)
    rows = as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (rows.shape[0], triton.cdiv(width, _BLOCK))
    launch(
        bias_gelu_tanh_kernel,
        grid,
        rows,
        bias.contiguous(),
        out,
        width,
        rows.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


def scale_bias(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``reference.scale_bias``, with its roundings."""
    width = x.shape[-1]
    rows = as_rows(x)
    wide = scale.shape == (width,) and (bias is None or bias.shape == (width,))
    check(wide, "scale_bias scale and bias", "must be as wide as x", scale, bias, x)
    tall = row_scale is None or row_scale.numel() == rows.shape[0]
    check(tall, "scale_bias row_scale", "must have one value per row of x", row_scale, x)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    grid = (rows.shape[0], triton.cdiv(width, _BLOCK))
    launch(
        scale_bias_kernel,
        grid,
        rows,
        None if row_scale is None else row_scale.reshape(-1).contiguous(),
        scale.contiguous(),
        None if bias is None else bias.contiguous(),
        out,
        width,
        rows.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
