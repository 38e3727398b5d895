"""Linear layers, several checkpoint matrices fused into one where they share an input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phyai.errors import KernelUnavailable
from phyai.kernels.packing import PackedWeight
from phyai.kernels.quant import QuantizedActivations
from phyai.layers.placement import Placement
from phyai.weights import Loader, claim, fused, refuse_empty


class Linear(nn.Module):
    """y = f(x W^T + b) for one or several checkpoint layers with the same input.

    names: checkpoint prefixes, ``<name>.weight`` [out_i, in] (and ``<name>.bias``); their rows are
    stacked in order.
    epilogue: f, an op of one argument; gated ones halve the outputs. Those in
        ``phyai.kernels.packing.EPILOGUES`` happen in the same pass where the kernel can.
    loader, bias_loader: of weight and bias, where the checkpoint has them in another shape.
    packed: False keeps the weight as the checkpoint has it, for callers that read ``weight``.
    Shapes: x [..., in] of the weight's dtype -> [..., sum(out)]; or rounded per token by the norm
    before it, see ``takes_rounded``.

    After loading, the kernel's own layout replaces the weight (``pack``); ``weight`` then has shape
    and dtype but no values, until ``unpack``.

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
        epilogue: str = "none",
        packed: bool = True,
        loader: Loader | None = None,
        bias_loader: Loader | None = None,
    ) -> None:
        super().__init__()
        legs = [names] if isinstance(names, str) else list(names)
        self.sizes = [out_features] if isinstance(out_features, int) else list(out_features)
        total = sum(self.sizes)
        joined = fused(self.sizes) if len(legs) > 1 else None
        self.weight = claim(
            at.parameter(total, in_features),
            *(f"{n}.weight" for n in legs),
            loader=loader or joined,
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = claim(
                at.parameter(total), *(f"{n}.bias" for n in legs), loader=bias_loader or joined
            )
        self.epilogue = epilogue
        # One name for all subclasses: a policy names layers alike, however many ranks share them.
        self.scheme = at.scheme(legs, Linear.__name__) if packed else None
        facts = {
            "in_features": in_features,
            "out_features": total,
            "bias": bias,
            "epilogue": epilogue,
            "packed": packed,
            **(self.scheme.facts() if self.scheme else {}),
        }
        try:
            self._kernel = at.choose("linear", **facts)
        except KernelUnavailable as error:
            form = f", quantised to {self.scheme}," if self.scheme else ""
            told = f"layer {', '.join(legs)}{form} must have a kernel; {error}"
            raise KernelUnavailable(told) from error
        self._pack = self._kernel.pack
        self._packed: PackedWeight | None = None
        self.is_packed = False  # the values are in the kernel's layout only
        self.register_state_dict_pre_hook(refuse_empty)  # type: ignore[no-untyped-call]
        self._linear = self._kernel.fn
        self._fuses = epilogue != "none" and epilogue in self._kernel.row.epilogues
        self._after = None if self._fuses or epilogue == "none" else at.select(epilogue)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def kernel(self) -> str:
        """Return the name of the kernel row that runs this layer."""
        return self._kernel.row.name

    @property
    def takes_rounded(self) -> str | None:
        """Return the format in which it takes ``QuantizedActivations`` too, such as ``int8``."""
        if self.scheme is None or self.scheme.input is None or not self._kernel.row.rounded_inputs:
            return None
        return self.scheme.input.dtype

    def forward(self, x: Tensor | QuantizedActivations) -> Tensor:
        return self._product(x, self.bias)

    def _product(self, x: Tensor | QuantizedActivations, bias: Tensor | None) -> Tensor:
        if self._pack is not None and not self.is_packed:
            self.pack()
        weight = self.weight if self._packed is None else self._packed
        if self._fuses:
            out: Tensor = self._linear(x, weight, bias, self.epilogue)
            return out
        out = self._linear(x, weight, bias)
        return out if self._after is None else self._after(out)

    def pack(self) -> None:
        """Hand the loaded weight to the kernel's layout and give its memory back."""
        if self._pack is None or self.is_packed:
            return
        if self._packed is None:
            epilogue = self.epilogue if self._fuses else "none"
            self._packed = self._pack(self.weight.data, epilogue, self.scheme)
        else:
            self._packed.repack(self.weight.data)
        self.is_packed = True
        # Shape and dtype stay for whoever asks; writing to it fails, instead of getting lost.
        self.weight.data = self.weight.data.new_zeros(1).expand(self.weight.shape)

    def unpack(self) -> None:
        """Put the weight back, so that some of it can be overwritten; then ``pack`` again."""
        if self.is_packed:
            assert self._packed is not None
            self.weight.data = self._packed.unpack().to(self.weight.dtype)
            self.is_packed = False
