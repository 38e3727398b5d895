"""Dispatch: which replica a request goes to, and what becomes of it. No I/O, no torch.

Everything a pool counts is kept here, so that pools of processes and of Ray actors choose, fail
and restart alike. A replica keeps its id, its counts and its sessions' places over restarts.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from phyai.deployment.calls import Call as Call
from phyai.deployment.calls import Replica as Replica
from phyai.errors import (
    EngineUnavailableError,
    PhyaiError,
    RequestError,
    SessionLost,
    SessionReplicaDied,
)

PINS_KEPT = 4096
"""Sessions whose replica is remembered, at most; older ones are found only by chance."""
BACK_OFF_S = (0.5, 30.0)
"""Wait before the first restart, which doubles, and its limit."""


class Dispatch:
    """Chooses replicas and keeps their counts; thread-safe.

    devices: device names of every replica.  max_restarts, restart_window_s: how often a replica may
    die and come back within so many seconds.  clock: monotonic seconds.

    >>> from phyai.deployment.dispatch import Call, Dispatch
    >>> dispatch = Dispatch([("cpu",), ("cpu",)])
    >>> for replica in dispatch.replicas:
    ...     dispatch.ready(replica, carrier=None)
    >>> [dispatch.choose(Call("step", None)).id for _ in range(4)]
    [0, 1, 0, 1]
    """

    def __init__(
        self,
        devices: Sequence[tuple[str, ...]],
        *,
        max_restarts: int = 3,
        restart_window_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replicas = [Replica(i, tuple(names)) for i, names in enumerate(devices)]
        self.max_restarts, self.restart_window_s = max_restarts, restart_window_s
        self.clock = clock
        self.lock = threading.RLock()
        self.closed = self.forked = False
        self._turn = 0  # where ties begin
        self._pins: OrderedDict[str, int] = OrderedDict()
        self._lost: OrderedDict[str, str] = OrderedDict()  # session -> why it is lost

    # ------------------------------------------------------------ choosing

    def choose(self, call: Call, exclude: Collection[int] = ()) -> Replica:
        """Return the replica that takes the call, which is in flight there from now on.

        The healthy one with the fewest in flight; ties rotate. A session's calls go to the replica
        that has it.  exclude: replicas not to take.
        Raises: EngineUnavailableError when no replica is ready; SessionLost when a session's
            replica died; RequestError when two sessions of a request live on different replicas.
        """
        with self.lock:
            if self.closed:
                raise forked_pool() if self.forked else closed_pool()
            replica = self._pinned(call)
            if replica is None:
                replica = self._least(exclude, spread=bool(call.sessions))
            elif replica.state != "ready":
                raise self.unavailable(replica)
            for name in call.sessions:
                self._pin(name, replica)
            self.begin(replica, call)
            return replica

    def begin(self, replica: Replica, call: Call) -> None:
        """Count a call as in flight at a replica."""
        with self.lock:
            call.sent_at = self.clock()
            call.carrier = replica.carrier
            replica.calls[call.id] = call

    def replica_of(self, session_id: str) -> Replica | None:
        """Return the ready replica that has a session; None when none is known to."""
        with self.lock:
            number = self._pins.get(session_id)
            replica = None if number is None else self.replicas[number]
            return replica if replica is not None and replica.state == "ready" else None

    def unpin(self, session_id: str) -> None:
        """Forget where a session is: its next opening may go anywhere."""
        with self.lock:
            self._pins.pop(session_id, None)

    def unavailable(self, replica: Replica | None = None) -> EngineUnavailableError:
        """Return the error of a call that no replica (or not this one) can take now."""
        replicas = self.replicas if replica is None else [replica]
        if all(r.state == "dead" for r in replicas):
            errors = [r.last_error for r in replicas if r.last_error]
            last = f" The last one: {errors[-1]}" if errors else ""
            return EngineUnavailableError(
                f"{_which(replicas)} must be alive to take requests; got none left after "
                f"{self.max_restarts} restarts within {self.restart_window_s:g} s. Create a new "
                f"Engine.{last}",
                reason="worker_died",
            )
        states = ", ".join(f"{r.id}: {r.state}" for r in replicas)
        return EngineUnavailableError(
            f"{_which(replicas)} must be ready to take requests; got {states}. Try again in a "
            "moment.",
            reason="starting",
        )

    # ------------------------------------------------------------ results

    def settle(self, replica: Replica, call_id: int, *, failed: bool = False) -> Call | None:
        """Take a call that was answered out of flight; None when nobody waits for it any more.

        It cannot be stopped from here on; one that was is counted neither as done nor as failed.
        """
        with self.lock:
            call = replica.calls.pop(call_id, None)
            now = replica.heard_at = self.clock()
            if call is not None:
                call.watch.seal()
                if call.counts and call.carrier is replica.carrier:
                    replica.answered_at = now
                self._account(replica, call, now, failed)
            return call

    def stepped(self, replica: Replica, call_id: int) -> Call | None:
        """A request's worker is a step further, so it is not stuck; return the request."""
        with self.lock:
            call = replica.calls.get(call_id)
            now = replica.heard_at = self.clock()
            if call is not None and call.counts and call.carrier is replica.carrier:
                replica.answered_at = now
            return call

    def waits(self, answer: Future[Any], ahead: int = 1) -> bool:
        """Return whether a request has so many before it at its worker, which runs them in turn.

        answer: its future.
        """
        with self.lock:
            for replica in self.replicas:
                calls = [call for call in replica.calls.values() if call.counts]
                for number, call in enumerate(calls):
                    if call.future is answer:
                        return sum(c.carrier is call.carrier for c in calls[:number]) >= ahead
            return False

    def lost_session(self, call: Call) -> None:
        """A replica said it does not have a session: what opens it next may go anywhere."""
        with self.lock:
            for name in call.sessions:
                self._pins.pop(name, None)

    # ------------------------------------------------------------ life of a replica

    def ready(self, replica: Replica, carrier: Any, info: dict[str, Any] | None = None) -> None:
        """A worker of the replica takes calls from now on."""
        with self.lock:
            now = self.clock()
            replica.state, replica.carrier, replica.restart_at = "ready", carrier, None
            replica.ready_at = replica.heard_at = replica.answered_at = now
            if info:
                replica.info = dict(info)

    def heard(self, replica: Replica, info: dict[str, Any]) -> None:
        """A worker gave a sign of life, and told about itself."""
        with self.lock:
            replica.heard_at = self.clock()
            replica.info.update(info)

    def lost_calls(self, replica: Replica, carrier: Any) -> list[Call]:
        """A worker is gone; take its calls, which nobody will answer, out of flight."""
        with self.lock:
            calls = [call for call in replica.calls.values() if call.carrier is carrier]
            now = self.clock()
            for call in calls:
                del replica.calls[call.id]
                self._account(replica, call, now, failed=True)
            return calls

    def died(self, replica: Replica, carrier: Any, why: str) -> list[Call]:
        """The replica's current worker, or the one that was to be, is gone; return its calls.

        The replica's sessions are lost, and it becomes ``restarting`` (at ``restart_at``) or
        ``dead``.
        """
        with self.lock:
            calls = self.lost_calls(replica, carrier)
            replica.last_error, replica.carrier = why, None
            self._lose_sessions(replica, why)
            self._plan_restart(replica, self.clock())
            return calls

    def due(self) -> list[Replica]:
        """Return the replicas whose restart is due, as ``starting`` from now on."""
        with self.lock:
            now, found = self.clock(), []
            for replica in self.replicas:
                if replica.state == "restarting" and (replica.restart_at or 0.0) <= now:
                    replica.state, replica.restart_at = "starting", None
                    replica.restarts += 1
                    found.append(replica)
            return found

    def stuck(self, timeout_s: float | None) -> list[Replica]:
        """Return the replicas whose oldest request saw no progress for so long."""
        if timeout_s is None:
            return []
        with self.lock:
            return [r for r in self.replicas if self._waiting_s(r) > timeout_s]

    def excuse(self, seconds: float) -> None:
        """Nobody heard the replicas for so long: it is no time that they owe."""
        with self.lock:
            for replica in self.replicas:
                if (oldest := self._oldest(replica)) is not None:
                    since = max(oldest.sent_at, replica.answered_at)
                    replica.answered_at = min(self.clock(), since + seconds)

    def close(self) -> list[Call]:
        """Take no calls any more; return those in flight (they may still be answered)."""
        with self.lock:
            self.closed = True
            return [call for replica in self.replicas for call in replica.calls.values()]

    def abandon(self) -> None:
        """Be closed in a fork of the process, where nobody may hold or free our lock any more."""
        self.lock = threading.RLock()
        self.closed = self.forked = True

    def dead(self) -> bool:
        """Return whether no replica will ever take a call again."""
        with self.lock:
            return all(replica.state == "dead" for replica in self.replicas)

    # ------------------------------------------------------------ introspection

    def stats(self) -> list[dict[str, Any]]:
        """Return one mapping per replica; times in seconds and milliseconds as named."""
        with self.lock:
            return [self._stats(replica) for replica in self.replicas]

    def _stats(self, replica: Replica) -> dict[str, Any]:
        now = self.clock()
        latencies = sorted(replica._latencies_ms)
        found: dict[str, Any] = {
            "id": replica.id,
            "devices": list(replica.devices),
            "state": "closed" if self.closed else replica.state,
            "in_flight": replica.in_flight,
            "done": replica.done,
            "failed": replica.failed,
            "restarts": replica.restarts,
            "silent_s": None if replica.heard_at is None else now - replica.heard_at,
            "last_error": replica.last_error,
            "pinned": sum(number == replica.id for number in self._pins.values()),
        }
        for q in (50, 95, 99):
            found[f"p{q}_ms"] = _percentile(latencies, q)
        return {**found, **replica.info}

    # ------------------------------------------------------------ internals

    def _pinned(self, call: Call) -> Replica | None:
        places: dict[int, str] = {}
        for name in call.sessions:
            if (why := self._lost.get(name)) is not None and name not in call.opens:
                raise SessionReplicaDied(
                    f"session {name!r} must be live, and expected seq is 0; it was lost with its "
                    f"replica: {why} Send seq 0 to open it anew."
                )
            if (number := self._pins.get(name)) is not None:
                places.setdefault(number, name)
        if len(places) > 1:
            shown = ", ".join(f"{name!r} on {number}" for number, name in places.items())
            raise RequestError(
                f"sessions of one request must live on one replica; got {shown}. Send their rows "
                "as separate requests."
            )
        return self.replicas[next(iter(places))] if places else None

    def _least(self, exclude: Collection[int], spread: bool) -> Replica:
        count = len(self.replicas)
        ready = [r for r in self.replicas if r.state == "ready" and r.id not in exclude]
        if not ready:
            raise self.unavailable()

        def load(replica: Replica) -> tuple[int, int, int]:
            pinned = sum(n == replica.id for n in self._pins.values()) if spread else 0
            return len(replica.calls), pinned, (replica.id - self._turn) % count

        chosen = min(ready, key=load)
        self._turn = (chosen.id + 1) % count
        return chosen

    def _pin(self, name: str, replica: Replica) -> None:
        self._lost.pop(name, None)
        self._pins[name] = replica.id
        self._pins.move_to_end(name)
        _bound(self._pins)

    def _lose_sessions(self, replica: Replica, why: str) -> None:
        for name in [n for n, number in self._pins.items() if number == replica.id]:
            del self._pins[name]
            self._lost[name] = why
            self._lost.move_to_end(name)
        _bound(self._lost)

    def _plan_restart(self, replica: Replica, now: float) -> None:
        deaths = replica._deaths
        while deaths and deaths[0] <= now - self.restart_window_s:
            deaths.popleft()
        first, most = BACK_OFF_S
        if len(deaths) >= self.max_restarts:
            replica.state, replica.restart_at = "dead", None
            return
        replica.state = "restarting"
        replica.restart_at = now + min(first * 2.0 ** len(deaths), most)
        deaths.append(now)

    def _account(self, replica: Replica, call: Call, now: float, failed: bool) -> None:
        if not call.counts or call.watch.stop_asked:
            return
        replica.failed += failed
        replica.done += not failed
        if not failed:
            replica._latencies_ms.append(1e3 * (now - call.sent_at))

    def _waiting_s(self, replica: Replica) -> float:
        """Return how long the replica's current worker owes an answer."""
        oldest = self._oldest(replica)
        if replica.state != "ready" or oldest is None:
            return 0.0
        return self.clock() - max(oldest.sent_at, replica.answered_at)

    def _oldest(self, replica: Replica) -> Call | None:
        mine = (c for c in replica.calls.values() if c.counts and c.carrier is replica.carrier)
        return next(mine, None)


def closed_pool() -> EngineUnavailableError:
    """Return the error of a request to a pool that was closed."""
    return EngineUnavailableError(
        "engine must be open to take requests; it is closed. Create a new Engine.",
        reason="closed",
    )


def forked_pool() -> EngineUnavailableError:
    """Return the error of a request in a fork of the process that has the pool."""
    return EngineUnavailableError(
        "engine must be used in the process that created it; got a fork of that one, where it is "
        "closed. Create an Engine here, or have the other process ask.",
        reason="closed",
    )


def died_error(replica: Replica, why: str) -> PhyaiError:
    """Return the error of a request whose worker is gone."""
    return EngineUnavailableError(
        f"replica {replica.id} must live to answer (the request may be sent again); got {why}",
        reason="worker_died",
    )


def is_session_loss(error: BaseException) -> bool:
    """Return whether a replica said that it does not have a session."""
    return isinstance(error, SessionLost)


def _which(replicas: Sequence[Replica]) -> str:
    return f"replica {replicas[0].id}" if len(replicas) == 1 else "one of the replicas"


def _bound(names: OrderedDict[str, Any]) -> None:
    while len(names) > PINS_KEPT:
        names.popitem(last=False)


def _percentile(ordered: Sequence[float], q: int) -> float | None:
    """Return a percentile of sorted numbers, linear between neighbours; None of none."""
    if not ordered:
        return None
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
