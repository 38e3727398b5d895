"""Linear layers with a weight per embodiment: a bank, of which each row uses its own entry.

The entries a batch needs are gathered into cache buffers once per request. Which embodiment a row
has is data: one captured graph serves all of them, and a batch may mix them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Placement
from phyai.types import BufferSpec
from phyai.weights import claim


class CategoryLinear(nn.Module):
    """y_i = x_i W[e_i] + b[e_i] for row i of embodiment e_i.

    ``<name>.W`` [embodiments, in, out] (not transposed), ``<name>.b`` [embodiments, out].
    """

    def __init__(
        self, name: str, embodiments: int, in_features: int, out_features: int, at: Placement
    ) -> None:
        super().__init__()
        self.weight = claim(at.parameter(embodiments, in_features, out_features), f"{name}.W")
        self.bias = claim(at.parameter(embodiments, out_features), f"{name}.b")

    def forward(self, x: Tensor, embodiment: Tensor) -> Tensor:
        """Return [B, T, out] of x [B, T, in]; embodiment int64 [B]."""
        weight = self.weight.index_select(0, embodiment)
        return torch.baddbmm(self.bias.index_select(0, embodiment)[:, None], x, weight)


class Gathered:
    """One CategoryLinear whose weights of the batch's rows lie in the cache.

    name: of its buffers ``<name>.w`` [B, in, out] and ``<name>.b`` [B, 1, out].
    inputs: use only the first so many inputs, None = all.  bias: False leaves the bias out, for
    callers that have a table with the bias in it.
    """

    def __init__(
        self, name: str, layer: CategoryLinear, *, inputs: int | None = None, bias: bool = True
    ) -> None:
        self.name, self.layer, self.bias = name, layer, bias
        self.inputs = layer.weight.shape[1] if inputs is None else inputs

    def buffers(self) -> Mapping[str, BufferSpec]:
        weight, out = self.layer.weight, self.layer.weight.shape[2]
        specs = {f"{self.name}.w": BufferSpec((self.inputs, out), weight.dtype)}
        if self.bias:
            specs[f"{self.name}.b"] = BufferSpec((1, out), weight.dtype)
        return specs

    def gather(self, cache: Cache, embodiment: Tensor) -> None:
        """Fill the buffers; embodiment int64 [B]."""
        weight = self.layer.weight.narrow(1, 0, self.inputs)
        torch.index_select(weight, 0, embodiment, out=cache[f"{self.name}.w"])
        if self.bias:
            bias = self.layer.bias[:, None]
            torch.index_select(bias, 0, embodiment, out=cache[f"{self.name}.b"])

    def __call__(self, x: Tensor, cache: Cache, bias: Tensor | None = None) -> Tensor:
        """Return [B, T, out] of x [B, T, in].  bias: [B, 1, out], instead of the layer's own."""
        chosen = cache[f"{self.name}.b"] if bias is None else bias
        return torch.baddbmm(chosen, x, cache[f"{self.name}.w"])
