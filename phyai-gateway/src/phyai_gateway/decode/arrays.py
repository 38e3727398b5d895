"""Arrays as clients send them: bytes with a dtype and a shape, without numpy."""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite, prod
from typing import Literal

from phyai_gateway.decode.limits import (
    MAX_DIM,
    MAX_RANK,
    MAX_REORDERED_SLICES,
    MAX_STATE_VALUES,
    DecodeError,
)

ITEM_BYTES = {
    "u1": 1,
    "i1": 1,
    "b1": 1,
    "u2": 2,
    "i2": 2,
    "f2": 2,
    "u4": 4,
    "i4": 4,
    "f4": 4,
    "i8": 8,
    "f8": 8,
}
"""Dtype codes that may be sent, and their bytes per element."""
_DTYPE = re.compile(r"([<>|]?)([a-z][0-9])")
_STRUCT = {"u1": "B", "i1": "b", "b1": "?", "u2": "H", "i2": "h", "f2": "e"} | {
    "u4": "I",
    "i4": "i",
    "f4": "f",
    "i8": "q",
    "f8": "d",
}
_SWAP = {2: "H", 4: "I", 8: "Q"}
_CELL: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


@dataclass(frozen=True, slots=True)
class Array:
    """One array over the bytes that were received.

    dtype: numpy's spelling with a byte order: ``|u1``, ``<f4``, ``>f4``.
    order: axes as they lie in memory, outermost first; () = row-major.

    >>> make_array("<f4", (2,), b"\\x00" * 8).floats()
    [0.0, 0.0]
    """

    data: memoryview
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def code(self) -> str:
        """Return the dtype without byte order."""
        return self.dtype[1:]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def row_major(self) -> memoryview:
        """Return the elements in C order, little endian; a copy only where they are not yet."""
        data = self.data
        wide = [axis for axis in self.order if self.shape[axis] > 1]
        if wide != sorted(wide):
            data = _reordered(data, self.shape, self.order, ITEM_BYTES[self.code])
        if self.dtype[0] != ">":
            return data
        swapped = array(_SWAP[ITEM_BYTES[self.code]], data.tobytes())
        swapped.byteswap()
        return memoryview(swapped).cast("B")

    def floats(self) -> list[float]:
        """Return the elements as Python floats, in C order.

        Raises: DecodeError for more than MAX_STATE_VALUES elements.
        """
        if self.size > MAX_STATE_VALUES:
            raise DecodeError(
                f"a vector must have at most {MAX_STATE_VALUES} values; got {self.size}."
            )
        form = f"<{self.size}{_STRUCT[self.code]}"
        return [float(value) for value in struct.unpack(form, self.row_major())]


@dataclass(frozen=True, slots=True)
class Scalar:
    """One numpy scalar."""

    dtype: str
    value: float


def parse_dtype(text: object) -> str:
    """Return a dtype with its byte order, ``|`` for single bytes.

    Raises: DecodeError for what is not a plain number type of ITEM_BYTES.
    """
    found = _DTYPE.fullmatch(text) if isinstance(text, str) and len(text) <= 3 else None
    if found is None or found[2] not in ITEM_BYTES:
        shown = repr(text) if isinstance(text, str) and len(text) <= 16 else type(text).__name__
        raise DecodeError(f"dtype must be one of {', '.join(ITEM_BYTES)}; got {shown}.")
    order, code = found[1], found[2]
    if ITEM_BYTES[code] == 1:
        return f"|{code}"
    return f"{'>' if order == '>' else '<'}{code}"


def make_array(dtype: object, shape: object, data: object, order: tuple[int, ...] = ()) -> Array:
    """Return an array whose dtype, shape and length are consistent.

    order: axes as they lie in memory, outermost first; () = row-major.

    Raises: DecodeError naming what is wrong.
    """
    kind = parse_dtype(dtype)
    sizes = _sizes(shape)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise DecodeError(f"data of an array must be bytes; got {type(data).__name__}.")
    view = memoryview(data)
    wanted = prod(sizes) * ITEM_BYTES[kind[1:]]
    if view.nbytes != wanted:
        raise DecodeError(
            f"data of an array {list(sizes)} of {kind} must have {wanted} bytes; got {view.nbytes}."
        )
    return Array(view, kind, sizes, order)


def make_scalar(dtype: object, data: object) -> Scalar:
    """Return the scalar of a dtype and its bytes. Raises: DecodeError."""
    found = make_array(dtype, (), data)
    (value,) = struct.unpack(f"<{_STRUCT[found.code]}", found.row_major())
    return Scalar(found.dtype, value)


def pack_float32(values: Iterable[float], what: str) -> bytes:
    """Return finite numbers as little-endian float32.

    Raises: DecodeError naming ``what`` for a value that is not finite in float32.
    """
    numbers = list(values)
    try:
        packed = struct.pack(f"<{len(numbers)}f", *numbers)
    except (OverflowError, struct.error) as error:
        raise DecodeError(f"{what} must fit into float32; got a larger number.") from error
    if not all(map(isfinite, numbers)):
        raise DecodeError(f"{what} must be finite; got NaN or infinity.")
    return packed


def _sizes(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list | tuple) or len(shape) > MAX_RANK:
        raise DecodeError(f"shape of an array must be at most {MAX_RANK} sizes.")
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_DIM:
            raise DecodeError(f"sizes of an array must be integers from 0 to {MAX_DIM}.")
    return tuple(shape)


def column_major(shape: object) -> tuple[int, ...]:
    """Return the order of axes of a column-major array."""
    return tuple(reversed(range(len(_sizes(shape)))))


def _reordered(
    data: memoryview, shape: Sequence[int], order: Sequence[int], item_bytes: int
) -> memoryview:
    """Return elements in row-major order, one strided copy per line of the longest axis."""
    count = prod(shape)
    if not count:
        return data  # nothing to move, however large the other sizes are
    axis = max(range(len(shape)), key=lambda index: shape[index])
    if count // shape[axis] > MAX_REORDERED_SLICES:
        raise DecodeError("an array of this shape must be sent in row-major order.")
    place_of = {axis: place for place, axis in enumerate(order)}
    column = [
        prod(shape[axis] for axis in order[place_of[index] + 1 :]) for index in range(len(shape))
    ]
    row = [prod(shape[index + 1 :]) for index in range(len(shape))]
    source = memoryview(data.tobytes()).cast(_CELL[item_bytes])
    out = memoryview(bytearray(count * item_bytes)).cast(_CELL[item_bytes])
    others = [index for index in range(len(shape)) if index != axis]
    line = shape[axis]
    for place in product(*(range(shape[index]) for index in others)):
        start = sum(at * row[index] for at, index in zip(place, others, strict=True))
        begin = sum(at * column[index] for at, index in zip(place, others, strict=True))
        stop, end = start + (line - 1) * row[axis] + 1, begin + (line - 1) * column[axis] + 1
        out[start : stop : row[axis]] = source[begin : end : column[axis]]
    return out.cast("B")
