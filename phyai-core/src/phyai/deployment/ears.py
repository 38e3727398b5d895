"""Ears: a second thread of a worker, which hears what arrives while the first runs a request."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

_OFF = select.EPOLLONESHOT
_ON = select.EPOLLONESHOT | select.EPOLLIN


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Ears:
    """While entered, ``hear`` is called on another thread whenever ``channel`` has something.

    A thread that waits for a message and runs what it asks for saves handing it over to another,
    and a wake-up with it; this one is woken only when there is more to hear meanwhile. ``hear``
    takes one message without waiting, if it is still there, and ends the process rather than raise.
    Leaving waits for a ``hear`` that runs: no two threads hear at once. ``close`` ends the thread.
    """

    def __init__(self, channel: HasFileno, hear: Callable[[], None]) -> None:
        self._hear, self._fd = hear, channel.fileno()
        self._open = self._closed = False
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._epoll.register(self._fd, _OFF)
        self._end = os.eventfd(0)
        self._epoll.register(self._end, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="phyai-ears", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._open = True
        self._epoll.modify(self._fd, _ON)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._open = False
        self._epoll.modify(self._fd, _OFF)

    def close(self) -> None:
        """End the thread; idempotent. Not while entered."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._end, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._end)

    def _run(self) -> None:
        while not self._closed:
            self._epoll.poll()
            with self._lock:
                if self._open:
                    self._hear()
                    self._epoll.modify(self._fd, _ON)
