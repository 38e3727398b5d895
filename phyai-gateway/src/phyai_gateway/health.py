"""Probing: who is up, who is down, and what each backend publishes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from phyai_gateway.backends import NOT_SERVING, Member
from phyai_gateway.contract import MAX_IN_FLIGHT, ModelContract
from phyai_gateway.messages import Fault
from phyai_gateway.pool import Pool

log = logging.getLogger(__name__)
SHORTEST_PAUSE_S = 0.05
MOST_SLOTS = 1024


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """fall, rise: failures and successes in a row that change a backend's state.

    A backend that answers that it does not serve is down at once.
    """

    period_s: float = 5.0
    timeout_s: float = 2.0
    fall: int = 3
    rise: int = 1
    first_period_s: float = 0.5
    """Between probes of a backend that is not up: a new one is waited for impatiently."""


class HealthMonitor:
    """One probing task per member. ``probe`` alone does one step, without any clock."""

    def __init__(self, settings: ProbeSettings, changed: Callable[[], None]) -> None:
        self.settings, self._changed = settings, changed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._successes: dict[str, int] = {}

    def watch(self, pool: Pool, member: Member) -> None:
        """Probe the member until ``forget``."""
        self._tasks[member.id] = asyncio.create_task(
            self._loop(pool, member), name=f"probe-{member.id}"
        )

    async def forget(self, member: Member) -> None:
        if (task := self._tasks.pop(member.id, None)) is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._successes.pop(member.id, None)

    async def close(self) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _loop(self, pool: Pool, member: Member) -> None:
        while True:
            await self.probe(pool, member)
            pause = self.settings.period_s
            if not member.up or member.probe_failures:
                pause = min(pause, self.settings.first_period_s * (1 + member.probe_failures))
            member.hurry.clear()
            # Not wait_for: in Python 3.11 it loses a cancellation that comes with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(max(pause, SHORTEST_PAUSE_S)):
                    await member.hurry.wait()

    async def probe(self, pool: Pool, member: Member) -> None:
        """Ask once; take the member up or down, and check its contract when it comes up."""
        before = (member.up, member.refusal)
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                await member.backend.probe()
                # Asked each time: a quick restart with another checkpoint is not seen as "down".
                contract = await member.backend.contract()
        except (Fault, TimeoutError, OSError) as error:
            refused = isinstance(error, Fault) and error.reason == NOT_SERVING
            self._failed(member, _text(error), certain=refused)
        except Exception as error:  # a backend's client may have a bug: the loop must go on
            log.exception("probe of backend %s failed", member.id)
            self._failed(member, type(error).__name__)
        else:
            self._succeeded(pool, member, contract)
        if before != (member.up, member.refusal):
            self._changed()
        pool.wake()

    def _failed(self, member: Member, text: str, *, certain: bool = False) -> None:
        """Count a failed probe. certain: the server itself says that it takes no requests."""
        self._successes[member.id] = 0
        member.probe_failures += 1
        member.note_probe(text)
        if member.up and (certain or member.probe_failures >= self.settings.fall):
            member.up = False
            log.warning("backend %s (%r) is down: %s", member.id, member.model, text)

    def _succeeded(self, pool: Pool, member: Member, contract: ModelContract) -> None:
        member.probe_failures = 0
        member.note_probe(None)
        old, member.contract = member.contract, contract
        if member.up and old is not None and old.fingerprint != contract.fingerprint:
            member.incarnation += 1  # another process: its sessions are gone
        if not member.up:
            self._successes[member.id] = self._successes.get(member.id, 0) + 1
            if self._successes[member.id] < self.settings.rise:
                return
            member.up = True
            member.incarnation += 1
            member.breaker.relent()  # another process: what the old one did says little of it
            log.info("backend %s (%r) is up", member.id, member.model)
        check_contract(pool, member)


def check_contract(pool: Pool, member: Member) -> None:
    """Let the member in if its contract is that of the pool.

    The pool's changes only when no backend of it, up or down, has the old one any more: a model
    must not turn into another because one server is away for a minute.
    """
    theirs = member.contract
    if theirs is None:
        return
    held = [m.contract.fingerprint for m in pool.members.values() if m.contract is not None]
    if pool.contract is None or pool.contract.fingerprint not in held:
        pool.contract = theirs
        for other in pool.members.values():  # those that have it already need not wait for a probe
            _judge(pool, other, pool.contract)
    _judge(pool, member, pool.contract)


def _judge(pool: Pool, member: Member, wanted: ModelContract) -> None:
    theirs = member.contract
    if theirs is None:
        return
    if theirs.fingerprint == wanted.fingerprint or pool.allow_mixed:
        member.refusal = None
        if (published := _slots(theirs.extra.get(MAX_IN_FLIGHT))) is not None:
            member.slots = member.share.slots(published)
        return
    refusal = (
        f"contract {theirs.fingerprint} differs from {wanted.fingerprint} of the "
        f"others behind {pool.model!r} in {', '.join(theirs.differs_in(wanted))}. Serve the same "
        "checkpoint and settings, use another name, or start with --allow-mixed."
    )
    if refusal != member.refusal:
        member.refusal = refusal
        log.warning("backend %s is not used: %s", member.id, refusal)


def _slots(published: object) -> int | None:
    """Return how many requests it wants at once, if it says so."""
    if not isinstance(published, int) or isinstance(published, bool) or published < 1:
        return None
    return min(published, MOST_SLOTS)


def _text(error: BaseException) -> str:
    if isinstance(error, Fault):
        return error.message
    return "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
