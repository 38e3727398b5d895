"""The four protobuf messages of LeRobot's service, and its chunked observation streams.

Messages have at most an enum and a bytes field, so they are read over the received bytes: the data
of a field is a view, not a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phyai_gateway.decode.limits import DecodeError
from phyai_gateway.messages import Fault

BEGIN, MIDDLE, END = 1, 2, 3
EMPTY = b""
"""``Empty``, and an ``Actions`` without data: nothing yet."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One message of a stream. state: BEGIN, MIDDLE, END, or a number that is refused."""

    state: int
    data: memoryview


def read_setup(message: bytes) -> memoryview:
    """Return the data of a ``PolicySetup``. Raises: DecodeError."""
    data = memoryview(b"")
    for number, value in _fields(memoryview(message)):
        if number == 1:
            data = _bytes(value)
    return data


def read_observation(message: bytes) -> Observation:
    """Return one message of ``SendObservations``. Raises: DecodeError.

    >>> read_observation(b"\\x08\\x03\\x12\\x01x").state == END
    True
    """
    state, data = 0, memoryview(b"")
    for number, value in _fields(memoryview(message)):
        if number == 1:
            if not isinstance(value, int):
                raise DecodeError("transfer_state must be an enum.")
            state = value
        elif number == 2:
            data = _bytes(value)
    return Observation(state, data)


def write_actions(data: bytes) -> bytes:
    """Return an ``Actions`` message."""
    return EMPTY if not data else b"\x0a" + _varint(len(data)) + data


class ChunkStream:
    """Joins the messages of one ``SendObservations`` call.

    Up to 2 MiB come as END alone, more as BEGIN, MIDDLE..., END; BEGIN starts afresh.

    >>> stream = ChunkStream(100)
    >>> stream.feed(Observation(END, memoryview(b"x")))
    >>> bytes(stream.finish())
    b'x'
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._whole: bytearray | memoryview | None = None
        self._ended = False

    def feed(self, message: Observation) -> None:
        """Take the next message. Raises: DecodeError; Fault ``resource_exhausted``."""
        if self._ended:
            raise DecodeError("an observation must end with its END message.")
        if message.state not in (BEGIN, MIDDLE, END):
            raise DecodeError("transfer_state must be BEGIN, MIDDLE or END.")
        if message.state == MIDDLE and self._whole is None:
            raise DecodeError("an observation must begin with BEGIN, or be END alone.")
        if message.state == BEGIN:
            self._whole = None
        held = 0 if self._whole is None else len(self._whole)
        if held + len(message.data) > self._max_bytes:
            raise Fault(
                "resource_exhausted",
                f"an observation must have at most {self._max_bytes} bytes. Send smaller images.",
            )
        self._ended = message.state == END
        if self._ended and self._whole is None:
            self._whole = message.data  # the usual case: one message, no copy
            return
        if not isinstance(self._whole, bytearray):
            self._whole = bytearray()
        self._whole += message.data

    def finish(self) -> memoryview:
        """Return the payload. Raises: DecodeError for a stream without END, or without data."""
        if not self._ended or not self._whole:
            raise DecodeError("an observation must end with END and have data.")
        return memoryview(self._whole)


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise DecodeError("data of a message must be bytes.")
    return value


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        kind = tag & 7
        if tag >> 3 == 0 or kind not in (0, 1, 2, 5):
            raise DecodeError("message must be protobuf.")
        if kind == 0:
            value, at = _read_varint(message, at)
            yield tag >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if length is None:
            length, at = _read_varint(message, at)
        if length > len(message) - at:
            raise DecodeError("message declares more bytes than it has.")
        yield tag >> 3, message[at : at + length]
        at += length


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DecodeError("message must be protobuf.")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
