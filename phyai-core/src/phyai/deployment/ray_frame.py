"""Messages to and from a Ray actor as plain bytes, which Ray carries as they are."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from phyai.deployment.values import WireError

_MAGIC = b"PhR1"
_HEAD = struct.Struct("<4sIQ")  # magic, buffers, bytes of the body; then the size of every buffer
_ALIGN = 64
_REPLY = struct.Struct("<c3xI")  # kind, steps; then done and total of every step, and a frame

RESULT, FAILURE, BROKEN = b"R", b"F", b"B"
"""Kinds of a reply. BROKEN: an error, after which the ranks of the actor's replica must end."""

Steps = tuple[tuple[int, int], ...]
"""(done, total) after each step of a request."""


def pack(body: bytes, buffers: Sequence[memoryview] = ()) -> bytes:
    """Return what ``values.encode`` made as one piece; bytes need no pickle, so Ray uses none.

    >>> from phyai.deployment.ray_frame import pack, unpack
    >>> unpack(pack(b"body", [memoryview(b"array")]))[0]
    b'body'
    """
    sizes = [buffer.nbytes for buffer in buffers]
    parts: list[bytes | memoryview] = [
        _HEAD.pack(_MAGIC, len(sizes), len(body)),
        struct.pack(f"<{len(sizes)}Q", *sizes),
        body,
    ]
    parts.append(bytes(-sum(len(part) for part in parts) % _ALIGN))
    for buffer, size in zip(buffers, sizes, strict=True):
        parts += (buffer.cast("B") if size else b"", bytes(-size % _ALIGN))
    return b"".join(parts)


def unpack(frame: bytes | memoryview) -> tuple[bytes, list[memoryview]]:
    """Return body and buffers; the buffers are views of the frame.

    Raises: WireError for bytes that ``pack`` did not make.
    """
    data = memoryview(frame)
    try:
        magic, count, body_size = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError(f"it begins with {magic!r}")
        sizes = struct.unpack_from(f"<{count}Q", data, _HEAD.size)
        start = _HEAD.size + 8 * count
        body, end = bytes(data[start : start + body_size]), start + body_size
        buffers = []
        for size in sizes:
            end += -end % _ALIGN
            buffers.append(data[end : end + size])
            end += size
        if end > len(data):
            raise ValueError("it is cut off")
    except (struct.error, ValueError, OverflowError) as error:
        raise WireError(
            f"A message of a Ray actor must be one that pack() made; got {len(data)} bytes: "
            f"{error}. Run the same phyai on every node."
        ) from error
    return body, buffers


@dataclass(frozen=True)
class Reply:
    """What an actor answered.  steps: all that the request told of itself.

    >>> from phyai.deployment.ray_frame import FAILURE, Reply, reply
    >>> Reply.read(reply(FAILURE, b"text", steps=((1, 4),)))
    Reply(kind=b'F', body=b'text', buffers=[], steps=((1, 4),))
    """

    kind: bytes
    body: bytes
    buffers: list[memoryview]
    steps: Steps

    @classmethod
    def read(cls, data: bytes) -> Reply:
        """Return what ``reply`` made into bytes. Raises: WireError for other ones."""
        try:
            kind, count = _REPLY.unpack_from(data)
            numbers = struct.unpack_from(f"<{2 * count}I", data, _REPLY.size)
        except struct.error as error:
            raise WireError(
                f"A reply of a Ray actor must be one that reply() made; got {len(data)} bytes: "
                f"{error}. Run the same phyai on every node."
            ) from error
        body, buffers = unpack(memoryview(data)[_REPLY.size + 8 * count :])
        return cls(kind, body, buffers, tuple(zip(numbers[::2], numbers[1::2], strict=True)))


def reply(
    kind: bytes, body: bytes, buffers: Sequence[memoryview] = (), *, steps: Steps = ()
) -> bytes:
    """Return a reply as one piece."""
    numbers = [number for step in steps for number in step]
    head = _REPLY.pack(kind, len(steps)) + struct.pack(f"<{len(numbers)}I", *numbers)
    return head + pack(body, buffers)
