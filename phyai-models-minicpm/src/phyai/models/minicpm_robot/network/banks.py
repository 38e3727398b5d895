"""Linear layers with a weight per embodiment: a bank, of which each row uses its own entry.

The entries a batch needs are gathered into cache buffers once per request. Which embodiment a row
has is data: one captured graph serves all of them, and a batch may mix them. The shared head has
ordinary linear layers in the same places: banks of one entry, of which nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Placement
from phyai.types import BufferSpec
from phyai.weights import Loader, claim


class Turned(Loader):
    """An ordinary layer's weight [out, in] or bias [out] as a bank of one: [1, in, out], [1, out].

    >>> Turned().shape(torch.empty(1, 3, 8), None)
    (8, 3)
    """

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        return tuple(reversed(param.shape[1:]))

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        param[0].copy_(tensor.t())


class Bank(nn.Module):
    """y_i = x_i W[e_i] + b[e_i] for row i of embodiment e_i.

    ``<name>.W`` [E, in, out] (not transposed), ``<name>.b`` [E, out].
    embodiments: E; None = one for all: ``<name>.weight`` [out, in], ``<name>.bias`` [out].
    """

    def __init__(
        self,
        name: str,
        embodiments: int | None,
        in_features: int,
        out_features: int,
        at: Placement,
    ) -> None:
        super().__init__()
        self.shared = embodiments is None
        count = embodiments or 1
        weight, bias = (
            at.parameter(count, in_features, out_features),
            at.parameter(count, out_features),
        )
        loader = Turned() if self.shared else None
        names = ("weight", "bias") if self.shared else ("W", "b")
        self.weight = claim(weight, f"{name}.{names[0]}", loader=loader)
        self.bias = claim(bias, f"{name}.{names[1]}", loader=loader)

    def of_rows(self, table: Tensor, embodiment: Tensor) -> Tensor:
        """Return the entries [B, ...] of a table [E, ...]; [1, ...] for all rows when shared."""
        return table if self.shared else table.index_select(0, embodiment)


class RowBank:
    """One bank whose weights of the batch's rows lie in the cache.

    name: of its buffers ``<name>.w`` [B, in, out] and ``<name>.b`` [B, 1, out].
    inputs: use only the first so many inputs, None = all.  bias: False leaves the bias out, for
    callers that have it in a table.
    """

    def __init__(
        self, name: str, bank: Bank, *, inputs: int | None = None, bias: bool = True
    ) -> None:
        self.name, self.bank, self.bias = name, bank, bias
        self.inputs = bank.weight.shape[1] if inputs is None else inputs

    def buffers(self) -> Mapping[str, BufferSpec]:
        if self.bank.shared:
            return {}
        weight, out = self.bank.weight, self.bank.weight.shape[2]
        specs = {f"{self.name}.w": BufferSpec((self.inputs, out), weight.dtype)}
        if self.bias:
            specs[f"{self.name}.b"] = BufferSpec((1, out), weight.dtype)
        return specs

    def gather(self, cache: Cache, embodiment: Tensor) -> None:
        """Fill the buffers; embodiment int64 [B]."""
        if self.bank.shared:
            return
        weight, bias = self.bank.weight.narrow(1, 0, self.inputs), self.bank.bias[:, None]
        torch.index_select(weight, 0, embodiment, out=cache[f"{self.name}.w"])
        if self.bias:
            torch.index_select(bias, 0, embodiment, out=cache[f"{self.name}.b"])

    def __call__(self, x: Tensor, cache: Cache, bias: Tensor | None = None) -> Tensor:
        """Return [B, T, out] of x [B, T, in].  bias: [B, 1, out], instead of the layer's own."""
        if self.bank.shared:
            weight = self.bank.weight.narrow(1, 0, self.inputs).expand(len(x), -1, -1)
            return torch.baddbmm(self.bank.bias[:, None] if bias is None else bias, x, weight)
        chosen = cache[f"{self.name}.b"] if bias is None else bias
        return torch.baddbmm(chosen, x, cache[f"{self.name}.w"])
