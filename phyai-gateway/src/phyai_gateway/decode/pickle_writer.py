"""Write the reply of LeRobot's ``GetActions`` without lerobot, torch or pickle.

The client unpickles a list of ``TimedAction`` whose ``action`` is ``torch.tensor`` of a list of
floats: float32, and exact for float32 values. Each row stands alone, so the size grows with the
number of values only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

_CLASS = ("lerobot.async_inference.helpers", "TimedAction")
_TENSOR = ("torch", "tensor")
_TIMESTAMP, _TIMESTEP, _ACTION = 2, 3, 4  # places of the memo; classes have 0 and 1


def write_timed_actions(
    rows: Sequence[Sequence[float]], timestamp_s: float, timestep: int, fps: float
) -> bytes:
    """Return the pickle of one chunk; row i is due at ``timestamp_s + i / fps``.

    Shapes: rows [H][A], H >= 0, all of one width.  timestep: of row 0, below 2**63 - H.

    >>> write_timed_actions([], 0.0, 0, 30.0)
    b'\\x80\\x04].'
    """
    width = len(rows[0]) if rows else 0
    return write_flat(
        list(chain.from_iterable(rows)), (len(rows), width), timestamp_s, timestep, fps
    )


def write_flat(
    values: Sequence[float], shape: tuple[int, int], timestamp_s: float, timestep: int, fps: float
) -> bytes:
    """Return the same of rows that lie one after another; shape: [H, A]."""
    count, width = shape
    if not count:
        return b"\x80\x04]."  # PROTO 4, EMPTY_LIST
    wide = timestep < 0 or timestep + count > 1 << 31
    form, template = _form(count, width, wide)
    parts, stride = template.copy(), len(template) // count
    parts[1::stride] = [timestamp_s + index / fps for index in range(count)]
    number = struct.Struct("<q" if wide else "<i")
    parts[3::stride] = [number.pack(timestep + index) for index in range(count)]
    for column in range(width):
        parts[6 + 2 * column :: stride] = values[column::width]
    return form.pack(*parts)


@lru_cache(maxsize=8)
def _form(count: int, width: int, wide: bool) -> tuple[struct.Struct, list[Any]]:
    """Return a chunk's layout and its parts; the numbers among them are still to be put in.

    One call then packs all: what lies between the numbers is the same in every chunk.
    """
    form, values = [">"], list[Any]()

    def put(part: bytes | float, code: str = "") -> None:
        form.append(code or f"{len(part)}s" if isinstance(part, bytes) else "d")
        values.append(part)

    for index in range(count):
        first = index == 0
        put((b"\x80\x04](" if first else b"") + _head(first) + b"G")
        put(0.0)  # the time stamp
        put(_text("timestep", _TIMESTEP, first) + (b"\x8a\x08" if wide else b"J"))
        put(b"", "8s" if wide else "4s")
        tensor = _global(_TENSOR, 1) if first else b"h\x01"
        put(_text("action", _ACTION, first) + tensor + b"](")
        for _ in range(width):
            put(b"G")
            put(0.0)
        put(b"e\x85Rub" + (b"e." if index == count - 1 else b""))  # a list in a 1-tuple, applied
    return struct.Struct("".join(form)), values


def _head(first: bool) -> bytes:
    """An empty TimedAction and its open state; names are stored once and recalled afterwards."""
    cls = _global(_CLASS, 0) if first else b"h\x00"
    return cls + b")\x81}(" + _text("timestamp", _TIMESTAMP, first)


def _text(text: str, memo: int, first: bool) -> bytes:
    if not first:
        return b"h" + bytes([memo])
    return _short(text) + b"q" + bytes([memo])


def _short(text: str) -> bytes:
    data = text.encode()
    return b"\x8c" + bytes([len(data)]) + data


def _global(name: tuple[str, str], memo: int) -> bytes:
    return _short(name[0]) + _short(name[1]) + b"\x93q" + bytes([memo])
