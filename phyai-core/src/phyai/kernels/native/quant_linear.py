"""Linear layers on the CPU over int8 weights: with inputs rounded to int8 in the same call, or not.

Values and scales are those of ``phyai.kernels.quant``; only their layout is the library's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels.native.library import Library, library
from phyai.kernels.native.linear import PackedLinear, check_weight, linear
from phyai.kernels.packing import GATED
from phyai.kernels.policy_quant import QuantScheme, TensorQuant
from phyai.kernels.quant import QuantizedTensor, dequantize, quantize, requantize

BLOCK = 128
WEIGHT = TensorQuant("int8", "block", (1, BLOCK))
"""The one weight format of these kernels: a scale for 128 values of a row."""

_WEIGHT_ONLY, _BOTH = 1, 2  # ``phyai::Format``
_ROWS = 128  # rows come in multiples of it: whole panels of every layout
_CHUNK = 2**21  # values in int8, and for a moment in fp32, besides the packed ones


class PackedInt8(PackedLinear):
    """A weight [out_features, in_features] in int8 in the layout of one library.

    ``data`` holds a byte per value and a scale for ``BLOCK`` of them. ``rounds_inputs``: the layer
    rounds its inputs to int8 per token.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        interleaved: bool,
        rounds_inputs: bool,
        lib: Library,
    ) -> None:
        code = _BOTH if rounds_inputs else _WEIGHT_ONLY
        super().__init__(None, shape, dtype, interleaved, lib, code)

    @property
    def rounds_inputs(self) -> bool:
        return self.format == _BOTH

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle values and scales, not their layout: the weight they stand for rounds anew."""
        parts = [self.rounded(rows) for rows in self._chunks()]
        values, scales = torch.cat([p.values for p in parts]), torch.cat([p.scales for p in parts])
        state = (self.dtype, self.interleaved, self.rounds_inputs)
        return (_packed_again, (values, scales, *state))

    def unpack(self) -> Tensor:
        """Return the weight [out_features, in_features] the values stand for, in ``dtype``."""
        weight = self._empty_weight()
        for rows in self._chunks():
            weight[rows] = dequantize(self.rounded(rows), self.dtype)
        return weight

    def repack(self, weight: Tensor) -> None:
        """Round another weight into the same storage; rows that hold what they did keep their bits.

        Raises: ConfigError when shape or dtype differ.
        """
        weight = self._checked(weight)
        for rows in self._chunks():
            made = self.rounded(rows)
            requantize(made, weight[rows])
            self._write(made, rows.start)

    def fill(self, weight: Tensor) -> None:
        """Round a weight into storage without values."""
        weight = self._checked(weight)
        for rows in self._chunks():
            self._write(quantize(weight[rows], WEIGHT), rows.start)

    def rounded(self, rows: slice) -> QuantizedTensor:
        """Return some rows as the reference holds them; ``rows`` as ``_chunks`` cuts them."""
        shape = (rows.stop - rows.start, self.in_features)
        values = self.data.new_empty(shape, dtype=torch.int8)
        scales = self.data.new_empty((shape[0], -(-shape[1] // BLOCK)), dtype=torch.float32)
        self._move(self._functions.unpack, values, scales, rows.start)
        return QuantizedTensor(values, scales, WEIGHT, shape)

    def restore(self, values: Tensor, scales: Tensor) -> None:
        """Take the values [N, K] and scales [N, ceil(K / ``BLOCK``)] of a rounded weight."""
        for rows in self._chunks():
            shape = (rows.stop - rows.start, self.in_features)
            self._write(QuantizedTensor(values[rows], scales[rows], WEIGHT, shape), rows.start)

    def _write(self, made: QuantizedTensor, first: int) -> None:
        self._move(self._functions.pack, made.values, made.scales, first)

    def _chunks(self) -> Iterator[slice]:
        """Yield rows of whole panels, some at a time."""
        step = max(_CHUNK // self.in_features // _ROWS, 1) * _ROWS
        half = self.out_features // 2 if self.interleaved else self.out_features
        for begin in range(0, self.out_features, half):
            for start in range(begin, begin + half, step):
                yield slice(start, min(start + step, begin + half))


def pack_int8(
    weight: Tensor,
    epilogue: str = "none",
    scheme: QuantScheme | None = None,
    *,
    lib: Library | None = None,
) -> PackedInt8:
    """Return a weight rounded to int8, packed; for gated epilogues both halves side by side.

    Shapes: weight [N, K] bfloat16 or float32 on the CPU.  scheme: ``WEIGHT`` with inputs in int8 or
        as they are, ``None`` for the latter.  lib: of another library than this process's.
    Raises: ConfigError for another weight or scheme; KernelUnavailable without a library.
    """
    taken = None if scheme is None or scheme.input is None else scheme.input.dtype
    if taken not in (None, "int8") or (scheme is not None and scheme.weight != WEIGHT):
        raise ConfigError(
            f"the int8 kernels take weights of {WEIGHT} beside inputs in int8 or 16 bits; "
            f"got {scheme}. Choose another kernel."
        )
    interleave = epilogue in GATED
    check_weight(weight, interleave)
    shape = (weight.shape[0], weight.shape[1])
    packed = PackedInt8(
        shape, weight.dtype, interleave, taken == "int8", library() if lib is None else lib
    )
    packed.fill(weight)
    return packed


def _packed_again(
    values: Tensor, scales: Tensor, dtype: torch.dtype, interleaved: bool, rounds_inputs: bool
) -> PackedInt8:
    shape = (values.shape[0], values.shape[1])
    packed = PackedInt8(shape, dtype, interleaved, rounds_inputs, library())
    packed.restore(values, scales)
    return packed


def linear_int8(
    x: Tensor, packed: PackedInt8, bias: Tensor | None = None, epilogue: str = "none"
) -> Tensor:
    """Return x @ weight.T + bias over the rounded weight, through one of ``linear.EPILOGUES``.

    Shapes: x [..., K], bias [N], both in the weight's dtype -> [..., N], or [..., N / 2] for the
        epilogues that end in ``_mul``: they need a weight packed for one of them.
    Rounding: x per token as ``quant.quantize_per_token`` when the weight ``rounds_inputs``. Sums
        are exact within a block of 128, fp32 across; from there on as ``native.linear``.
    Raises: ConfigError when dtype, shape, device or epilogue do not fit; CapacityError without
        memory for the work space.
    """
    return linear(x, packed, bias, epilogue)
