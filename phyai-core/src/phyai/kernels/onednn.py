"""Linear layers through oneDNN with weights it has laid out once, so that no call does it again.

torch's own linear re-lays the weight in every call, which costs most where few rows share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phyai.kernels.policy_quant import QuantScheme

ROWS = 64
"""Rows of x that the layout is chosen for; it serves every other number too."""
STEP = 32
"""Larger numbers of rows are rounded up to it: oneDNN compiles and keeps code for each number."""


class OneDnnWeight:
    """A weight [out, in] in the layout oneDNN chose."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes
        self.repack(weight)

    def unpack(self) -> Tensor:
        plain: Tensor = self.blocked.to_dense()
        return plain

    def repack(self, weight: Tensor) -> None:
        self.blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)


def pack(weight: Tensor, epilogue: str = "none", scheme: QuantScheme | None = None) -> OneDnnWeight:
    """Return a weight [out, in] in oneDNN's layout; the sizes stay the same."""
    return OneDnnWeight(weight)


def linear(
    x: Tensor, weight: OneDnnWeight, bias: Tensor | None = None, epilogue: str = "none"
) -> Tensor:
    """Return x @ weight.T + bias, for ``gelu_tanh`` activated in the same pass.

    Shapes: as ``reference.linear``.
    Rounding: once, after the activation: one rounding point less than the reference has.
    """
    rows = x.numel() // max(x.shape[-1], 1)
    if rows <= STEP or rows % STEP == 0:
        return _product(x, weight, bias, epilogue)
    padded = x.new_zeros(-(-rows // STEP) * STEP, x.shape[-1])
    padded[:rows] = x.reshape(rows, -1)
    return _product(padded, weight, bias, epilogue)[:rows].view(*x.shape[:-1], -1)


def _product(x: Tensor, weight: OneDnnWeight, bias: Tensor | None, epilogue: str) -> Tensor:
    attribute, algorithm = ("gelu", "tanh") if epilogue == "gelu_tanh" else ("none", "")
    out: Tensor = torch.ops.mkldnn._linear_pointwise(
        x, weight.blocked, bias, attribute, [], algorithm
    )
    return out


def fits(facts: Mapping[str, Any]) -> bool | str:
    """Accept float32, and bfloat16 where the CPU computes with it."""
    if not torch._C._has_mkldnn:
        return "this torch has no oneDNN"
    if facts["dtype"] == "float32" or bfloat16_on_this_cpu():
        return True
    return "this CPU has no bfloat16 arithmetic for oneDNN"


def fits_fused(facts: Mapping[str, Any]) -> bool | str:
    """Accept what ``fits`` does, for an activation that may keep more bits than the reference."""
    found = fits(facts)
    if found is not True:
        return found
    if facts.get("epilogue") != "gelu_tanh":
        return "only for layers followed by gelu_tanh"
    if facts["dtype"] == "float32" or facts["rounding"] == "free":
        return True
    return f"rounds once, the official {facts['dtype']} numerics twice; needs rounding='free'"


def bfloat16_on_this_cpu() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
