"""Members of a local pool in the engine's process: a loader and the workers, with their pipes."""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
from dataclasses import dataclass, field
from typing import Any

from phyai.deployment.channel import Channel
from phyai.deployment.dispatch import Replica
from phyai.deployment.processes import ProcessHandle, StderrTail
from phyai.deployment.rank_endings import Ending, whose_fault

_serials = itertools.count(1)


@dataclass(eq=False)
class Member:
    """One process of the pool.

    process: when this process started it; None for a fork of a loader.  handle: None until its
    pid is known.  error: what it said it failed with.  killed_why: why we ended it.
    gone_at: when its connection ended; it is buried when its exit status is known, or soon.
    listening: held by the thread that receives.
    """

    channel: Channel
    stderr: StderrTail
    process: subprocess.Popen[bytes] | None = None
    handle: ProcessHandle | None = None
    error: BaseException | None = None
    killed_why: str | None = None
    gone_at: float | None = None
    leaving_at: float | None = None  # when it was told to exit
    loader: Loader | None = None  # whose fork it is, or will be
    theirs: int = -1  # the other end, until it is passed on
    swept: bool = False  # ended because another rank of its replica had
    serial: int = field(default_factory=lambda: next(_serials))
    listening: threading.Lock = field(default_factory=threading.Lock)

    def kill(self, why: str | None = None) -> None:
        """End it at once. A fork whose pid is not known yet is killed when it is."""
        if self.killed_why is None:
            self.killed_why = why
        if self.handle is not None:
            self.handle.kill()

    def sweep(self) -> None:
        """End it because another rank is gone, which is what counts."""
        if self.gone_at is None and self.killed_why is None:
            self.swept = True
            self.kill()

    @property
    def leaving(self) -> bool:
        return self.leaving_at is not None

    def status_known(self) -> bool:
        """Return whether it has ended, and is known how."""
        code = None if self.process is None else self.process.poll()
        if code is not None and self.handle is not None:
            self.handle.status = code << 8 if code >= 0 else -code
        return self.handle is not None and self.handle.status is not None

    def why(self) -> str:
        """Return the end of a sentence that says why it is gone: ``a worker that ...``."""
        self.stderr.feed()
        pid = "" if self.handle is None else f" (pid {self.handle.pid})"
        if self.killed_why is not None:
            return f"{self.killed_why}{self.stderr.text()}"
        how = "is gone" if self.handle is None else self.handle.ending()
        return f"a worker{pid} that {how}.{self.stderr.text()}"

    def close_theirs(self) -> None:
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def release(self) -> None:
        """Give back descriptors and shared memory."""
        self.channel.close()
        self._close_pipes()

    def forget(self) -> None:
        """Give back a fork's copies of them: the process stays the engine's."""
        self.channel.forget()
        self._close_pipes()

    def _close_pipes(self) -> None:
        self.close_theirs()
        self.stderr.close()
        if self.handle is not None:
            self.handle.close()


@dataclass(eq=False)
class Worker(Member):
    """A worker of a replica, or rank 0 of one.  ready: its core is there.

    followers: its other ranks, in order; buried: of those that are gone rank, ending and process.

    trial: of an update, not in use yet.  retired: replaced; it only finishes what it has.
    weights: what it took over of updates, where its replica has several ranks.
    """

    replica: Replica = field(kw_only=True)
    followers: list[Follower] = field(default_factory=list)
    buried: list[tuple[int, str, Member]] = field(default_factory=list)
    ready: bool = False
    trial: bool = False
    retired: bool = False
    weights: Any = None
    info: dict[str, Any] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Follower(Member):
    """Another rank of a worker's replica."""

    lead: Worker = field(kw_only=True)
    rank: int = field(kw_only=True)


@dataclass(eq=False)
class Loader(Member):
    """A loader.  loaded: it can fork.  waiting: forks to ask for then.  version: of its weights."""

    loaded: bool = False
    waiting: list[Worker] = field(default_factory=list)


def team(member: Member) -> list[Member]:
    """Return all processes of a member's replica that started together, itself included."""
    lead = member.lead if isinstance(member, Follower) else member
    return [lead, *lead.followers] if isinstance(lead, Worker) else [lead]


def how_ranks_ended(lead: Worker, why: str) -> tuple[str, BaseException | None]:
    """Return why a replica of several ranks is gone, and what kept it from starting.

    why: how rank 0 ended.  See ``whose_fault``.
    """
    ends = [(0, why, lead), *lead.buried]
    found = [Ending(rank, text, member.error, member.swept) for rank, text, member in ends]
    return whose_fault(found, ready=lead.ready)
