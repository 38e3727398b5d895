"""The weight layouts of the C++ linear kernels, as ``Linear`` asks for them."""

from __future__ import annotations

from torch import Tensor

from phyai.kernels.native.linear import PackedLinear, pack
from phyai.kernels.packing import GATED
from phyai.kernels.policy_quant import QuantScheme


def pack_weight(
    weight: Tensor, epilogue: str = "none", scheme: QuantScheme | None = None
) -> PackedLinear:
    """Return a weight [out, in] packed; for gated epilogues both halves side by side."""
    return pack(weight, interleave=epilogue in GATED)
