"""Normalisation layers; their parameters stay float32 in every precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phyai.kernels.quant import QuantizedActivations
from phyai.layers.linear import Linear
from phyai.layers.placement import Placement
from phyai.weights import claim


class RMSNorm(nn.Module):
    """y = x / rms(x) * (offset + w), statistics and product in float32, cast back to x's dtype.

    Shapes: x [..., width] -> the same.

    >>> from phyai.kernels import KernelTable
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.bfloat16)
    >>> norm = RMSNorm("final_norm", 8, 1e-6, at)
    >>> norm.weight.dtype, norm(torch.zeros(2, 8, dtype=torch.bfloat16)).dtype
    (torch.float32, torch.bfloat16)
    """

    def __init__(
        self, name: str, width: int, eps: float, at: Placement, *, offset: float = 1.0
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = claim(at.parameter(width, dtype=torch.float32), f"{name}.weight")
        self._at, self._width = at, width
        self.feed()

    def feed(self, *layers: Linear) -> None:
        """Give the norm to these layers and nothing else: as int8 tokens where all take them."""
        self._norm = self._at.select(norm_op("rms_norm", layers), width=self._width)
        self._add_norm = self._at.select(norm_op("add_rms_norm", layers), width=self._width)

    def forward(self, x: Tensor) -> Tensor | QuantizedActivations:
        out: Tensor | QuantizedActivations = self._norm(
            x, self.weight, self.eps, offset=self.offset
        )
        return out

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        """Return x + y and its norm, in one pass."""
        out: tuple[Tensor, Any] = self._add_norm(x, y, self.weight, self.eps, offset=self.offset)
        return out


def norm_op(op: str, layers: Sequence[Linear]) -> str:
    """Return the op of a norm that only ``layers`` read, ``<op>_quant`` where all take int8 tokens.

    >>> from phyai.layers.norm import norm_op
    >>> norm_op("ada_rms_norm", [])
    'ada_rms_norm'
    """
    rounded = bool(layers) and all(layer.takes_rounded == "int8" for layer in layers)
    return f"{op}_quant" if rounded else op


class LayerNorm(nn.Module):
    """Ordinary LayerNorm with weight and bias, parameters in the placement's dtype.

    Shapes: x [..., width] -> the same.

    >>> from phyai.kernels import KernelTable
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    >>> LayerNorm("ln", 8, 1e-6, at)(torch.zeros(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, name: str, width: int, eps: float, at: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = claim(at.parameter(width), f"{name}.weight")
        self.bias = claim(at.parameter(width), f"{name}.bias")
        self._norm = at.select("layer_norm", width=width)
        self._add_norm = at.select("add_layer_norm", width=width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._norm(x, self.weight, self.bias, self.eps)
        return out

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + y and its norm, in one pass."""
        out: tuple[Tensor, Tensor] = self._add_norm(x, y, self.weight, self.bias, self.eps)
        return out
