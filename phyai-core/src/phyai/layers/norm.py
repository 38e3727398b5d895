"""Normalisation layers; their parameters stay float32 in every precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, overload

import torch
from torch import Tensor, nn

from phyai.kernels.quant import QuantizedActivations
from phyai.layers.linear import Linear
from phyai.layers.placement import Placement
from phyai.weights import claim

_Normed: TypeAlias = Tensor | QuantizedActivations


class RMSNorm(nn.Module):
    """y = x / rms(x) * (offset + w), statistics and product in float32, cast back to x's dtype.

    ``norm(x)`` is the norm of x, ``norm(x, y)`` the pair of x + y and its norm, in one pass.
    Shapes: x, y [..., width] -> the same.

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

    @overload
    def forward(self, x: Tensor, y: None = None) -> _Normed: ...
    @overload
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, _Normed]: ...
    def forward(self, x: Tensor, y: Tensor | None = None) -> _Normed | tuple[Tensor, _Normed]:
        if y is None:
            n: _Normed = self._norm(x, self.weight, self.eps, offset=self.offset)
            return n
        pair: tuple[Tensor, _Normed] = self._add_norm(
            x, y, self.weight, self.eps, offset=self.offset
        )
        return pair


class RotatedHeadNorm(nn.Module):
    """RMSNorm over each head, plain weights, then the rotation of the token's position.

    Shapes: x [B, T, H, head_dim]; cos, sin [B, T, head_dim] -> [B, T, H, head_dim].

    >>> from phyai.kernels import KernelTable
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    >>> norm, angles = RotatedHeadNorm("q_norm", 8, 1e-6, at), torch.zeros(1, 3, 8)
    >>> norm(torch.zeros(1, 3, 2, 8), angles, angles).shape
    torch.Size([1, 3, 2, 8])
    """

    def __init__(self, name: str, head_dim: int, eps: float, at: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = claim(at.parameter(head_dim, dtype=torch.float32), f"{name}.weight")
        self._norm = at.select("rms_norm_rope", head_dim=head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out: Tensor = self._norm(x, self.weight, cos, sin, self.eps)
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

    ``norm(x)`` is the norm of x, ``norm(x, y)`` the pair of x + y and its norm, in one pass.
    Shapes: x, y [..., width] -> the same.

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

    @overload
    def forward(self, x: Tensor, y: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if y is None:
            n: Tensor = self._norm(x, self.weight, self.bias, self.eps)
            return n
        pair: tuple[Tensor, Tensor] = self._add_norm(x, y, self.weight, self.bias, self.eps)
        return pair
