"""Which backend keeps which session; a session whose backend is gone is lost, and told so."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phyai_gateway.backends import Member
from phyai_gateway.messages import Fault

MAX_ID = 256
BOUNDED_LOAD = 1.25  # sessions of one backend, over the mean, before the next in rank takes more


def session_of(options: Any) -> tuple[str, bool] | None:
    """Return the session id and whether it begins (``seq`` 0); None without one."""
    found = options.get("session_id")
    if found is None:
        return None
    if not isinstance(found, str) or not 1 <= len(found) <= MAX_ID:
        raise Fault(
            "invalid_argument",
            f"session_id must be a text of 1 to {MAX_ID} characters; got {found!r:.40}.",
        )
    return found, options.get("seq") == 0


@dataclass(slots=True)
class _Pin:
    member: Member
    incarnation: int
    used: float


class Sessions:
    """The pins of one model; the longest unused go first, with what is remembered of lost ones.

    A session without a pin, as after a restart of the gateway, ranks the backends by its id and
    so finds its own again; were it another, the model server refuses the unknown session.
    """

    def __init__(self, *, cap: int = 4096, idle_s: float = 600.0) -> None:
        self._cap, self._idle_s = cap, idle_s
        self._pins: OrderedDict[str, _Pin] = OrderedDict()
        self._lost: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pins)

    def member(self, session: str, begins: bool, members: Sequence[Member], now: float) -> Member:
        """Return the backend of the session.

        members: those that take new sessions. Raises Fault: failed_precondition for a lost
        session that goes on, unavailable when there is nothing to begin on.
        """
        self._expire(now)
        pin = self._pins.get(session)
        if pin is not None and (pin.incarnation != pin.member.incarnation or not pin.member.alive):
            self._forget(session)
            pin = None
        if session in self._lost:
            if not begins:
                raise lost(session)
            del self._lost[session]
        if pin is None:
            member = self._rank(session, begins, members)
            pin = self._pins[session] = _Pin(member, member.incarnation, now)
        pin.used = now
        self._pins.move_to_end(session)
        return pin.member

    def check(self, session: str, member: Member) -> None:
        """Raise Fault if the session was lost meanwhile, as after a wait."""
        pin = self._pins.get(session)
        if pin is None or pin.member is not member or pin.incarnation != member.incarnation:
            raise lost(session)

    def _rank(self, session: str, begins: bool, members: Sequence[Member]) -> Member:
        if not members:
            raise Fault("unavailable", "no backend takes sessions now. Try again.", retry_after=1.0)
        ranked = sorted(members, key=lambda member: _score(session, member), reverse=True)
        if not begins:
            return ranked[0]
        held = Counter(pin.member.id for pin in self._pins.values())
        limit = math.ceil(BOUNDED_LOAD * (len(self._pins) + 1) / len(members))
        return next(member for member in ranked if held[member.id] < limit)

    def _forget(self, session: str) -> None:
        del self._pins[session]
        self._lost[session] = None
        while len(self._lost) > self._cap:
            self._lost.popitem(last=False)

    def _expire(self, now: float) -> None:
        while self._pins:
            oldest = next(iter(self._pins.values()))
            if len(self._pins) < self._cap and now - oldest.used <= self._idle_s:
                return
            self._pins.popitem(last=False)


def lost(session: str) -> Fault:
    """Return what a client is told whose session cannot go on."""
    return Fault(
        "failed_precondition",
        f"session {session!r:.80} is lost: the backend that kept it is gone. Start it again with "
        "seq 0, or another session.",
    )


def _score(session: str, member: Member) -> bytes:
    return hashlib.sha256(f"{member.endpoint}\0{session}".encode()).digest()
