"""The actors of one replica as the engine's process sees them, and how they ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phyai.deployment.calls import Replica
from phyai.deployment.rank_endings import Ending, whose_fault
from phyai.deployment.ray_actor import Host
from phyai.errors import CommTimeoutError

DOUBT_S = 3.0
"""How long a rank that gave up waits for news of the one it gave up for."""
_STDERR_BYTES = 2000


@dataclass(eq=False)
class Rank:
    """One actor.

    host: None until it runs; descriptor: there, of the file in which the ranks meet.
    watch: fails when the actor is gone; follows: of a rank but 0, until it follows no more.
    end: how it ended, as the end of a sentence.  error: what it said it failed with.
    """

    team: Team
    number: int
    handle: Any
    host: Host | None = None
    descriptor: int = -1
    watch: Future[Any] | None = None
    follows: Future[Any] | None = None
    end: str | None = None
    error: BaseException | None = None


@dataclass(eq=False)
class Team:
    """All actors of a replica, which live and end together; a pool's carrier.

    group: their placement group, None for a single one.  told: how far the load was.
    gave_up_at: when the first rank said that it cannot go on; None = none has.
    watched: call ids, by ticket, of the requests that somebody listens to.
    asked, asked_at: of rank 0's progress, later of its state; the other two: of the steps.
    """

    replica: Replica
    group: Any
    ranks: list[Rank] = field(default_factory=list)
    ready: bool = False
    gone: bool = False
    told: tuple[int, int, str] | None = None
    gave_up_at: float | None = None
    watched: dict[int, int] = field(default_factory=dict)
    asked: Future[Any] | None = None
    asked_at: float = 0.0
    asked_steps: Future[Any] | None = None
    asked_steps_at: float = 0.0
    _sending: threading.Lock = field(default_factory=threading.Lock)
    _tickets: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def lead(self) -> Rank:
        return self.ranks[0]

    @property
    def placed(self) -> bool:
        """Whether every actor runs."""
        return all(rank.host is not None for rank in self.ranks)

    def send(self, kind: str, frame: Any) -> tuple[int, Future[Any]]:
        """Send a call to rank 0; return its ticket, too. Calls begin there in that order.

        frame: bytes, or Ray's reference to them.
        """
        with self._sending:
            ticket = next(self._tickets)
            return ticket, self.lead.handle.call.remote(ticket, kind, frame).future()

    def stop(self, ticket: int) -> None:
        """Have a request end without a result, where it can; never raises."""
        with contextlib.suppress(Exception):  # it is gone: so is the request
            self.lead.handle.stop.remote(ticket)

    def clear_whose_fault(self, now: float) -> bool:
        """Return whether it is known whose fault the end of this replica is, or never will be."""
        if any(rank.end is not None for rank in self.ranks):
            return True
        errors = [rank.error for rank in self.ranks if rank.error is not None]
        if not self.ready and any(not isinstance(error, CommTimeoutError) for error in errors):
            return True
        waited = self.gave_up_at is not None and now - self.gave_up_at >= DOUBT_S
        return len(errors) == len(self.ranks) or (bool(errors) and waited)

    def ending(self) -> tuple[str, BaseException | None]:
        """Return why the replica is gone, and what kept it from starting."""
        lead = self.lead
        if len(self.ranks) > 1:
            return whose_fault([_ending(rank) for rank in self.ranks], ready=self.ready)
        if lead.end is not None or lead.error is None:
            return lead.end or "a Ray actor that is gone.", None
        return f"a Ray actor that could not start: {lead.error}", lead.error


def _ending(rank: Rank) -> Ending:
    text = rank.end or f"a Ray actor{where(rank.host)}."
    swept = rank.end is None and rank.error is None
    error = rank.error if rank.end is None else None
    return Ending(rank.number, text, error, swept)


def where(host: Host | None) -> str:
    """Return where an actor runs, in brackets; nothing when that is not known."""
    return "" if host is None else f" (pid {host.pid}, node {host.address})"


def how_it_died(host: Host | None, error: BaseException | None) -> str:
    """Return the end of a sentence from one of Ray's errors, which have many lines."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    detail = " ".join(line for line in lines if not re.match(r"\w+: \S*$", line))
    detail = detail.partition(" Some common causes")[0][:600]
    tail = "" if host is None else _stderr_tail(host)
    return f"a Ray actor{where(host)} that is gone: {detail.rstrip('. ')}.{tail}"


def _stderr_tail(host: Host) -> str:
    """Return the last lines an actor wrote, when its log can be read from here."""
    if host.hostname != socket.gethostname() or not host.stderr.endswith(".err"):
        return ""
    with contextlib.suppress(OSError):
        with Path(host.stderr).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _STDERR_BYTES))
            text = file.read().decode(errors="replace")
        lines = [line for line in text.splitlines() if line and not line.startswith(":")][-12:]
        return "\nIts last words on stderr:\n  " + "\n  ".join(lines) + "\n" if lines else ""
    return ""
