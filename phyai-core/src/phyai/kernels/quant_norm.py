"""Norms whose result goes to linear layers with int8 inputs: rounded per token in the same pass.

Each is the op of that name in ``reference``, rounded to x's dtype, then ``quantize_per_token``.
"""

from __future__ import annotations

from torch import Tensor

from phyai.kernels import reference
from phyai.kernels.quant import QuantizedActivations, quantize_per_token


def rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, offset: float = 1.0
) -> QuantizedActivations:
    """Return ``reference.rms_norm`` as int8 tokens."""
    return quantize_per_token(reference.rms_norm(x, weight, eps, offset))


def add_rms_norm_quant(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float = 1.0
) -> tuple[Tensor, QuantizedActivations]:
    """Return the sum and norm of ``reference.add_rms_norm``, the norm as int8 tokens."""
    total, normed = reference.add_rms_norm(x, y, weight, eps, offset)
    return total, quantize_per_token(normed)


def ada_rms_norm_quant(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> QuantizedActivations:
    """Return ``reference.ada_rms_norm`` as int8 tokens."""
    return quantize_per_token(reference.ada_rms_norm(x, scale, shift, eps))


def gated_ada_rms_norm_quant(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, QuantizedActivations]:
    """Return the sum and norm of ``reference.gated_ada_rms_norm``, the norm as int8 tokens."""
    total, normed = reference.gated_ada_rms_norm(x, y, gate, scale, shift, eps)
    return total, quantize_per_token(normed)
