"""Norms without own weights, scaled and shifted by a condition: adaRMS, AdaLN, gated residuals."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.quant import QuantizedActivations
from phyai.kernels.triton.launch import as_rows, block_of, check, launch, spread, warps_of
from phyai.kernels.triton.quant_linear import options, results, store_int8

_BLOCK = 1024


@triton.jit
def modulated_norm_kernel(
    x_ptr,
    y_ptr,
    gate_ptr,
    scale_ptr,
    shift_ptr,
    sum_ptr,
    out_ptr,
    int8_scale_ptr,
    width,
    length,
    x_stride,
    y_stride,
    gate_row,
    gate_token,
    scale_row,
    scale_token,
    shift_row,
    shift_token,
    eps,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """s = x + gate * y; out = norm(s) * (1 + scale) + shift. One program per token.

    norm(s) = s / rms(s), of s - mean(s) when CENTRED. With int8_scale the result is rounded to x's
    type and then to int8.
    """
    token = tl.program_id(0).to(tl.int64)
    row, place = token // length, token % length
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    x = tl.load(x_ptr + token * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if y_ptr is not None:
        narrow: tl.constexpr = sum_ptr.dtype.element_ty
        y = tl.load(y_ptr + token * y_stride + cols, mask=inside, other=0.0).to(tl.float32)
        gate_at = gate_ptr + row * gate_row + place * gate_token + cols
        gate = tl.load(gate_at, mask=inside, other=0.0).to(narrow).to(tl.float32)
        x = (x + (gate * y).to(narrow).to(tl.float32)).to(narrow)
        tl.store(sum_ptr + token * width + cols, x, mask=inside)
        x = x.to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, axis=0) / width, 0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    scale_at = scale_ptr + row * scale_row + place * scale_token + cols
    shift_at = shift_ptr + row * shift_row + place * shift_token + cols
    scale = tl.load(scale_at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_at, mask=inside, other=0.0).to(tl.float32)
    out = (normed * (1.0 + scale) + shift).to(x_ptr.dtype.element_ty)
    out_at = out_ptr + token * width + cols
    if int8_scale_ptr is not None:
        store_int8(out.to(tl.float32), out_at, int8_scale_ptr + token, inside)
    else:
        tl.store(out_at, out, mask=inside)


@triton.jit
def gated_residual_kernel(
    x_ptr,
    y_ptr,
    gate_ptr,
    out_ptr,
    width,
    length,
    x_stride,
    y_stride,
    gate_row,
    gate_token,
    BLOCK: tl.constexpr,
):
    """out = x + gate * y. One program per token and block of its width."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    narrow: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + token * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + token * y_stride + cols, mask=inside, other=0.0).to(tl.float32)
    gate_at = gate_ptr + token // length * gate_row + token % length * gate_token + cols
    gate = tl.load(gate_at, mask=inside, other=0.0).to(narrow).to(tl.float32)
    out = x + (gate * y).to(narrow).to(tl.float32)
    tl.store(out_ptr + token * width + cols, out.to(narrow), mask=inside)


def ada_rms_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return ``reference.ada_rms_norm``, with its roundings."""
    return _modulated(x, None, None, scale, shift, eps, False)[1]


def ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return ``reference.ada_layer_norm``, with its roundings."""
    return _modulated(x, None, None, scale, shift, eps, True)[1]


def gated_ada_rms_norm(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``reference.gated_ada_rms_norm``, with its roundings."""
    return _modulated(x, y, gate, scale, shift, eps, False)[:2]


def ada_rms_norm_quant(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> QuantizedActivations:
    """Return ``quant_norm.ada_rms_norm_quant``, with its roundings."""
    rounded = _modulated(x, None, None, scale, shift, eps, False, to_int8=True)[1:]
    return QuantizedActivations(*rounded)


def gated_ada_rms_norm_quant(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, QuantizedActivations]:
    """Return ``quant_norm.gated_ada_rms_norm_quant``, with its roundings."""
    total, *rounded = _modulated(x, y, gate, scale, shift, eps, False, to_int8=True)
    return total, QuantizedActivations(*rounded)


def gated_ada_layer_norm(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``reference.gated_ada_layer_norm``, with its roundings."""
    return _modulated(x, y, gate, scale, shift, eps, True)[:2]


def _modulated(
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    centred: bool,
    to_int8: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum, its norm, and the norm's scales; what is not wanted stands for another."""
    check(y is None or x.shape == y.shape, "gated norm x and y", "must have one shape", x, y)
    rows, added = as_rows(x), None if y is None else as_rows(y)
    scale, shift = spread(scale, x), spread(shift, x)
    gate = None if gate is None else spread(gate, x)
    out, scales = results(x, to_int8)
    total = None if y is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = block_of(x.shape[-1])
    launch(
        modulated_norm_kernel,
        (rows.shape[0],),
        rows,
        added,
        gate,
        scale,
        shift,
        total,
        out,
        scales,
        x.shape[-1],
        scale.shape[1],
        rows.stride(0),
        0 if added is None else added.stride(0),
        0 if gate is None else gate.stride(0),
        0 if gate is None else gate.stride(1),
        scale.stride(0),
        scale.stride(1),
        shift.stride(0),
        shift.stride(1),
        eps,
        CENTRED=centred,
        BLOCK=block,
        num_warps=warps_of(block),
        **options(to_int8),
    )
    return out if total is None else total, out, out if scales is None else scales


def gated_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Return ``reference.gated_residual``, with its roundings."""
    check(x.shape == y.shape, "gated_residual x and y", "must have one shape", x, y)
    rows, added, gate = as_rows(x), as_rows(y), spread(gate, x)
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        gated_residual_kernel,
        (rows.shape[0], triton.cdiv(width, _BLOCK)),
        rows,
        added,
        gate,
        out,
        width,
        gate.shape[1],
        rows.stride(0),
        added.stride(0),
        gate.stride(0),
        gate.stride(1),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
