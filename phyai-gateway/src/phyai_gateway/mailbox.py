"""Latest wins: per robot one request on its way and one waiting; a newer one replaces it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager

from phyai_gateway.messages import Fault


def superseded() -> Fault:
    """Return what the sender of a replaced observation is told."""
    return Fault("cancelled", "observation was replaced by a newer one of the same robot.")


def stale(age_s: float) -> Fault:
    """Return what the sender of an observation that waited too long is told."""
    return Fault(
        "deadline_exceeded",
        f"observation must reach a backend within {age_s:g} s of its arrival; it waited longer. "
        "Send a newer one.",
    )


class Turn:
    """A robot's request from its arrival to its answer.

    waiting: where it waits for a backend; None before and after. Only there it can be replaced.
    """

    def __init__(self) -> None:
        self.waiting: asyncio.Future[object] | None = None

    def replace(self) -> bool:
        """Refuse it if it still waits; returns whether it did."""
        if self.waiting is None or self.waiting.done():
            return False
        self.waiting.set_exception(superseded())
        return True


class _Box:
    def __init__(self) -> None:
        self.running: Turn | None = None
        self.next: asyncio.Future[None] | None = None


class Mailboxes:
    """The boxes of all robots; one exists only while its robot has a request.

    >>> Mailboxes().robots
    0
    """

    def __init__(self, dropped: Callable[[str], None] = lambda reason: None) -> None:
        self._boxes: dict[Hashable, _Box] = {}
        self._dropped = dropped

    @property
    def robots(self) -> int:
        return len(self._boxes)

    @asynccontextmanager
    async def turn(self, key: Hashable, patience_s: float, max_age_s: float) -> AsyncIterator[Turn]:
        """Hold the robot's turn.

        patience_s: longest wait for it. Raises Fault: cancelled when a newer request took the
        place, deadline_exceeded when it waited too long.
        """
        box = self._boxes.setdefault(key, _Box())
        if box.running is not None:
            await self._wait(key, box, patience_s, max_age_s)
        box.running = mine = Turn()
        try:
            yield mine
        finally:
            self._pass_on(key, box)

    async def _wait(self, key: Hashable, box: _Box, patience_s: float, max_age_s: float) -> None:
        if box.next is not None and not box.next.done():
            box.next.set_exception(superseded())
            self._dropped("superseded")
        if box.running is not None and box.running.replace():
            self._dropped("superseded")
        place = box.next = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(min(patience_s, max_age_s)):
                await place
        except (TimeoutError, asyncio.CancelledError) as error:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._pass_on(key, box)  # the turn came in the same moment: it is not lost
            if isinstance(error, TimeoutError):
                late = max_age_s < patience_s
                self._dropped("stale")
                raise (stale(max_age_s) if late else _late()) from None
            raise
        finally:
            if box.next is place:
                box.next = None

    def _pass_on(self, key: Hashable, box: _Box) -> None:
        if box.next is not None and not box.next.done():
            box.running = Turn()  # keeps the place until the next one wakes
            box.next.set_result(None)
            return
        box.running = None
        if self._boxes.get(key) is box:
            del self._boxes[key]


def _late() -> Fault:
    return Fault("deadline_exceeded", "deadline passed while an older request of the robot ran.")
