"""Blocks of shared memory (memfd) that one process lends to another, by size class, reused."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import threading
from collections import OrderedDict

from phyai.errors import CapacityError, ConfigError

SMALLEST = 1 << 16
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class Block:
    """One piece of shared memory; ``fd`` is -1 once somebody else closes it or it was closed.

    id: how both sides name it; 0 for one that is used once.
    """

    __slots__ = ("fd", "id", "memory", "size")

    def __init__(self, block_id: int, size: int) -> None:
        """Raises: CapacityError when the system gives no memory or no descriptor."""
        self.id, self.size, self.fd = block_id, size, -1
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "Replicas in processes must run on Linux (memfd); got another system. "
                "Use DeploymentConfig.inline()."
            )
        try:
            self.fd = os.memfd_create("phyai", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, size)
            # The other side may map it only when it cannot shrink: a read beyond its end is fatal.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _seals())
            self.memory = mmap.mmap(self.fd, size)
        except (OSError, ValueError) as error:
            self.close_fd()
            raise CapacityError(
                f"A shared block must get {size} bytes from the system; got {error}. "
                "Send less at a time, or raise the limits of memory and open files."
            ) from error

    def take_fd(self) -> int:
        """Return the descriptor, which the caller closes from now on."""
        fd, self.fd = self.fd, -1
        return fd

    def close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.take_fd())

    def close(self) -> None:
        """Free the memory here; views of it keep it alive until they go."""
        self.close_fd()
        unmap(self.memory)


def _seals() -> int:
    return sum(int(getattr(fcntl, name)) for name in _SEALS)


def open_block(fd: int, size: int) -> mmap.mmap:
    """Return the memory behind a received descriptor, which stays the caller's.

    Raises: ValueError when it is no sealed block of that size.
    """
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() == _seals()
        found = os.fstat(fd).st_size
        if not sealed or found != size or size <= 0:
            raise ValueError(f"a block of {found} bytes (sealed: {sealed}) instead of {size}")
        return mmap.mmap(fd, size)
    except OSError as error:
        raise ValueError(f"a descriptor that is no block: {error}") from error


def unmap(memory: mmap.mmap) -> None:
    """Free a mapping now, or when the last view of it goes."""
    with contextlib.suppress(BufferError):
        memory.close()


class BlockPool:
    """The lender's blocks; a size class is a power of two.

    Free blocks are kept up to ``max_free`` of a class and ``max_free_bytes`` in all; what is
    beyond goes back to the system, the longest unused one first. Thread-safe.
    """

    def __init__(self, max_free: int = 8, max_free_bytes: int = 64 << 20) -> None:
        self.max_free, self.max_free_bytes = max_free, max_free_bytes
        self._free: OrderedDict[int, Block] = OrderedDict()  # by id, longest unused first
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return sum(block.size for block in self._free.values())

    def take(self, size: int) -> Block:
        """Return a block of at least ``size`` bytes. Raises: CapacityError."""
        wanted = max(SMALLEST, 1 << max(0, size - 1).bit_length())
        with self._lock:
            for block in reversed(self._free.values()):  # the last used one is warm
                if block.size == wanted:
                    return self._free.pop(block.id)
        return Block(next(self._ids), wanted)

    def give(self, block: Block) -> list[int]:
        """Take a block back; returns the ids of blocks that are gone, for the other side."""
        dropped: list[Block] = []
        with self._lock:
            self._free[block.id] = block
            same = [b for b in self._free.values() if b.size == block.size]
            if self._closed:
                dropped = list(self._free.values())
            elif len(same) > self.max_free:
                dropped = [same[0]]
            kept = sum(b.size for b in self._free.values()) - sum(b.size for b in dropped)
            for old in list(self._free.values()):
                if kept <= self.max_free_bytes:
                    break
                if old not in dropped:
                    dropped.append(old)
                    kept -= old.size
            for old in dropped:
                del self._free[old.id]
        for old in dropped:
            old.close()
        return [old.id for old in dropped]

    def forget(self) -> None:
        """Free a fork's copy, taken while another thread may have been in here."""
        self._lock = threading.Lock()
        self.close()

    def close(self) -> None:
        """Free every block that is free, and later the lent ones as they come back."""
        with self._lock:
            self._closed = True
            blocks = list(self._free.values())
            self._free.clear()
        for block in blocks:
            block.close()
