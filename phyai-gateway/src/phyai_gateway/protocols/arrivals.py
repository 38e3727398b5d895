"""One timer for the many messages that are on their way in; each has the same time to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")
_CHECKS = 8  # in the time that a message has


class Arrivals:
    """Cancels what does not arrive in time, up to an eighth of the time later.

    ``asyncio.timeout`` costs every message a timer that almost never fires.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, arrival: Awaitable[T]) -> T:
        """Return what arrives; raises TimeoutError. One task waits for one thing at a time."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self._since[task] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._timeout_s / _CHECKS, self._check, loop)
        try:
            return await arrival
        except asyncio.CancelledError:
            if task in self._late and task.uncancel() == 0:
                raise TimeoutError from None
            raise
        finally:
            del self._since[task]
            self._late.discard(task)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        begun = loop.time() - self._timeout_s
        for task, since in self._since.items():
            if since <= begun and task not in self._late:
                self._late.add(task)
                task.cancel()
        self._timer = None
        if self._since:
            self._timer = loop.call_later(self._timeout_s / _CHECKS, self._check, loop)
