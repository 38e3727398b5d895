"""Activations in C++; what the kernel does not take goes to the reference.

It takes fp32 and bf16 on the CPU, and a bias in either.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from phyai.kernels import reference
from phyai.kernels.native.call import CODES, as_rows, empty_rows, entry, watched

_gated_block = struct.Struct("=8q").pack
_bias_block = struct.Struct("=9q").pack
_GELU, _SILU = 0, 1


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Return ``reference.gelu_tanh_mul``, with its roundings."""
    out = _gated(gate_up, _GELU)
    return reference.gelu_tanh_mul(gate_up) if out is None else out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``reference.silu_mul``, with its roundings."""
    out = _gated(gate_up, _SILU)
    return reference.silu_mul(gate_up) if out is None else out


def bias_gelu_tanh(x: Tensor, bias: Tensor) -> Tensor:
    """Return ``reference.bias_gelu_tanh``, with its roundings."""
    code, bias_code = CODES.get(x.dtype), CODES.get(bias.dtype)
    if (
        watched()
        or code is None
        or bias_code is None
        or not (x.is_cpu and bias.is_cpu and x.numel())
        or bias.shape != x.shape[-1:]
        or not bias.is_contiguous()
    ):
        return reference.bias_gelu_tanh(x, bias)
    out, width = empty_rows(x), x.shape[-1]
    x, row = as_rows(x)
    addresses = (x.data_ptr(), row, bias.data_ptr(), out.data_ptr())
    sizes = (x.numel() // width, width, code, bias_code, torch.get_num_threads())
    entry("phyai_bias_gelu")(_bias_block(*addresses, *sizes))
    return out


def _gated(x: Tensor, activation: int) -> Tensor | None:
    code = CODES.get(x.dtype)
    if watched() or code is None or not x.is_cpu or not x.numel() or x.shape[-1] % 2:
        return None
    *outer, twice = x.shape
    out = x.new_empty((*outer, twice // 2))
    x, row = as_rows(x)
    sizes = (x.numel() // twice, twice // 2, code, activation, torch.get_num_threads())
    entry("phyai_gated")(_gated_block(x.data_ptr(), row, out.data_ptr(), *sizes))
    return out
