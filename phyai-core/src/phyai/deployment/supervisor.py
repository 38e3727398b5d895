"""The thread of a pool that watches its processes: sockets, pipes, clocks. It never waits long."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("phyai")

JOIN_S = 1.0
"""How long a thread that is to end may take for what it is doing: a user's callback may hang."""

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Supervisor:
    """Runs callbacks of descriptors, of other threads, and of time, one after the other.

    tick: called at least every second or when the time it returned is over.  A callback that
    raises is logged; the thread goes on, because every replica depends on it.
    """

    def __init__(self, tick: Callable[[], float], name: str = "phyai-pool") -> None:
        self._tick = tick
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[int], None]] = {}  # callbacks by descriptor
        self._paused: set[int] = set()
        self._writing: set[int] = set()
        self._watching = threading.Lock()  # what is watched changes in one piece
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watched[self._wake] = self._woken
        self._epoll.register(self._wake, READ)
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._stopping = self._hurried = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after what it is doing; waits for it, a moment. Idempotent."""
        self._stopping = True
        if not self._thread.is_alive():
            self._release()
            return
        self.soon(lambda: None)
        if not self.here():
            self._thread.join(JOIN_S)

    def here(self) -> bool:
        """Return whether the caller is on this thread."""
        return threading.current_thread() is self._thread

    def soon(self, job: Callable[[], None]) -> None:
        """Have the thread do something; any thread may ask."""
        self._jobs.append(job)
        with contextlib.suppress(OSError):  # it has ended
            os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------ on the thread

    def hurry(self) -> None:
        """Have ``tick`` called right after this."""
        self._hurried = True

    def watch(self, what: HasFileno, callback: Callable[[int], None]) -> None:
        """Call back with the events whenever there is something to read."""
        with self._watching:
            self._watched[what.fileno()] = callback
            self._epoll.register(what.fileno(), READ)

    def want_writing(self, what: HasFileno, wanted: bool) -> None:
        """Also call back when there is room to write, as long as that is wanted."""
        self._change(self._writing, what, wanted)

    def forget(self, what: HasFileno) -> None:
        with self._watching:
            if self._watched.pop(fd := what.fileno(), None) is not None:
                self._epoll.unregister(fd)
                self._paused.discard(fd)
                self._writing.discard(fd)

    # ------------------------------------------------------------ on any thread

    def pause(self, what: HasFileno) -> None:
        """Leave what there is to read to the caller; the end of it is still noticed here."""
        self._change(self._paused, what, True)

    def resume(self, what: HasFileno) -> None:
        self._change(self._paused, what, False)

    # ------------------------------------------------------------ internals

    def _change(self, these: set[int], what: HasFileno, among: bool) -> None:
        """Put a descriptor among those paused, or writing, or take it out."""
        with self._watching:
            if (fd := what.fileno()) not in self._watched:
                return
            (these.add if among else these.discard)(fd)
            reads, writes = fd not in self._paused, fd in self._writing
            self._epoll.modify(fd, (READ if reads else 0) | (WRITE if writes else 0))

    def _run(self) -> None:
        # Children inherit the mask: Ctrl-C is for the engine's process, which ends them in order.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        wait_s, due = 0.0, 0.0
        while not self._stopping:
            for fd, events in self._epoll.poll(wait_s):
                if (callback := self._watched.get(fd)) is not None:  # not forgotten meanwhile
                    self._call(callback, events)
            while self._jobs:
                self._call(self._jobs.popleft())
            now = time.monotonic()
            if now < due and not self._hurried:  # not for every message
                wait_s = due - now
                continue
            self._hurried, wait_s = False, 0.1
            try:
                wait_s = min(max(self._tick(), 0.0), 1.0)
            except Exception:
                log.exception("supervision of a pool failed; it goes on")
            due = now + wait_s
        self._release()

    def _call(self, callback: Callable[..., None], *args: int) -> None:
        try:
            callback(*args)
        except BaseException:  # also sys.exit in the callback of a Future: replicas depend on us
            log.exception("supervision of a pool failed; it goes on")

    def _woken(self, events: int) -> None:
        os.eventfd_read(self._wake)

    def abandon(self) -> None:
        """Give the descriptors back in a fork, which does not have the thread."""
        self._stopping = True
        self._jobs.clear()
        self._release()

    def _release(self) -> None:
        self._watched.clear()
        self._epoll.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
