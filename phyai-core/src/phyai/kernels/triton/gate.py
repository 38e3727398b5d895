"""Gated products of an MLP: GeGLU (tanh form) and SwiGLU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.triton.launch import as_rows, check, launch

_BLOCK = 1024


@triton.jit
def gelu_tanh_of(x):
    """0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2/pi) (x + 0.044715 x^3)."""
    u2 = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-u2))


@triton.jit
def silu_of(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gated_product_kernel(
    gate_up_ptr, out_ptr, inner, stride, SILU: tl.constexpr, BLOCK: tl.constexpr
):
    """out = act(gate) * up, gate the first half of a row. One program per row and block."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < inner
    narrow: tl.constexpr = out_ptr.dtype.element_ty
    at = gate_up_ptr + row * stride + cols
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    active = silu_of(gate) if SILU else gelu_tanh_of(gate)
    out = active.to(narrow).to(tl.float32) * up
    tl.store(out_ptr + row * inner + cols, out.to(narrow), mask=inside)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Return ``reference.gelu_tanh_mul``, with its roundings."""
    return _launch(gate_up, False)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``reference.silu_mul``, with its roundings."""
    return _launch(gate_up, True)


def _launch(gate_up: Tensor, silu: bool) -> Tensor:
    width = gate_up.shape[-1]
    check(width % 2 == 0, "gate_up", "must hold two halves of one width", gate_up)
    rows, inner = as_rows(gate_up), width // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], inner)
    launch(
        gated_product_kernel,
        (rows.shape[0], triton.cdiv(inner, _BLOCK)),
        rows,
        out,
        inner,
        rows.stride(0),
        SILU=silu,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
