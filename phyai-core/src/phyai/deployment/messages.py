"""The form of one message between two processes: a head, a table of buffers, and their bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAGIC = b"PhY1"
WATCHED_STEP = "watched_step"
"""Kind of a request whose steps are told by messages "stepped" before its answer."""
REPLY, BLOCK, NEW, SPILLED, DROP = 1, 2, 4, 8, 16
"""Flags: ends its call; has a block; whose descriptor comes first; body and table are in it too;
blocks the receiver shall forget."""
LARGE = 1 << 14
"""Buffers from this size on go through shared memory."""
MAX_INLINE = 1 << 16
"""Everything else of a message, at most; more than that goes through shared memory as well."""
MAX_MESSAGE = MAX_INLINE + 1024
MAX_FDS = 32
_INLINE = (1 << 64) - 1  # the place of a buffer that is in the message itself
_ALIGN = 64
# magic, flags, length of kind, user's descriptors, buffers, call, body bytes, block, block bytes
_HEAD = struct.Struct("<4sBBHIQQQQ")


@dataclass(slots=True)
class Plan:
    """Where the parts of an outgoing message go.

    small: kind, table, body and small buffers, in order.  large: (place in the block, bytes).
    block_bytes: what the block must hold; 0 = no block.
    """

    flags: int
    kind: bytes
    call_id: int
    body_bytes: int
    small: list[bytes | memoryview]
    large: list[tuple[int, bytes | memoryview]]
    count: int
    block_bytes: int

    def head(self, flags: int, num_fds: int, block_id: int, block_size: int) -> bytes:
        """Return the head, once the block is known."""
        return _HEAD.pack(
            MAGIC, self.flags | flags, len(self.kind), num_fds, self.count, self.call_id,
            self.body_bytes, block_id, block_size,
        )  # fmt: skip

    def kept(self) -> Plan:
        """Return it with memory of its own, for a later time."""
        small: list[bytes | memoryview] = [bytes(part) for part in self.small]
        large: list[tuple[int, bytes | memoryview]]
        large = [(place, bytes(data)) for place, data in self.large]
        return replace(self, small=small, large=large)


def plan(kind: str, call_id: int, body: bytes, buffers: Sequence[memoryview], flags: int) -> Plan:
    """Return how a message is sent. Raises: ValueError for a kind of more than 255 bytes."""
    name = kind.encode()
    if len(name) > 255:
        raise ValueError(f"a kind must have at most 255 bytes; got {len(name)}")
    sizes = [buffer.nbytes for buffer in buffers]
    inline = 16 * len(sizes) + len(body) + sum(size for size in sizes if size < LARGE)
    spilled = inline > MAX_INLINE
    front = _aligned(16 * len(sizes) + len(body)) if spilled else 0
    table: list[int] = []
    small: list[bytes | memoryview] = []
    large: list[tuple[int, bytes | memoryview]] = []
    end = front
    for buffer, size in zip(buffers, sizes, strict=True):
        if size and (spilled or size >= LARGE):
            table += (end, size)
            large.append((end, buffer))
            end += _aligned(size)
        else:
            table += (_INLINE, size)
            small.append(buffer)
    packed = struct.pack(f"<{len(table)}Q", *table)
    if spilled:
        flags |= SPILLED
        large += [(0, packed), (len(packed), body)]
        small = [name]
    else:
        small = [name, packed, body, *small]
    return Plan(flags, name, call_id, len(body), small, large, len(sizes), end)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@dataclass(slots=True)
class Head:
    """The fixed part of a received message, checked against nothing yet."""

    flags: int
    kind_bytes: int
    num_fds: int
    count: int
    call_id: int
    body_bytes: int
    block_id: int
    block_size: int


def read_head(data: memoryview) -> Head:
    """Return the head. Raises: ValueError for bytes that are no message."""
    if len(data) < _HEAD.size:
        raise ValueError(f"a message of {len(data)} bytes")
    magic, *rest = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"a message that begins with {magic!r}")
    return Head(*rest)


def read_parts(
    head: Head, data: memoryview, block: memoryview | None
) -> tuple[str, bytes, list[memoryview]]:
    """Return kind, body and buffers. Raises: ValueError when the message does not hold them."""
    start = _HEAD.size + head.kind_bytes
    if start > len(data):
        raise ValueError("a message that ends in its kind")
    kind = bytes(data[_HEAD.size : start]).decode()
    rest = data[start:]
    if head.flags & SPILLED:
        if block is None or len(rest):
            raise ValueError("a message without its block")
        rest = block
    front = 16 * head.count + head.body_bytes
    if front > len(rest):
        raise ValueError(f"{len(rest)} bytes for a body and table of {front}")
    table = struct.unpack_from(f"<{2 * head.count}Q", rest)
    body = bytes(rest[16 * head.count : front])
    # The receiving buffer is used again, so what lies in it is copied, writable like a block.
    tail = memoryview(bytearray(b"" if head.flags & SPILLED else rest[front:]))
    buffers, used = [], 0
    for place, size in zip(table[::2], table[1::2], strict=True):
        if place == _INLINE:
            found, used = tail[used : used + size], used + size
        else:
            found = (block if block is not None else tail[:0])[place : place + size]
        if len(found) != size:
            raise ValueError(f"a buffer of {size} bytes outside its message")
        buffers.append(found)
    if used != len(tail):
        raise ValueError(f"{len(tail) - used} bytes too many")
    return kind, body, buffers
