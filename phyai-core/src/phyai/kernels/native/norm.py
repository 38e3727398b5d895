"""Norms and gated residual sums in C++; what the kernel does not take goes to the reference.

It takes x in fp32 or bf16 on the CPU, weights of one dtype (fp32 or bf16), and scale, shift (fp32)
and gate (fp32 or bf16) of shape [W], or broadcastable along B and T: [B, 1, W], [B, T, W].
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from phyai.kernels import reference
from phyai.kernels.native.call import CODES, as_rows, empty_rows, entry, watched

_block = struct.Struct("=23q2d").pack
_NONE = (0, 0, 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 1.0) -> Tensor:
    """Return ``reference.rms_norm``, with its roundings."""
    made = _norm(x, None, None, weight, None, eps, offset, False)
    return reference.rms_norm(x, weight, eps, offset) if made is None else made[1]


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return ``reference.add_rms_norm``, with its roundings."""
    made = _norm(x, y, None, weight, None, eps, offset, False)
    return made or reference.add_rms_norm(x, y, weight, eps, offset)


def ada_rms_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return ``reference.ada_rms_norm``, with its roundings."""
    made = _norm(x, None, None, scale, shift, eps, 1.0, False)
    return reference.ada_rms_norm(x, scale, shift, eps) if made is None else made[1]


def gated_ada_rms_norm(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``reference.gated_ada_rms_norm``, with its roundings."""
    made = _norm(x, y, gate, scale, shift, eps, 1.0, False)
    return made or reference.gated_ada_rms_norm(x, y, gate, scale, shift, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return ``reference.layer_norm``, with its roundings."""
    made = _norm(x, None, None, weight, bias, eps, 0.0, True)
    return reference.layer_norm(x, weight, bias, eps) if made is None else made[1]


def add_layer_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``reference.add_layer_norm``, with its roundings."""
    made = _norm(x, y, None, weight, bias, eps, 0.0, True)
    return made or reference.add_layer_norm(x, y, weight, bias, eps)


def ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return ``reference.ada_layer_norm``, with its roundings."""
    made = _norm(x, None, None, scale, shift, eps, 1.0, True)
    return reference.ada_layer_norm(x, scale, shift, eps) if made is None else made[1]


def gated_ada_layer_norm(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``reference.gated_ada_layer_norm``, with its roundings."""
    made = _norm(x, y, gate, scale, shift, eps, 1.0, True)
    return made or reference.gated_ada_layer_norm(x, y, gate, scale, shift, eps)


def gated_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Return ``reference.gated_residual``, with its roundings."""
    code, gate_code = CODES.get(x.dtype), CODES.get(gate.dtype)
    if watched() or code is None or gate_code is None or not _pair(x, y):
        return reference.gated_residual(x, y, gate)
    gate_at = _plane(gate, x.shape)
    if gate_at is None:
        return reference.gated_residual(x, y, gate)
    out = empty_rows(x)
    (dense, x_row), (y, y_row) = as_rows(x), as_rows(y)
    args = (dense.data_ptr(), x_row, y.data_ptr(), y_row, *gate_at, *_NONE, *_NONE, out.data_ptr())
    sizes = (0, *_counts(x), code, gate_code, 0, 0, torch.get_num_threads())
    entry("phyai_norm")(_block(*args, *sizes, 0.0, 0.0))
    return out


def _norm(
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    offset: float,
    centred: bool,
) -> tuple[Tensor, Tensor] | None:
    """Return the residual sum (x itself without y) and its norm; None: not for this kernel."""
    code, affine = CODES.get(x.dtype), CODES.get(scale.dtype)
    if watched() or code is None or affine is None or not x.is_cpu or not x.numel():
        return None
    if shift is not None and shift.dtype != scale.dtype:
        return None
    if y is not None and not _pair(x, y):
        return None
    gate_code = 0 if gate is None else CODES.get(gate.dtype)
    shape = x.shape
    gate_at = _NONE if gate is None else _plane(gate, shape)
    scale_at = _plane(scale, shape)
    shift_at = _NONE if shift is None else _plane(shift, shape)
    if gate_code is None or gate_at is None or scale_at is None or shift_at is None:
        return None
    out, total, total_at = empty_rows(x), x, 0
    (dense, x_row), y_at = as_rows(x), (0, 0)
    if y is not None:
        total = empty_rows(x)
        y, y_row = as_rows(y)
        total_at, y_at = total.data_ptr(), (y.data_ptr(), y_row)
    args = (dense.data_ptr(), x_row, *y_at, *gate_at, *scale_at, *shift_at, total_at)
    sizes = (out.data_ptr(), *_counts(x), code, gate_code, affine, centred)
    entry("phyai_norm")(_block(*args, *sizes, torch.get_num_threads(), eps, offset))
    return total, out


def _pair(x: Tensor, y: Tensor) -> bool:
    """Say whether x and y can be added row by row."""
    return y.dtype == x.dtype and y.shape == x.shape and x.is_cpu and x.numel() > 0


def _counts(x: Tensor) -> tuple[int, int, int]:
    """Return rows, tokens per batch entry, and width of x [..., W]."""
    shape = x.shape
    if len(shape) == 3:
        batch, tokens, width = shape
        return batch * tokens, tokens, width
    rows = x.numel() // shape[-1]
    return rows, rows, shape[-1]


def _plane(m: Tensor, x: torch.Size) -> tuple[int, int, int] | None:
    """Return address, batch stride and token stride of m beside x [..., W]; None: not supported."""
    shape = m.shape
    if not shape or shape[-1] != x[-1] or not m.is_cpu:
        return None
    if len(shape) == 1:
        return (m.data_ptr(), 0, 0) if m.is_contiguous() else None
    if len(shape) != 3 or len(x) != 3:
        return None
    batch, tokens, width = m.stride()
    if shape[0] not in (1, x[0]) or shape[1] not in (1, x[1]) or width != 1:
        return None
    return m.data_ptr(), 0 if shape[0] == 1 else batch, 0 if shape[1] == 1 else tokens
