"""Linear layers, several checkpoint matrices fused into one where they share an input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phyai.layers.placement import Placement
from phyai.weights import claim, fused


class Linear(nn.Module):
    """y = x W^T + b for one or several checkpoint layers with the same input.

    names: checkpoint prefixes, ``<name>.weight`` [out_i, in] (and ``<name>.bias``); their rows are
    stacked in order. Shapes: x [..., in] of the weight's dtype -> [..., sum(out)].

    >>> import torch
    >>> from phyai.kernels import KernelTable
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    >>> Linear(["q_proj", "k_proj"], 8, [8, 4], at)(torch.zeros(2, 8)).shape
    torch.Size([2, 12])
    """

    def __init__(
        self,
        names: str | Sequence[str],
        in_features: int,
        out_features: int | Sequence[int],
        at: Placement,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        legs = [names] if isinstance(names, str) else list(names)
        self.sizes = [out_features] if isinstance(out_features, int) else list(out_features)
        total = sum(self.sizes)
        loader = fused(self.sizes) if len(legs) > 1 else None
        self.weight = claim(
            at.parameter(total, in_features), *(f"{n}.weight" for n in legs), loader=loader
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = claim(at.parameter(total), *(f"{n}.bias" for n in legs), loader=loader)
        self._linear = at.select("linear", in_features=in_features, out_features=total)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._linear(x, self.weight, self.bias)
        return out

    def tail(self, x: Tensor, first_leg: int) -> Tensor:
        """Return only the outputs of legs ``first_leg`` on, at their cost."""
        start = sum(self.sizes[:first_leg])
        bias = None if self.bias is None else self.bias[start:]
        out: Tensor = self._linear(x, self.weight[start:], bias)
        return out
