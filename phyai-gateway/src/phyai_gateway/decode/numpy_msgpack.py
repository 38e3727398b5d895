"""msgpack with numpy arrays in the three forms that robots send, with limits, without numpy.

openpi's form has ``__ndarray__``, GR00T's older clients embed ``.npy`` files, its newer ones use
the keys of msgpack-numpy. Text and bytes keys are read; bytes keys are written, as clients want.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from phyai_gateway.decode.arrays import Array, Scalar, make_array, make_scalar, parse_dtype
from phyai_gateway.decode.limits import (
    MAX_MSGPACK_DEPTH,
    MAX_MSGPACK_ITEMS,
    MAX_MSGPACK_NODES,
    MAX_PAYLOAD_BYTES,
    MAX_TEXT_BYTES,
    MAX_TEXTS_BYTES,
    DecodeError,
)
from phyai_gateway.decode.npy import read_npy, write_npy

_NUMBER, _STR, _BIN, _LIST, _MAP, _REFUSED = range(6)


def _kind(first: int) -> tuple[int, int]:
    """Return what a value's first byte says it is, and its bytes or entries.

    A negative length says in how many bytes the length itself follows.
    """
    if first <= 0x7F or first >= 0xE0:
        return _NUMBER, 0
    for start, stop, kind in ((0x80, 0x90, _MAP), (0x90, 0xA0, _LIST), (0xA0, 0xC0, _STR)):
        if start <= first < stop:
            return kind, first - start
    numbers = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8} | {
        start + power: 1 << power for start in (0xCC, 0xD0) for power in range(4)
    }
    if first in numbers:
        return _NUMBER, numbers[first]
    for kind, sizes in (
        (_BIN, {0xC4: 1, 0xC5: 2, 0xC6: 4}),
        (_STR, {0xD9: 1, 0xDA: 2, 0xDB: 4}),
        (_LIST, {0xDC: 2, 0xDD: 4}),
        (_MAP, {0xDE: 2, 0xDF: 4}),
    ):
        if first in sizes:
            return kind, -sizes[first]
    return _REFUSED, 0  # extension types


_KINDS = [_kind(first) for first in range(256)]
Hook = Callable[[dict[Any, Any]], Any]


@dataclass(frozen=True, slots=True)
class MsgpackLimits:
    """Bounds of one message: bytes in all, bytes of one text, entries of one list or map."""

    payload_bytes: int = MAX_PAYLOAD_BYTES
    text_bytes: int = MAX_TEXT_BYTES
    items: int = MAX_MSGPACK_ITEMS
    depth: int = MAX_MSGPACK_DEPTH
    nodes: int = MAX_MSGPACK_NODES


_DEFAULT = MsgpackLimits()


def unpack(payload: bytes | memoryview, hook: Hook, limits: MsgpackLimits = _DEFAULT) -> Any:
    """Return the one value of a message, maps that stand for arrays turned into arrays by ``hook``.

    Raises: DecodeError.

    >>> unpack(b"\\x81\\xa1a\\x01", openpi_hook)
    {'a': 1}
    """
    check_structure(payload, limits)
    try:
        return msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=True,
            object_hook=hook,
            max_str_len=limits.text_bytes,
            max_bin_len=limits.payload_bytes,
            max_array_len=limits.items,
            max_map_len=limits.items,
            max_ext_len=0,
        )
    except DecodeError:
        raise
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError("payload must be one msgpack value with UTF-8 texts.") from error


def check_structure(payload: bytes | memoryview, limits: MsgpackLimits = _DEFAULT) -> None:
    """Walk the headers of a message before anything is built of it.

    Raises: DecodeError for lengths that pass the limits or the payload, keys that aren't text or
        bytes, extension types, trailing bytes.
    """
    if len(payload) > limits.payload_bytes:
        raise DecodeError(f"payload must have at most {limits.payload_bytes} bytes.")
    data, at, end = payload, 0, len(payload)
    nodes, texts = 1, 0
    left, is_map = 1, False  # values still to come on this level
    outer: list[tuple[int, bool]] = []
    while left or outer:  # one loop without calls: it steps over dozens of headers per request
        if not left:
            left, is_map = outer.pop()
            continue
        key = is_map and left % 2 == 0
        left -= 1
        if at >= end:
            raise DecodeError("payload ends early.")
        first = data[at]
        at += 1
        kind, length = _KINDS[first]
        if length < 0:  # it follows, in that many bytes
            size, at = -length, at - length
            if at > end:
                raise DecodeError("payload ends early.")
            length = int.from_bytes(data[at - size : at], "big")
        if key and kind not in (_STR, _BIN):
            raise DecodeError("keys of a map must be text or bytes.")
        if kind == _STR:
            if length > limits.text_bytes:
                raise DecodeError(f"a text must have at most {limits.text_bytes} bytes.")
            texts += length
            if texts > MAX_TEXTS_BYTES:
                raise DecodeError(f"all texts together must have at most {MAX_TEXTS_BYTES} bytes.")
        elif kind in (_LIST, _MAP):
            values = _values(length, kind == _MAP, limits, end - at)
            nodes += values
            if nodes > limits.nodes:
                raise DecodeError(f"payload must have at most {limits.nodes} values.")
            if len(outer) >= limits.depth:
                raise DecodeError(f"payload must nest at most {limits.depth} deep.")
            outer.append((left, is_map))
            left, is_map = values, kind == _MAP
            continue
        elif kind == _REFUSED:
            raise DecodeError("payload must not have extension types.")
        if length > end - at:
            raise DecodeError("payload declares more bytes than it has.")
        at += length
    if at != end:
        raise DecodeError("payload must hold one value and nothing after it.")


def _values(length: int, is_map: bool, limits: MsgpackLimits, rest: int) -> int:
    """Return how many values a list or map holds. Raises: DecodeError."""
    if length > limits.items:
        raise DecodeError(f"a list or map must have at most {limits.items} entries.")
    values = 2 * length if is_map else length
    if values > rest:
        raise DecodeError("payload declares more entries than it has.")
    return values


# ---------------------------------------------------------------- openpi


def openpi_hook(found: dict[Any, Any]) -> Any:
    """Return the array or number that a map of openpi's form stands for, else the map."""
    if _has(found, "__ndarray__"):
        return make_array(_get(found, "dtype"), _get(found, "shape"), _get(found, "data"))
    if _has(found, "__npgeneric__"):
        parse_dtype(_get(found, "dtype"))
        value = _get(found, "data")
        if not isinstance(value, bool | int | float):
            raise DecodeError("data of a numpy scalar must be a number.")
        return value
    return found


def pack_openpi(value: Any) -> bytes:
    """Return a message with arrays in openpi's form.

    >>> from phyai_gateway.decode.arrays import make_array
    >>> unpack(pack_openpi({"a": make_array("|u1", (1,), b"x")}), openpi_hook)["a"].shape
    (1,)
    """
    return _pack(value, _openpi_form)


def _openpi_form(array: Array) -> dict[bytes, Any]:
    return {
        b"__ndarray__": True,
        b"data": array.row_major(),
        b"dtype": array.dtype.replace(">", "<"),
        b"shape": list(array.shape),
    }


# ---------------------------------------------------------------- GR00T


class GrootHook:
    """Reads arrays of GR00T's clients; ``form`` is then ``npy``, ``nd`` or None without arrays."""

    def __init__(self) -> None:
        self.form: str | None = None

    def __call__(self, found: dict[Any, Any]) -> Any:
        if _has(found, "__ndarray_class__"):
            self.form = self.form or "npy"
            data = _get(found, "as_npy")
            if not isinstance(data, bytes):
                raise DecodeError("as_npy of an array must be bytes.")
            return read_npy(data)
        if _has(found, "nd") and _has(found, "type"):
            self.form = self.form or "nd"
            return _nd_value(found)
        if _has(found, "__ModalityConfig__") or _has(found, "__ModalityConfig_class__"):
            raise DecodeError("a modality configuration must not be sent.")
        if _has(found, "complex"):
            raise DecodeError("complex numbers must not be sent.")
        return found


def pack_npy_form(value: Any) -> bytes:
    """Return a message with arrays as GR00T's N1 to early N1.7 clients read them."""
    return _pack(value, lambda array: {"__ndarray_class__": True, "as_npy": write_npy(array)})


def pack_nd_form(value: Any) -> bytes:
    """Return a message with arrays as GR00T's newer clients read them."""
    return _pack(value, _nd_form)


def _nd_form(array: Array) -> dict[bytes, Any]:
    return {
        b"nd": True,
        b"type": array.dtype.replace(">", "<"),
        b"kind": b"",
        b"shape": list(array.shape),
        b"data": array.row_major(),
    }


def _nd_value(found: dict[Any, Any]) -> Array | Scalar:
    kind = _get(found, "kind", b"")
    if kind not in (b"", ""):
        raise DecodeError("kind of an array must be empty: only plain numbers are read.")
    if _get(found, "nd") is False:
        return make_scalar(_get(found, "type"), _get(found, "data"))
    return make_array(_get(found, "type"), _get(found, "shape"), _get(found, "data"))


# ---------------------------------------------------------------- shared


def _has(found: dict[Any, Any], key: str) -> bool:
    return key in found or key.encode() in found


def _get(found: dict[Any, Any], key: str, default: Any = None) -> Any:
    return found.get(key.encode(), found.get(key, default))


def _pack(value: Any, form: Callable[[Array], dict[Any, Any]]) -> bytes:
    def encode(item: Any) -> Any:
        if isinstance(item, Array):
            return form(item)
        raise TypeError(f"a reply must hold plain values and arrays; got {type(item).__name__}.")

    packed: bytes = msgpack.packb(value, default=encode, use_bin_type=True)
    return packed
