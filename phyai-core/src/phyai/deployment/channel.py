"""The channel between two processes of a pool: small messages, large buffers in shared memory.

A request's large buffers lie in a block that the parent lends to the worker; the answer comes back
in the same block when it fits. Anything else that is large comes in a block of its own, used once.
A block's descriptor travels once; from then on both sides call it by its id.
"""

from __future__ import annotations

import array
import contextlib
import errno
import mmap
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from phyai.deployment import messages
from phyai.deployment.blocks import Block, BlockPool, open_block, unmap
from phyai.deployment.values import WireError, decode, decode_error
from phyai.errors import CapacityError, ConfigError, PhyaiError

Role = Literal["parent", "worker"]
MAX_LENT = 32
"""Blocks of requests that are with one worker, at most; a mapping costs a descriptor."""
_ROOM = socket.CMSG_SPACE(4 * (messages.MAX_FDS + 1))
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)


class ChannelClosed(PhyaiError, EOFError):
    """The other end is closed, or its process has ended."""


@dataclass(slots=True)
class Message:
    """One received message; ``buffers`` are views that end with ``release``.

    kind, call_id, body: as sent.  buffers: one memoryview per sent buffer.
    fds: descriptors that came with it, now the receiver's to close.
    reply: whether it was sent with reply=True, so that it ends its call.
    """

    kind: str
    call_id: int
    body: bytes
    buffers: list[memoryview]
    fds: list[int]
    reply: bool
    _give_back: Callable[[], None] | None = field(default=None, repr=False)

    def value(self) -> Any:
        """Return ``decode(body, buffers)`` in fresh memory, and release the buffers."""
        try:
            return decode(self.body, self.buffers)
        finally:
            self.release()

    def error(self) -> Exception:
        """Return ``decode_error(body, buffers)``, and release the buffers."""
        try:
            return decode_error(self.body, self.buffers)
        finally:
            self.release()

    def release(self) -> None:
        """Give the shared memory back; the buffers are empty afterwards. Idempotent."""
        for view in self.buffers:
            with contextlib.suppress(BufferError):  # an array of copy=False still looks at it
                view.release()
        self.buffers = []
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


@dataclass(slots=True)
class _Frame:
    """One message as the socket takes it; ``owned`` are descriptors to close once it is sent."""

    parts: Sequence[bytes | memoryview]
    fds: list[int]
    owned: list[int]
    block: Block | None = None
    fill: Callable[[list[int]], _Frame] | None = None  # makes what is sent, when it is its turn

    def close(self) -> None:
        for fd in self.owned:
            os.close(fd)
        self.owned = []


class Channel:
    """One end of a connected AF_UNIX SOCK_SEQPACKET pair; owns the socket.

    role "parent": no method blocks (for a selector loop); ``send`` may be called by any thread.
    role "worker": ``receive`` blocks (one thread), ``send`` blocks (any thread).

    >>> from phyai.deployment.channel import Channel
    >>> from phyai.deployment.values import encode
    >>> here, there = (Channel(s, r) for s, r in zip(Channel.pair(), ("parent", "worker")))
    >>> here.send("step", 1, *encode([1, 2])), there.receive().value()
    (True, [1, 2])
    """

    def __init__(self, sock: socket.socket, role: Role, blocks: BlockPool | None = None) -> None:
        self.role = role
        self._socket = sock
        self._socket.setblocking(True)
        self._flags = socket.MSG_NOSIGNAL | (socket.MSG_DONTWAIT if role == "parent" else 0)
        self._send_lock = threading.Lock()
        self._outbox: deque[_Frame] = deque()
        self._incoming = bytearray(messages.MAX_MESSAGE)
        self._ended = False
        self._blocks = blocks or BlockPool()
        self._lent: dict[int, Block] = {}  # parent: by call
        self._mapped: dict[int, mmap.mmap] = {}  # worker: by block
        self._borrowed: dict[int, int] = {}  # worker: block by call

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Return two connected sockets: wrap one as "parent" here, one as "worker" elsewhere.

        Raises: ConfigError on a system without them.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "Replicas in processes must run on Linux; got another system. "
                "Use DeploymentConfig.inline()."
            )
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    # ------------------------------------------------------------ sending

    def send(
        self,
        kind: str,
        call_id: int = 0,
        body: bytes = b"",
        buffers: Sequence[memoryview] = (),
        *,
        reply: bool = False,
        fds: Sequence[int] = (),
    ) -> bool:
        """Send one message; everything is copied before it returns.

        call_id: 0 for a message without an answer. A parent's message with a call_id > 0 lends its
            shared memory until the worker's message with the same call_id and ``reply=True``,
            which must be the last of that call (progress: same call_id, reply=False).
        buffers: of a reply, not views of the request's block, which may be written over.
        fds: descriptors to pass on; they stay the caller's.
        Returns: False when it waits in the outbox because the socket is full (parent only): call
            ``flush`` when the socket is writable.
        Raises: ChannelClosed; CapacityError when there is no shared memory left.
        """
        plan = messages.plan(kind, call_id, body, buffers, messages.REPLY if reply else 0)
        if self.role == "parent" and plan.block_bytes and self._outbox:
            plan = plan.kept()  # it waits as plain bytes: descriptors are few
            return self._transmit(_Frame((), list(fds), [], fill=partial(self._filled, plan)))
        frame = self._filled(plan, fds)
        try:
            return self._transmit(frame)
        except BaseException:
            if frame.block is not None and self._lent.pop(call_id, None) is frame.block:
                frame.block.close()  # the other side does not know it, or is gone
            raise

    def _filled(self, plan: messages.Plan, fds: Sequence[int]) -> _Frame:
        """Return a message with its shared memory, if it needs any. Raises: CapacityError."""
        call_id, reply = plan.call_id, bool(plan.flags & messages.REPLY)
        memory: mmap.mmap | None = None
        block: Block | None = None
        flags, block_id, size, owned = 0, 0, 0, []
        borrowed = self._borrowed.pop(call_id, None) if reply else None
        if plan.block_bytes:
            memory = self._mapped.get(borrowed) if borrowed is not None else None
            if memory is not None and plan.block_bytes <= len(memory):
                block_id, size = borrowed or 0, len(memory)
            elif self.role == "parent" and call_id and not reply and len(self._lent) < MAX_LENT:
                block = self._blocks.take(plan.block_bytes)
                memory, block_id, size = block.memory, block.id, block.size
                self._lent[call_id] = block
                owned = [block.take_fd()] if block.fd >= 0 else []
            else:
                once = Block(0, plan.block_bytes)
                memory, size, owned = once.memory, once.size, [once.take_fd()]
            flags = messages.BLOCK | (messages.NEW if owned else 0)
            view = memoryview(memory)
            for place, data in plan.large:
                view[place : place + len(data)] = data
            view.release()
            if not block_id:
                unmap(memory)  # the receiver has the descriptor
        head = plan.head(flags, len(fds), block_id, size)
        return _Frame([head, *plan.small], [*owned, *fds], owned, block)

    def _transmit(self, frame: _Frame) -> bool:
        with self._send_lock:
            if not self._outbox and frame.fill is not None:
                frame = frame.fill(frame.fds)
            sent = not self._outbox and self._try(frame)
            while not sent and self.role == "worker":  # a blocking socket, out of descriptors
                time.sleep(0.002)
                sent = self._try(frame)
            if not sent:
                if self._ended:
                    frame.close()
                    raise ChannelClosed("The channel is closed.")
                kept = [fd if fd in frame.owned else os.dup(fd) for fd in frame.fds]
                self._outbox.append(_Frame([b"".join(frame.parts)], kept, kept, fill=frame.fill))
                return False
            return True

    def _try(self, frame: _Frame) -> bool:
        """Send one frame and return True, or False when the socket is full."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", frame.fds))]
        try:
            self._socket.sendmsg(frame.parts, rights if frame.fds else (), self._flags)
        except OSError as error:
            if error.errno in _FULL:
                return False
            frame.close()
            if isinstance(error, ConnectionError) or self._socket.fileno() < 0:
                raise ChannelClosed(f"The other process has ended: {error}.") from error
            raise
        frame.close()
        return True

    def flush(self) -> bool:
        """Send what waits in the outbox; True when nothing is left. Raises: ChannelClosed."""
        with self._send_lock:
            while self._outbox:
                frame = self._outbox[0]
                if frame.fill is not None:
                    try:
                        filled = frame.fill(frame.fds)
                    except CapacityError:  # not now; what is under way gives some back
                        time.sleep(0.01)
                        return False
                    filled.owned += frame.owned
                    frame = self._outbox[0] = filled
                if not self._try(frame):
                    return False
                self._outbox.popleft()
            return True

    def pending(self) -> bool:
        """Return whether messages wait in the outbox."""
        return bool(self._outbox)

    # ------------------------------------------------------------ receiving

    def receive(self, *, wait: bool = True) -> Message | None:
        """Return the next message; None when there is none now. Only a worker waits for one.

        Messages sent before the other end died still arrive.
        Raises: ChannelClosed at the end, WireError for bytes that are no message.
        """
        while True:
            taken = self._take(wait)
            if taken is None:
                return None
            data, fds, whole = taken
            try:
                if not whole:
                    raise ValueError("a message or descriptors that do not fit")
                message = self._read(data, fds)
            except (ValueError, struct.error) as error:
                for fd in fds:
                    os.close(fd)
                raise WireError(
                    f"A message must be one that send() made; got {error}. "
                    "End the process on the other side."
                ) from error
            if message is not None:
                return message

    def _take(self, wait: bool) -> tuple[memoryview, list[int], bool] | None:
        """Return one message's bytes and descriptors; None when it would have to wait."""
        waits = wait and self.role == "worker"
        flags = socket.MSG_CMSG_CLOEXEC | (0 if waits else socket.MSG_DONTWAIT)
        for _ in range(3):
            try:
                size, ancillary, got, _ = self._socket.recvmsg_into([self._incoming], _ROOM, flags)
            except ConnectionResetError:
                continue  # said once when the other end died with unread messages; ours come next
            except BlockingIOError:
                return None
            except OSError as error:
                raise ChannelClosed(f"The channel is closed: {error}.") from error
            fds = array.array("i")
            for level, kind, rights in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
            if not size and not fds:
                break
            whole = not got & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
            return memoryview(self._incoming)[:size], fds.tolist(), whole
        raise ChannelClosed("The other process has ended.")

    def _read(self, data: memoryview, fds: list[int]) -> Message | None:
        head = messages.read_head(data)
        new = bool(head.flags & messages.NEW)
        if len(fds) != head.num_fds + new:
            raise ValueError(f"{len(fds)} descriptors instead of {head.num_fds + new}")
        memory, give_back = self._memory(head, fds[0] if new else None)
        try:
            view = memoryview(memory) if memory is not None else None
            kind, body, buffers = messages.read_parts(head, data, view)
        except BaseException:
            if give_back is not None:
                give_back()
            raise
        if new:
            os.close(fds.pop(0))
        if head.flags & messages.DROP:
            for (block_id,) in struct.iter_unpack("<Q", body):
                if (gone := self._mapped.pop(block_id, None)) is not None:
                    unmap(gone)
            return None
        reply = bool(head.flags & messages.REPLY)
        return Message(kind, head.call_id, body, buffers, list(fds), reply, give_back)

    def _memory(
        self, head: messages.Head, fd: int | None
    ) -> tuple[mmap.mmap | None, Callable[[], None] | None]:
        """Return the block of a message, and how it is given back."""
        lent: Block | None = None
        if self.role == "parent" and head.flags & messages.REPLY:
            lent = self._lent.pop(head.call_id, None)
        if not head.flags & messages.BLOCK:
            if lent is not None:
                self._give(lent)
            return None, None
        if head.block_id == 0:
            if lent is not None:
                self._give(lent)
            if fd is None:
                raise ValueError("a message without its block's descriptor")
            once = open_block(fd, head.block_size)
            return once, lambda: unmap(once)
        if self.role == "parent":
            if lent is None or fd is not None or lent.id != head.block_id:
                raise ValueError(f"block {head.block_id}, which call {head.call_id} has not")
            if lent.size != head.block_size:
                raise ValueError(f"{head.block_size} bytes for a block of {lent.size}")
            mine = lent
            return lent.memory, lambda: self._give(mine)
        if fd is not None:
            self._mapped[head.block_id] = open_block(fd, head.block_size)
        memory = self._mapped.get(head.block_id)
        if memory is None or len(memory) != head.block_size:
            raise ValueError(f"an unknown block {head.block_id} of {head.block_size} bytes")
        self._borrowed[head.call_id] = head.block_id
        return memory, None

    def _give(self, block: Block) -> None:
        dropped = self._blocks.give(block)
        if dropped and not self._ended:
            body = struct.pack(f"<{len(dropped)}Q", *dropped)
            plan = messages.plan("", 0, body, (), messages.DROP)
            with contextlib.suppress(ChannelClosed):
                self._transmit(_Frame([plan.head(0, 0, 0, 0), *plan.small], [], []))

    # ------------------------------------------------------------ ending

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the connection for both sides and give all memory back. Idempotent.

        A thread that waits in ``receive`` gets ChannelClosed. Results already decoded stay valid.
        """
        self._end(shut=True)

    def forget(self) -> None:
        """Close a forked copy of this channel: the original process keeps its connection."""
        self._send_lock = threading.Lock()  # the copy may have been taken while another thread sent
        self._blocks.forget()
        self._end(shut=False)

    def _end(self, shut: bool) -> None:
        self._ended = True
        if shut:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        with self._send_lock:
            self._socket.close()
            while self._outbox:
                self._outbox.popleft().close()
        lent = [self._lent.pop(call) for call in list(self._lent)]
        self._blocks.close()
        for block in lent:
            self._blocks.give(block)
        while self._mapped:
            unmap(self._mapped.popitem()[1])
        self._borrowed.clear()
