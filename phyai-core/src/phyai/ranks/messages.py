"""Messages of one rank to all others of its replica: a kind and a value, by broadcast.

The first 4 KiB hold the head and, of most messages, all the rest; large buffers go one by one, so
that nobody copies them into one.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.deployment.values import WireError, decode, encode
from phyai.parallel import Group

_HEAD = struct.Struct("<4sIQQQ")  # magic, kind, buffers, bytes of body, bytes of all but large
_MAGIC = b"PhR1"
FIRST = 4096
"""Bytes of the first frame."""
LARGE = 1 << 15
"""Buffers from this size on go by themselves."""


class Message:
    """A value on its way to the other ranks; errors travel, too.

    Raises: RequestError for a value that cannot travel; ``where`` names it.

    >>> from phyai.parallel import Group
    >>> from phyai.ranks.messages import Message
    >>> Message(3, {"rows": 1}).send(Group("control"))
    """

    def __init__(self, kind: int, value: Any, *, where: str = "value") -> None:
        self.kind = kind
        self._body, self._buffers = encode(value, where=where)

    def send(self, group: Group, src: int = 0, *, timeout_s: float | None = None) -> None:
        """Give it to every member; ``src`` is the sender's own place.

        timeout_s: until the others take it, per broadcast; None = the group's own.
        """
        sizes = np.array([buffer.nbytes for buffer in self._buffers], dtype="<u8")
        small = [bytes(buffer) for buffer in self._buffers if buffer.nbytes < LARGE]
        rest = b"".join([sizes.tobytes(), self._body, *small])
        total = _HEAD.size + len(rest)
        packed = _HEAD.pack(_MAGIC, self.kind, len(sizes), len(self._body), total) + rest
        parts: list[bytes | memoryview] = [packed[:FIRST].ljust(FIRST, b"\0")]
        parts += [packed[FIRST:]] if len(packed) > FIRST else []
        large = (buffer for buffer in self._buffers if buffer.nbytes >= LARGE)
        for part in (*parts, *large):
            group.broadcast(_tensor(part), src, timeout_s=timeout_s)


def receive(
    group: Group, src: int = 0, *, idle_s: float | None = None, timeout_s: float | None = None
) -> tuple[int, Any]:
    """Return kind and value, as member ``src`` sent them.

    idle_s: until the message begins; timeout_s: for each broadcast after that; None = the group's
    own. Tensors and arrays of the value have memory of their own.
    Raises: WireError for bytes that ``Message.send`` did not make.
    """
    data = _received(group, src, FIRST, idle_s)
    magic, kind, count, body_bytes, total = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise WireError(
            f"a message of another rank must begin with {_MAGIC!r}; got {magic!r}. Run the same "
            "phyai on all ranks."
        )
    if total > FIRST:
        data = memoryview(b"".join([data, _received(group, src, total - FIRST, timeout_s)]))
    place = _HEAD.size + 8 * count
    sizes = np.frombuffer(data[_HEAD.size : place], dtype="<u8").tolist()
    body = bytes(data[place : place + body_bytes])
    place += body_bytes
    buffers: list[memoryview] = []
    for size in sizes:
        if size < LARGE:
            buffers.append(memoryview(bytearray(data[place : place + size])))
            place += size
        else:
            buffers.append(_received(group, src, size, timeout_s))
    return kind, decode(body, buffers, copy=False)


def on_host(result: Any) -> Any:
    """Return a result with its tensors in host memory: another process may not open a device's."""
    if isinstance(result, torch.Tensor):
        return result.detach().cpu()
    if isinstance(result, dict):
        return {name: on_host(value) for name, value in result.items()}
    if isinstance(result, (list, tuple)) and type(result) in (list, tuple):
        return type(result)(on_host(value) for value in result)
    return result


def _received(group: Group, src: int, size: int, timeout_s: float | None) -> memoryview:
    room = torch.empty(size, dtype=torch.uint8)
    data: Any = group.broadcast(room, src, timeout_s=timeout_s).numpy()
    return memoryview(data)


def _tensor(data: bytes | memoryview) -> Tensor:
    """Return bytes as a tensor, without a copy where they may be written to."""
    view = memoryview(data)
    if view.readonly:
        view = memoryview(bytearray(view.cast("B") if view.nbytes else b""))
    return torch.frombuffer(view, dtype=torch.uint8)
