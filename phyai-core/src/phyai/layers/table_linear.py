"""Linear layers that only build tables: kept small rather than fast."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.layers.placement import Placement
from phyai.weights import claim, refuse_empty


class TableLinear(nn.Module):
    """y = x W^T + b in float32, for tables: it runs once per table, not per request.

    W rests in bfloat16 when that loses nothing, as with every checkpoint stored in it: half the
    memory, the same results. ``weight`` then has shape and dtype but no values (see ``Linear``).
    Shapes: x float32 [..., in] -> [..., out].

    >>> from phyai.kernels import KernelTable
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.bfloat16)
    >>> TableLinear("dense", 8, 24, at)(torch.zeros(2, 8)).shape
    torch.Size([2, 24])
    """

    def __init__(self, name: str, in_features: int, out_features: int, at: Placement) -> None:
        super().__init__()
        wide = at.with_dtype(torch.float32)
        self.weight = claim(wide.parameter(out_features, in_features), f"{name}.weight")
        self.bias = claim(wide.parameter(out_features), f"{name}.bias")
        self._narrow: Tensor | None = None
        self.register_state_dict_pre_hook(refuse_empty)  # type: ignore[no-untyped-call]

    @property
    def is_packed(self) -> bool:
        return self._narrow is not None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self._narrow is None else self._narrow.float()
        return functional.linear(x, weight, self.bias)

    def pack(self) -> None:
        """Keep the weight in bfloat16, when that is exact."""
        if self.is_packed:
            return
        narrow = self.weight.data.bfloat16()
        if torch.equal(narrow.float(), self.weight.data):
            self._narrow = narrow
            self.weight.data = self.weight.data.new_zeros(1).expand(self.weight.shape)

    def unpack(self) -> None:
        """Put the float32 weight back."""
        if self._narrow is not None:
            self.weight.data, self._narrow = self._narrow.float(), None
