"""Linear layers of int8 weights, a scale per 128 inputs, and int8 (W8A8) or plain inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.quant import TINY, QuantizedActivations
from phyai.kernels.quant_linear import QuantizedWeight, check_input
from phyai.kernels.triton.launch import as_rows, block_of, check, interpreted, launch, processors

SCALE_BLOCK = 128
_WIDEST_BLOCK = 4096


class _Tile(NamedTuple):
    """Rows, outputs and inputs of one step of a program, its warps and its pipeline depth."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# By bytes of an input value. Fewer inputs at a time where they are wider, for 99 KiB of memory.
_NARROW = {1: _Tile(64, 32, 128, 4, 4), 2: _Tile(64, 32, 128, 4, 3), 4: _Tile(64, 32, 32, 4, 3)}
_WIDE = {1: _Tile(128, 128, 128, 8, 3), 2: _Tile(128, 64, 64, 8, 3)}
_TINY = tl.constexpr(TINY)


@triton.jit
def int8_scale(amax):
    """Return the scale of a token from its largest absolute value."""
    return tl.div_rn(tl.maximum(amax, _TINY), 127.0)


@triton.jit
def to_int8(x, inverse):
    """Return x * inverse to nearest even. Launch with enable_fp_fusion=False: two roundings."""
    # 1.5 * 2^23 has no bits below one: adding it rounds as the mode says
    return ((x * inverse + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def store_int8(x, out_ptr, scale_ptr, inside):
    """Store a token, fp32 and 0 outside, rounded to int8, and its scale."""
    # The largest of numbers forgets a NaN, their sum does not.
    scale = int8_scale(tl.max(tl.abs(x), axis=0)) + tl.sum(x * 0.0, axis=0)
    tl.store(out_ptr, to_int8(x, tl.div_rn(1.0, scale)), mask=inside)
    tl.store(scale_ptr, scale)


@triton.jit
def quantize_per_token_kernel(x_ptr, values_ptr, scale_ptr, width, stride, BLOCK: tl.constexpr):
    """scale = amax(|x|) / 127; values = x * (1 / scale) to nearest even. One program per token."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + cols < width
        x = tl.load(x_ptr + token * stride + start + cols, mask=inside, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    scale = int8_scale(tl.max(top, axis=0)) + tl.sum(top * 0.0, axis=0)
    inverse = tl.div_rn(1.0, scale)
    for start in range(0, width, BLOCK):
        inside = start + cols < width
        x = tl.load(x_ptr + token * stride + start + cols, mask=inside, other=0.0).to(tl.float32)
        at = values_ptr + token * width + start + cols
        tl.store(at, to_int8(x, inverse), mask=inside)
    tl.store(scale_ptr + token, scale)


@triton.jit
def int8_linear_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outputs,
    inputs,
    blocks,
    x_stride,
    SCALE_BLOCK: tl.constexpr,
    DOT_FP32: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """out = x_scale * sum_b w_scale_b * (x_b w_b^T) + bias over blocks b of SCALE_BLOCK inputs.

    Without x_scale x is floating point. Products of one block are exact (int8), or summed in fp32.
    One program: a tile of the result.
    """
    first_m = tl.program_id(0).to(tl.int64) * ROWS
    first_n = tl.program_id(1).to(tl.int64) * OUTPUTS
    m, n, k = tl.arange(0, ROWS), tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    live, real = first_m + m < rows, first_n + n < outputs
    # offsets within a tile have 32 bits: registers are scarce
    x_at = x_ptr + first_m * x_stride + (m[:, None] * x_stride + k[None, :])
    w_at = w_ptr + first_n * inputs + (n[None, :] * inputs + k[:, None])
    w_scale_ptr += first_n * blocks
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        inside = start + k < inputs
        x = tl.load(x_at + start, mask=live[:, None] & inside[None, :], other=0)
        w = tl.load(w_at + start, mask=real[None, :] & inside[:, None], other=0)
        scale_at = w_scale_ptr + n * blocks + start // SCALE_BLOCK
        scale = tl.load(scale_at, mask=real, other=0.0)
        if x_scale_ptr is not None:
            part = tl.dot(x, w, out_dtype=tl.int32).to(tl.float32)
        else:
            if DOT_FP32:
                x = x.to(tl.float32)
            # int8 is exact in each float type; three tf32 products keep float32 inputs
            part = tl.dot(x, w.to(x.dtype), input_precision="tf32x3")
        acc += part * scale[None, :]
    if x_scale_ptr is not None:
        acc *= tl.load(x_scale_ptr + first_m + m, mask=live, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + first_n + n, mask=real, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + first_m * outputs + first_n + (m[:, None] * outputs + n[None, :])
    both = live[:, None] & real[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=both)


def quantize_per_token(x: Tensor) -> QuantizedActivations:
    """Return ``quant.quantize_per_token`` to int8, bit for bit."""
    width = x.shape[-1]
    rows = as_rows(x)
    values, scales = results(x, True)
    assert scales is not None
    block = min(block_of(width), _WIDEST_BLOCK)
    launch(
        quantize_per_token_kernel,
        (rows.shape[0],),
        rows,
        values,
        scales,
        width,
        rows.stride(0),
        BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
        **options(True),
    )
    return QuantizedActivations(values, scales)


def results(x: Tensor, to_int8: bool) -> tuple[Tensor, Tensor | None]:
    """Return memory for a norm of x [..., W] and, when it is rounded to int8, its scales."""
    dtype = torch.int8 if to_int8 else x.dtype
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not to_int8:
        return out, None
    return out, torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)


def options(to_int8: bool) -> dict[str, Any]:
    """Return the compiler options of kernels that may round to int8."""
    return {"enable_fp_fusion": False} if to_int8 else {}


def int8_linear(
    x: Tensor | QuantizedActivations, weight: QuantizedWeight, bias: Tensor | None = None
) -> Tensor:
    """Return ``quant_linear.linear`` of an int8 weight and int8 tokens, with its roundings."""
    check_input(x, weight)
    tokens = quantize_per_token(x) if isinstance(x, Tensor) else x
    return _product(tokens.values, tokens.scales, weight, bias)


def int8_weight_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return ``quant_linear.linear`` of an int8 weight and plain inputs, with its roundings."""
    check_input(x, weight)
    return _product(x, None, weight, bias)


def _product(
    x: Tensor, x_scales: Tensor | None, weight: QuantizedWeight, bias: Tensor | None
) -> Tensor:
    made = weight.tensor
    outputs, inputs = made.shape
    fits = made.values.dtype == torch.int8 and made.block == (1, SCALE_BLOCK)
    check(fits, "int8_linear weight", f"must have blocks [1, {SCALE_BLOCK}]", made.block)
    wide = bias is None or bias.shape == (outputs,)
    check(wide, "int8_linear bias", "must have one value per output", bias, made.values)
    rows = as_rows(x)
    out = torch.empty(*x.shape[:-1], outputs, dtype=weight.dtype, device=x.device)
    tile = _tile(rows, outputs)
    launch(
        int8_linear_kernel,
        (triton.cdiv(rows.shape[0], tile.m), triton.cdiv(outputs, tile.n)),
        rows,
        None if x_scales is None else x_scales.reshape(-1).contiguous(),
        made.values,
        made.scales,
        None if bias is None else bias.contiguous(),
        out,
        rows.shape[0],
        outputs,
        inputs,
        made.scales.shape[1],
        rows.stride(0),
        SCALE_BLOCK=SCALE_BLOCK,
        DOT_FP32=interpreted(int8_linear_kernel),
        ROWS=tile.m,
        OUTPUTS=tile.n,
        INPUTS=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _tile(rows: Tensor, outputs: int) -> _Tile:
    """Return large tiles for many rows, unless most of the device would be idle."""
    wide = _WIDE.get(rows.element_size(), _NARROW[rows.element_size()])
    programs = triton.cdiv(rows.shape[0], wide.m) * triton.cdiv(outputs, wide.n)
    if rows.shape[0] > 64 and 2 * programs >= processors(rows):
        return wide
    return _NARROW[rows.element_size()]
