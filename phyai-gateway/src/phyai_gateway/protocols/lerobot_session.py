"""Sessions of LeRobot robots: a mailbox of one, and adoption after a reconnect.

The client never repeats its handshake: after a restart or a lost connection it comes from a new
port and just goes on. Its session is then found again by its address.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from math import dist
from pathlib import Path
from typing import Any

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault, InferRequest
from phyai_gateway.protocols.lerobot_objects import Camera, Setup
from phyai_gateway.protocols.lerobot_request import Plan

_LOG = logging.getLogger(__name__)
_REMEMBERED_STEPS = 4096
_SILENT_S = 5.0
"""A live client always has a GetActions call open; one that is silent longer has gone."""


@dataclass(slots=True)
class Pending:
    """An observation that waits for its inference. received: ``time.monotonic()`` seconds."""

    request: InferRequest
    timestamp_s: float
    timestep: int
    must_go: bool
    state: tuple[float, ...]
    nbytes: int
    received: float = field(default_factory=time.monotonic)
    retried: bool = False

    def age_s(self) -> float:
        return time.monotonic() - self.received


@dataclass(slots=True)
class Session:
    """One robot. host: address without port. calls: RPCs under way. gone: its connection broke."""

    host: str
    setup: Setup | None = None
    model: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    pending: Pending | None = None
    failures: int = 0
    seq: int = 0
    calls: int = 0
    gone: bool = False
    seen: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    predicted: OrderedDict[int, None] = field(default_factory=OrderedDict)
    last_state: tuple[float, ...] | None = None
    planned: tuple[Setup, ModelContract, Plan] | None = None

    def reset(self) -> None:
        """Begin an episode: forget the mailbox and what was predicted, keep the setup."""
        self.forget_mailbox()
        self.predicted.clear()
        self.last_state = None
        self.failures = 0
        self.begin()

    def begin(self) -> None:
        """Begin another session of a stateful model."""
        self.id, self.seq = uuid.uuid4().hex, 0

    def forget_mailbox(self) -> None:
        self.pending = None
        self.arrived.clear()

    def offer(self, new: Pending, similarity_atol: float | None) -> str | None:
        """Put an observation into the mailbox; returns why one was dropped, if one was.

        The newest wins. A must-go is never dropped: the observation that replaces it inherits the
        flag.
        """
        if not new.must_go:
            if new.timestep in self.predicted:
                return "duplicate"
            if self._similar(new, similarity_atol):
                return "similar"
        old, self.pending = self.pending, new
        self.arrived.set()
        if old is None:
            return None
        new.must_go = new.must_go or old.must_go
        return "superseded"

    def put_back(self, failed: Pending, max_age_s: float) -> None:
        """Give a must-go whose inference failed one more try, or its flag to a newer one."""
        if not failed.must_go:
            return
        if self.pending is not None:
            self.pending.must_go = True
        elif not failed.retried and failed.age_s() <= max_age_s:
            failed.retried = True
            self.pending = failed
            self.arrived.set()

    async def take(
        self, timeout_s: float, max_age_s: float, dropped: Callable[[str], None]
    ) -> Pending | None:
        """Return the waiting observation, None after the timeout. Stale ones are dropped, unless
        they must go."""
        end = time.monotonic() + timeout_s
        while True:
            found = self.pending
            if found is not None:
                self.forget_mailbox()
                if found.must_go or found.age_s() <= max_age_s:
                    return found
                dropped("stale")
            try:
                async with asyncio.timeout(max(end - time.monotonic(), 0.0)):
                    await self.arrived.wait()
            except TimeoutError:
                return None

    def mark(self, pending: Pending) -> None:
        self.predicted[pending.timestep] = None
        self.last_state = pending.state
        while len(self.predicted) > _REMEMBERED_STEPS:
            self.predicted.popitem(last=False)

    def unmark(self, pending: Pending) -> None:
        """Take a step's prediction back: its chunk never reached the robot."""
        self.predicted.pop(pending.timestep, None)
        self.last_state = None

    def orphaned(self) -> bool:
        silent = time.monotonic() - self.seen > _SILENT_S
        return self.calls == 0 and (self.gone or silent)

    def _similar(self, new: Pending, atol: float | None) -> bool:
        if atol is None or self.last_state is None or len(self.last_state) != len(new.state):
            return False
        return dist(self.last_state, new.state) < atol


class Sessions:
    """All sessions of a listener, by connection.

    file: where setups are kept, as JSON, so that a restarted listener knows its robots.
    """

    def __init__(self, most: int, idle_s: float, file: Path | None = None) -> None:
        self._most, self._idle_s, self._file = most, idle_s, file
        self._by_peer: dict[str, Session] = {}
        self._restored = 0
        for session in _read(file) if file is not None else ():
            self._restored += 1
            self._by_peer[f"restored:{self._restored}"] = session

    def __len__(self) -> int:
        return len(self._by_peer)

    def ready(self, peer: str, host: str) -> Session:
        """Return the connection's session, made or begun afresh.

        Raises: Fault ``resource_exhausted``.
        """
        self._expire()
        session = self._by_peer.get(peer)
        if session is not None:
            session.reset()
            return session
        if len(self._by_peer) >= self._most:
            self._make_room()
        if len(self._by_peer) >= self._most:
            raise Fault(
                "resource_exhausted",
                f"at most {self._most} robots may be connected. Disconnect one.",
            )
        session = self._by_peer[peer] = Session(host)
        return session

    def find(self, peer: str, host: str) -> Session | None:
        """Return the session of a connection, adopted if the robot came back from a new port.

        Without its own, it gets the orphaned one of the same address; with several, the latest,
        but only if all of them have one setup: else it isn't known which robot came back.
        """
        found = self._by_peer.get(peer)
        if found is not None:
            return found
        self._expire()
        orphans = [
            (known, session)
            for known, session in self._by_peer.items()
            if session.host == host and session.setup is not None and session.orphaned()
        ]
        if not orphans or any(s.setup != orphans[0][1].setup for _, s in orphans):
            return None
        known, session = max(orphans, key=lambda item: item[1].seen)
        del self._by_peer[known]
        self._by_peer[peer] = session
        session.reset()
        session.gone = False
        session.seen = time.monotonic()
        return session

    def save(self) -> None:
        """Write the setups; a full disk costs adoption after a restart, nothing else."""
        if self._file is None:
            return
        rows = [
            {"host": s.host, "model": s.model, "setup": asdict(s.setup)}
            for s in self._by_peer.values()
            if s.setup is not None
        ]
        part = self._file.with_name(self._file.name + ".part")
        try:
            part.write_text(json.dumps(rows))
            os.replace(part, self._file)
        except OSError as error:
            _LOG.warning("sessions of robots can't be saved: %s", error.strerror)

    def waiting_bytes(self, besides: Session) -> int:
        """Return the bytes that the mailboxes of all others hold."""
        return sum(
            session.pending.nbytes
            for session in self._by_peer.values()
            if session.pending is not None and session is not besides
        )

    def _make_room(self) -> None:
        """Forget the robot that has been gone longest, first one that was never set up."""
        gone = [(peer, found) for peer, found in self._by_peer.items() if found.orphaned()]
        if gone:
            peer, _ = min(gone, key=lambda item: (item[1].setup is not None, item[1].seen))
            del self._by_peer[peer]

    def _expire(self) -> None:
        now = time.monotonic()
        for peer, session in list(self._by_peer.items()):
            if session.calls == 0 and now - session.seen > self._idle_s:
                del self._by_peer[peer]


def _read(file: Path) -> Iterable[Session]:
    try:
        rows = json.loads(file.read_text())
        return [_session(row) for row in rows]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        _LOG.warning("saved sessions of robots can't be read: %s", type(error).__name__)
        return []


def _session(row: dict[str, Any]) -> Session:
    setup = dict(row["setup"])
    cameras = tuple(
        Camera(**{**camera, "shape": tuple(camera["shape"])}) for camera in setup.pop("cameras")
    )
    made = Setup(**{**setup, "joints": tuple(setup["joints"])}, cameras=cameras)
    return Session(str(row["host"]), made, str(row["model"]), gone=True)
