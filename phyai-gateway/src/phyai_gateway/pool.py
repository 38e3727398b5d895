"""The backends of one model name: who serves the next request, and who waits for a free slot."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from phyai_gateway.backends import Member
from phyai_gateway.breaker import Outcome
from phyai_gateway.contract import ModelContract
from phyai_gateway.faults import QueueFull
from phyai_gateway.mailbox import Turn
from phyai_gateway.messages import Fault
from phyai_gateway.sticky import Sessions

FEWEST_SAMPLES = 20  # requests of a backend before its slowness says anything


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot of a backend. trial: whether the request decides if an ejected one is back."""

    member: Member
    trial: bool


@dataclass(slots=True)
class _Waiter:
    """A request without a slot. member: the only one it may take, of a session."""

    deadline: float
    number: int
    member: Member | None
    exclude: frozenset[str]
    future: asyncio.Future[Lease] | None = None  # from when it waits

    @property
    def order(self) -> tuple[float, int]:
        return self.deadline, self.number

    @property
    def waits(self) -> bool:
        return self.future is not None and not self.future.done()


@dataclass(eq=False, slots=True)
class Pool:
    """All of one model.  queue_per_backend: requests that may wait, per ready backend."""

    model: str
    queue_per_backend: int = 16
    allow_mixed: bool = False
    on_change: Callable[[], None] = lambda: None
    members: dict[str, Member] = field(default_factory=dict)
    contract: ModelContract | None = None
    sessions: Sessions = field(default_factory=Sessions)
    _waiters: list[_Waiter] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=lambda: count(1))

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def ready(self) -> list[Member]:
        """Return the members that take new requests."""
        return [member for member in self.members.values() if member.routable]

    async def acquire(
        self,
        deadline: float,
        *,
        member: Member | None = None,
        exclude: Iterable[str] = (),
        turn: Turn | None = None,
    ) -> Lease:
        """Return a slot of a backend; ``release`` gives it back.

        deadline: ``time.monotonic()``.  member: the only one that may be taken.  Raises Fault:
        unavailable at once when none is healthy, resource_exhausted when the queue is full,
        deadline_exceeded.
        """
        waiter = _Waiter(
            deadline,
            next(self._numbers),
            member,
            frozenset(exclude),
        )
        if any(one.waits for one in self._waiters):
            self.wake()  # those who came before choose first; what none of them may take is free
        if (found := self._choose(waiter)) is not None:
            return self._take(found)
        self._check_hope(waiter)
        return await self._wait(waiter, turn)

    def release(self, lease: Lease, outcome: Outcome) -> None:
        """Give the slot back and count the outcome; ejects the backend when it has earned it."""
        member = lease.member
        member.in_flight -= 1
        if member.in_flight == 0:
            member.emptied.set()
        if member.breaker.record(outcome, trial=lease.trial):
            self.eject(member, "too many failures in a row")
        self.wake()

    def eject(self, member: Member, reason: str) -> bool:
        """Leave the backend alone for a while, unless it is the last one that works."""
        others = [m for m in self.members.values() if m is not member and m.alive]
        if not any(m.breaker.state == "closed" and not m.draining for m in others):
            if member.breaker.state == "half_open":
                member.breaker.trip()  # its trial failed: it was out, and is tried again later
            return False
        member.breaker.trip()
        member.latencies.clear()
        member.note_error(f"ejected: {reason}; last: {member.last_error or 'none'}")
        self.on_change()
        return True

    def watch_slowness(self) -> None:
        """Eject who has been much slower than the others for long."""
        known = {
            m: (m.latencies.quantile(0.95), m.latencies.quantile(0.5))
            for m in self.ready()
            if len(m.latencies) >= FEWEST_SAMPLES and m.breaker.state == "closed"
        }
        for member, (p95, _) in known.items():
            others = [p50 for m, (_, p50) in known.items() if m is not member and p50 is not None]
            if others and p95 is not None:
                median = statistics.median(others)
                if member.breaker.watch_slowness(p95, median):
                    self.eject(member, f"slow: p95 {p95:.3f} s, the others' median {median:.3f} s")

    def wake(self) -> None:
        """Give free slots to those who wait, earliest deadline first; refuse where no hope is."""
        if not self._waiters:
            return
        self._relent()
        for waiter in sorted(self._waiters, key=lambda one: one.order):
            future = waiter.future
            if future is None or not waiter.waits:
                continue
            if (found := self._choose(waiter)) is not None:
                future.set_result(self._take(found))
                continue
            try:
                self._check_health(waiter)
            except Fault as fault:
                future.set_exception(fault)

    def _choose(self, waiter: _Waiter) -> Member | None:
        """Return the cheapest free member; ties go to the one chosen longest ago."""
        if waiter.member is not None:
            one = waiter.member
            free = one.alive and one.breaker.admits and one.in_flight < one.slots
            return one if free else None
        free_ones = [
            m for m in self.ready() if m.in_flight < m.slots and m.id not in waiter.exclude
        ]
        if len(free_ones) < 2:
            return free_ones[0] if free_ones else None
        # A trial goes first: nothing else brings an ejected backend back, and it is one request.
        return min(free_ones, key=lambda m: (m.breaker.state == "closed", m.cost, m.picked))

    def _take(self, member: Member) -> Lease:
        member.in_flight += 1
        member.emptied.clear()
        member.picked = next(self._numbers)
        return Lease(member, member.breaker.begin())

    def _check_health(self, waiter: _Waiter) -> None:
        if waiter.member is not None:
            one = waiter.member
            if not one.alive:
                raise Fault("unavailable", "the session's backend is not there.", retry_after=1.0)
            if one.breaker.state == "open":
                raise Fault(
                    "unavailable",
                    "the session's backend fails and is left alone for a while. Try again.",
                    retry_after=one.breaker.wait_s,
                )
            return
        able = [m for m in self._able() if m.id not in waiter.exclude]
        if waiter.exclude:  # a second attempt only goes where it is welcome
            able = [m for m in able if m.breaker.state != "open"]
        if not able:
            raise Fault(
                "unavailable",
                f"model {self.model!r} has no healthy backend now ({len(self.members)} known). "
                "Try again, or look at /v1/backends.",
                retry_after=1.0,
            )

    def _check_hope(self, waiter: _Waiter) -> None:
        self._check_health(waiter)
        room = self.queue_per_backend * max(len(self.ready()), 1)
        if len(self._waiters) >= room:
            raise QueueFull(
                f"queue of model {self.model!r} is full: {room} requests wait. Try later.",
                self.wait_estimate(),
            )

    def wait_estimate(self) -> float:
        """Return the seconds until a new request would get a slot, roughly; 0.05 to 5."""
        ready = self.ready()
        slots = sum(m.slots for m in ready) or 1
        known = [m.latencies.ewma for m in ready if m.latencies.ewma is not None]
        each = statistics.fmean(known) if known else 0.1
        return min(max((len(self._waiters) + 1) * each / slots, 0.05), 5.0)

    def _able(self) -> list[Member]:
        """Return the members that work by their probes, ejected ones included."""
        return [m for m in self.members.values() if m.alive and not m.draining]

    def _relent(self) -> None:
        """With only ejected ones left, try the one whose pause is over first."""
        able = self._able()
        if self._waiters and able and all(m.breaker.state == "open" for m in able):
            min(able, key=lambda m: m.breaker.wait_s).breaker.relent()

    async def _wait(self, waiter: _Waiter, turn: Turn | None) -> Lease:
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        waiter.future = future
        self._waiters.append(waiter)
        self.wake()
        if turn is not None:
            turn.waiting = future  # type: ignore[assignment]  # only ever given an exception
        try:
            async with asyncio.timeout(max(waiter.deadline - time.monotonic(), 0.0)):
                return await future
        except (TimeoutError, asyncio.CancelledError) as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result(), "neutral")  # the slot came in the same moment
            if isinstance(error, TimeoutError):
                raise Fault(
                    "deadline_exceeded", "deadline passed while waiting for a free backend."
                ) from None
            raise
        finally:
            self._waiters.remove(waiter)
            if turn is not None:
                turn.waiting = None
