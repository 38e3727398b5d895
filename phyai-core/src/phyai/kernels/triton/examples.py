"""Calls with tensors that hold no memory: what the ahead-of-time check compiles, per op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phyai.kernels.policy_quant import QuantScheme, TensorQuant
from phyai.kernels.quant_linear import QuantizedWeight
from phyai.kernels.triton_rows import WIDEST_ROW


@dataclass(frozen=True)
class Example:
    """The facts that choose a row, and a call of it."""

    label: str
    args: tuple[Any, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


def examples(row: str, dtype: torch.dtype) -> list[Example]:
    """Return the calls of a row: every variant of its kernels, at the widest row they accept."""
    return _EXAMPLES[row.removeprefix("triton.")](dtype)


def _new(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm(dtype: torch.dtype, x: int, vectors: int, *scalars: float) -> list[Example]:
    """x tensors [1, 50, W] of the dtype, float32 vectors [W], then scalars."""
    width = WIDEST_ROW
    tensors = [_new(dtype, 1, 50, width)] * x + [_new(torch.float32, width)] * vectors
    return [Example("", (*tensors, *scalars), {"width": width})]


def _product(dtype: torch.dtype) -> list[Example]:
    return [Example("", (_new(dtype, 1, 50, 2 * 4096),))]


def _scale_bias(dtype: torch.dtype) -> list[Example]:
    wide, tall = _new(torch.float32, 2048), _new(torch.float32, 50)
    x = _new(torch.int32, 50, 2048)
    bias = _new(dtype, 2048)
    return [
        Example("row scale, bias", (x, wide, dtype, tall, bias)),
        Example("weight only", (_new(dtype, 50, 2048), wide, dtype, None, None)),
    ]


def _heads(dtype: torch.dtype, heads: int) -> Tensor:
    return _new(dtype, 1, 50, heads, 256)


def _rope(dtype: torch.dtype) -> list[Example]:
    angle = _new(dtype, 1, 50, 256)
    return [Example("", (_heads(dtype, 8), angle, angle), {"head_dim": 256})]


def _head_norm(dtype: torch.dtype) -> list[Example]:
    angle, weight = _new(dtype, 1, 50, 256), _new(torch.float32, 256)
    return [Example("", (_heads(dtype, 8), weight, angle, angle, 1e-6), {"head_dim": 256})]


def _rope_kv(dtype: torch.dtype) -> list[Example]:
    angle, cache, slots = _new(dtype, 1, 50, 256), _new(dtype, 1024, 1, 256), _slots()
    q, k = _heads(dtype, 8), _heads(dtype, 1)
    return [Example("", (q, k, k, angle, angle, cache, cache, slots), {"head_dim": 256})]


def _kv_write(dtype: torch.dtype) -> list[Example]:
    return [Example("", (_new(dtype, 1024, 1, 256), _slots(), _new(dtype, 50, 1, 256)))]


def _slots() -> Tensor:
    return _new(torch.int64, 50)


def _attention(dtype: torch.dtype) -> list[Example]:
    """One of each tile of the kernel, and each kind of mask."""
    mask, bias = _new(torch.bool, 1, 1018), _new(torch.float32, 1, 1, 50, 1018)
    return [
        _attend(dtype, "D=256, key mask", 8, 1, 256, mask),
        _attend(dtype, "D=128, no mask", 16, 8, 128),
        _attend(dtype, "D=64, key mask, bias", 12, 12, 64, mask, bias),
    ]


def _attend(
    dtype: torch.dtype, label: str, heads: int, kv_heads: int, dim: int, *masks: Tensor
) -> Example:
    q, k = _new(dtype, 1, 50, heads, dim), _new(dtype, 1, 1018, kv_heads, dim)
    facts = {"head_dim": dim, "queries": 50, "masked": bool(masks)}
    return Example(label, (q, k, k, dim**-0.5, *masks), facts)


def _int8_linear(dtype: torch.dtype, taken: str | None) -> list[Example]:
    """One of each tile of the kernel."""
    inputs = None if taken is None else TensorQuant(taken, "per_channel", dynamic=True)
    scheme = QuantScheme(TensorQuant("int8", "block", (1, 128)), inputs)
    weight, bias = QuantizedWeight(_new(dtype, 4096, 2048), scheme), _new(dtype, 4096)
    facts = {"packed": True, **scheme.facts()}
    return [
        Example("few rows", (_new(dtype, 50, 2048), weight, None), facts),
        Example("many rows, bias", (_new(dtype, 968, 2048), weight, bias), facts),
    ]


_RMS_NORMS: dict[str, Callable[[torch.dtype], list[Example]]] = {
    "rms_norm": lambda dtype: _norm(dtype, 1, 1, 1e-6, 1.0),
    "add_rms_norm": lambda dtype: _norm(dtype, 2, 1, 1e-6, 1.0),
    "ada_rms_norm": lambda dtype: _norm(dtype, 1, 2, 1e-6),
    "gated_ada_rms_norm": lambda dtype: _norm(dtype, 2, 3, 1e-6),
}
_EXAMPLES: dict[str, Callable[[torch.dtype], list[Example]]] = {
    **_RMS_NORMS,
    **{f"{name}_quant": made for name, made in _RMS_NORMS.items()},
    "layer_norm": lambda dtype: _norm(dtype, 1, 2, 1e-6),
    "add_layer_norm": lambda dtype: _norm(dtype, 2, 2, 1e-6),
    "ada_layer_norm": lambda dtype: _norm(dtype, 1, 2, 1e-6),
    "gated_ada_layer_norm": lambda dtype: _norm(dtype, 2, 3, 1e-6),
    "gated_residual": lambda dtype: _norm(dtype, 2, 1),
    "gelu_tanh_mul": _product,
    "silu_mul": _product,
    "bias_gelu_tanh": lambda dtype: [Example("", (_new(dtype, 50, 4096), _new(dtype, 4096)))],
    "scale_bias": _scale_bias,
    "apply_rope": _rope,
    "apply_rope_fp32": _rope,
    "rms_norm_rope": _head_norm,
    "rope_kv_write": _rope_kv,
    "kv_write": _kv_write,
    "attention": _attention,
    "int8_linear": lambda dtype: _int8_linear(dtype, "int8"),
    "int8_weight_linear": lambda dtype: _int8_linear(dtype, None),
}
