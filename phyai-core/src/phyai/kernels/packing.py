"""Weights in a kernel's own layout: packed once after loading, the plain copy given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from phyai.kernels.policy_quant import QuantScheme

GATED = ("gelu_tanh_mul", "silu_mul")
"""Epilogues that multiply the first half of the outputs, activated, with the second half."""

EPILOGUES = ("none", "gelu_tanh", *GATED)
"""What may follow a linear layer at once; each but "none" is also an op of its own."""


class PackedWeight(Protocol):
    """A weight [out, in] in a kernel's layout, and possibly format."""

    @property
    def nbytes(self) -> int: ...

    def unpack(self) -> Tensor:
        """Return the weight [out, in] as it was given; of quantised weights what they stand for."""

    def repack(self, weight: Tensor) -> None:
        """Take other values of the same shape, in the same storage where the layout allows it."""


class Pack(Protocol):
    """Lays out a weight [out, in] for one kernel row.

    epilogue: of ``EPILOGUES``; gated ones may want both halves side by side.
    scheme: the quantised format to round to, None for the weight's own dtype.
    """

    def __call__(
        self, weight: Tensor, epilogue: str = "none", scheme: QuantScheme | None = None
    ) -> PackedWeight: ...
