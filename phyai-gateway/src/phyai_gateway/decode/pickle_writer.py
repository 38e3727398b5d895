"""Write the reply of LeRobot's ``GetActions`` without lerobot, torch or pickle.

The client unpickles a list of ``TimedAction`` whose ``action`` is ``torch.tensor`` of a list of
floats: float32, and exact for float32 values. Each row stands alone, so the size grows with the
number of values only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_CLASS = ("lerobot.async_inference.helpers", "TimedAction")
_TENSOR = ("torch", "tensor")
_TIMESTAMP, _TIMESTEP, _ACTION = 2, 3, 4


def write_timed_actions(
    rows: Sequence[Sequence[float]], timestamp_s: float, timestep: int, fps: float
) -> bytes:
    """Return the pickle of one chunk; row i is due at ``timestamp_s + i / fps``.

    Shapes: rows [H][A], H >= 0.  timestep: of row 0, below 2**63 - H.

    >>> write_timed_actions([], 0.0, 0, 30.0)
    b'\\x80\\x04].'
    """
    out = bytearray(b"\x80\x04]")  # PROTO 4, EMPTY_LIST
    if rows:
        out += b"("
        for index, row in enumerate(rows):
            out += _head(first=index == 0)
            out += _entries(index, row, timestamp_s + index / fps, timestep + index)
        out += b"e"
    out += b"."
    return bytes(out)


def _head(first: bool) -> bytes:
    """An empty TimedAction and its open state; names are stored once and recalled afterwards."""
    cls = _global(_CLASS, 0) if first else b"h\x00"
    return cls + b")\x81}("


def _entries(index: int, row: Sequence[float], timestamp_s: float, timestep: int) -> bytes:
    first = index == 0
    tensor = _global(_TENSOR, 1) if first else b"h\x01"
    values = b"".join(b"G" + struct.pack(">d", value) for value in row)
    return b"".join(
        (
            _text("timestamp", _TIMESTAMP, first),
            b"G" + struct.pack(">d", timestamp_s),
            _text("timestep", _TIMESTEP, first),
            _integer(timestep),
            _text("action", _ACTION, first),
            tensor,
            b"](" + values + b"e\x85R",  # a list in a 1-tuple, applied
            b"ub",
        )
    )


def _text(text: str, memo: int, first: bool) -> bytes:
    if not first:
        return b"h" + bytes([memo])
    return _short(text) + b"q" + bytes([memo])


def _short(text: str) -> bytes:
    data = text.encode()
    return b"\x8c" + bytes([len(data)]) + data


def _global(name: tuple[str, str], memo: int) -> bytes:
    return _short(name[0]) + _short(name[1]) + b"\x93q" + bytes([memo])


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)
