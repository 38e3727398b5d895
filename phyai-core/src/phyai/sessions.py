"""Sessions: what is kept of a robot between its requests.

An adapter declares buffers with ``session=True``; the store keeps one row of each per session. A
request names its session and its place in it (``Observation`` options ``session_id`` and ``seq``):

- ``seq`` 0 opens the session, also one that was lost;
- the next ``seq`` runs with the session's row in the cache, and keeps what was written there;
- the last ``seq`` again gets the stored result, and nothing runs;
- anything else is a RequestError.

Row, result and seq change together, after the result was validated, for all rows of a request or
for none: after a failed request the same seq can be sent again. A weight update keeps them all.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING, Any

from phyai.errors import (
    EngineUnavailableError,
    PluginContractError,
    RequestError,
    SessionClosed,
    SessionEvicted,
    SessionExpired,
    SessionLost,
    SessionUnknown,
)
from phyai.session_options import Ids, Seqs, check_id, of_batch
from phyai.session_options import declares_sessions as declares_sessions
from phyai.session_options import session_rows as session_rows
from phyai.session_results import Frozen, frozen, split
from phyai.session_turn import Turn as Turn
from phyai.types import BufferSpec, CacheSpec, Key, Prepared

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from phyai.cache import Allocator, Cache

LOST_KEPT = 1024
"""Ids of lost sessions whose reason is remembered; older ones are unknown."""
_WAYS = {SessionEvicted: "evicted", SessionExpired: "expired", SessionClosed: "closed"}

LOST_KINDS = {kind.__name__: kind for kind in _WAYS}


@dataclass(slots=True)
class _Session:
    """slot: the kept row of every session buffer.  seq: the last one; -1 right after a reset."""

    slot: dict[str, Tensor]
    used: float
    seq: int = -1
    result: Frozen | None = None


class SessionStore:
    """The sessions of one replica: rows on the device, results in host memory. Thread-safe.

    Memory is constant: at most ``capacity`` rows, made when they are first needed and used again
    after that, until ``close``. Opening one more session evicts the least recently used one that
    no request is using.

    plugin, declared: whose sessions these are, and whether its manifest offers any (None: it does
    not say).  ttl_s: seconds without a request after which a session expires; None = never.
    clock: monotonic seconds.

    >>> from phyai.memory import Arena
    >>> from phyai.sessions import SessionStore
    >>> SessionStore(Arena("cpu"), capacity=2).stats()["live"]
    0
    """

    def __init__(
        self,
        memory: Allocator,
        *,
        capacity: int = 8,
        ttl_s: float | None = None,
        plugin: str = "",
        declared: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity, self.ttl_s, self.clock = capacity, ttl_s, clock
        self._memory, self._plugin, self._declared = memory, plugin, declared
        self._spec: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None
        self._live: OrderedDict[str, _Session] = OrderedDict()  # least recently used first
        self._free: list[dict[str, Tensor]] = []
        self._slots = 0
        self._held: dict[str, Turn] = {}
        self._lost: OrderedDict[str, type[SessionLost]] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._changed = Condition()
        self._closed = False

    # ------------------------------------------------------------ for users

    def reset(self, session_id: str) -> None:
        """Forget a session's row and result; its next request is seq 0. Unknown ids are fine.

        A request of the session that is running still gets its result, and leaves nothing.
        """
        with self._changed:
            if (session := self._live.get(check_id(session_id))) is not None:
                session.seq, session.result = -1, None
            if (turn := self._held.get(session_id)) is not None:
                turn.void.add(session_id)

    def end(self, session_id: str) -> None:
        """Close a session, so that its place is free; unknown and closed ids are fine.

        A request of it that is running still gets its result, and leaves nothing; see Engine.
        """
        with self._changed:
            turn = self._held.get(check_id(session_id))
            if turn is not None:
                turn.void.add(session_id)
            if session_id in self._live:
                self._lose(session_id, SessionClosed)
            elif turn is not None:  # about to be opened
                self._remember(session_id, SessionClosed)

    def stats(self) -> dict[str, int]:
        """Return counts since the start: opened, evicted, expired, closed, retries.

        live, capacity: sessions now, and at most.  bytes: of all rows that were made.
        """
        with self._changed:
            self._expire()
            tensors = [*self._free, *(s.slot for s in self._live.values())]
            names = ("opened", "evicted", "expired", "closed", "retries")
            return {
                "live": len(self._live),
                "capacity": self.capacity,
                **{name: self._counts[name] for name in names},
                "bytes": sum(t.nbytes for slot in tensors for t in slot.values()),
            }

    def close(self) -> None:
        """Forget everything and give the memory back; whoever waits for a session is refused."""
        with self._changed:
            self._closed = True
            self._live.clear()
            self._free.clear()
            self._memory.release("sessions")
            self._changed.notify_all()

    # ------------------------------------------------------------ one request

    def turn(self, request: Any) -> Turn:
        """Return the turn of a request: a context that holds its sessions while it runs."""
        return Turn(self, request)

    def declare(self, spec: Mapping[str, BufferSpec]) -> None:
        """Take over the session buffers of a key's CacheSpec.

        Raises: PluginContractError when they are not those of the keys before it, when a buffer
            has no rows, and when the manifest says that there are no sessions.
        """
        found = {name: (tuple(b.shape), b.dtype) for name, b in spec.items() if b.session}
        for name in found:
            if not spec[name].rows:
                raise PluginContractError(
                    f"session buffer {name!r} of plugin {self._plugin!r} must have rows; got "
                    "rows=False. A session keeps one row."
                )
        if found and self._declared is False:
            raise PluginContractError(
                f"plugin {self._plugin!r} has session buffers ({', '.join(sorted(found))}), so its "
                "manifest must offer sessions; it does not. Set capabilities['sessions'] to True "
                "and list 'session_id' and 'seq' in capabilities['options']."
            )
        if self._spec is None:
            self._spec = found
        elif found != self._spec:
            names = sorted({*found, *self._spec})
            name = next(n for n in names if found.get(n) != self._spec.get(n))
            raise PluginContractError(
                f"session buffer {name!r} of plugin {self._plugin!r} must be the same for every "
                f"key, so that a session may change its key; got {_shown(found.get(name))} after "
                f"{_shown(self._spec.get(name))}. Give it the largest shape."
            )

    def load(self, cache: Cache, batch: Prepared) -> None:
        """Copy each row's session into the cache; zeros for a new session and for no session.

        Padding rows repeat row 0. Raises: CapacityError when the memory budget has no room for
        another session.
        """
        buffers = cache.session_buffers
        ids, seqs = of_batch(batch)
        if not buffers:
            if any(name is not None for name in ids):
                raise self._refusal()
            return
        with self._changed:
            new = [n for n in ids if n is not None and n not in self._live]
            self._reserve(len(new))
            for row, (name, seq) in enumerate(zip(ids, seqs, strict=True)):
                slot = self._slot_of(name, seq)
                for buffer, tensor in buffers.items():
                    if slot is None:
                        tensor[row].zero_()
                    else:
                        tensor[row].copy_(slot[buffer])
        if batch.rows < cache.capacity:
            for tensor in buffers.values():
                tensor[batch.rows :] = tensor[:1]

    def commit(self, cache: Cache, batch: Prepared, results: Any, first: int = 0) -> None:
        """Keep row, result and seq of every session of a request, of all of them or of none.

        first: the request's first row in the cache.
        """
        ids, seqs = of_batch(batch)
        if all(name is None for name in ids):
            return
        rows = split(results, batch.rows)
        named = [row for row, name in enumerate(ids) if name is not None]
        results = {row: frozen(rows[row]) for row in named}  # what may still fail comes first
        with self._changed:
            kept = []
            for row in named:
                name, seq = ids[row], seqs[row]
                if name is None or seq is None or name in self._held[name].void:
                    continue
                session = self._live.get(name) or self._open(name)
                for buffer, tensor in session.slot.items():
                    tensor.copy_(cache[buffer][first + row])
                kept.append((name, session, seq, results[row]))
            for name, session, seq, result in kept:
                session.seq, session.result = seq, result
                self._touch(name)

    # ------------------------------------------------------------ used by Turn

    def learn(self, key: Key, spec: CacheSpec) -> None:
        """Look at a key's CacheSpec when none was seen yet: it tells whether there are sessions."""
        if self._spec is None:
            self.declare(spec(key))

    def check_offered(self) -> None:
        """Raise RequestError when the plugin keeps no sessions, as far as that is known."""
        if self._declared is False or self._spec == {}:
            raise self._refusal()

    def begin(self, turn: Turn, ids: Ids, seqs: Seqs) -> dict[int, Frozen]:
        """Hold the sessions of a request; return the stored results of rows sent again.

        Waits while another request uses one of them.
        """
        names = [name for name in ids if name is not None]
        if len(names) > self.capacity:
            raise RequestError(
                f"a request must name at most {self.capacity} sessions; got {len(names)}. Raise "
                "runtime.max_sessions or send fewer rows."
            )
        with self._changed:
            if not (self._closed or self._may_hold(names)) and turn.on_wait is not None:
                turn.on_wait(lambda: self._may_hold(names))
            self._changed.wait_for(lambda: self._closed or self._may_hold(names))
            if self._closed:
                raise EngineUnavailableError(
                    "engine must be open to take requests; it is closed. Create a new Engine.",
                    reason="closed",
                )
            self._expire()
            found = {
                row: self._stored(name, seq)
                for row, (name, seq) in enumerate(zip(ids, seqs, strict=True))
                if name is not None and seq is not None
            }  # nothing has changed yet: it may raise
            answers = {row: result for row, result in found.items() if result is not None}
            self._counts["retries"] += len(answers)
            for row, name in enumerate(ids):
                if name is not None:
                    self._touch(name)
                    if row not in answers:
                        self._held[name] = turn
            return answers

    def release(self, turn: Turn) -> None:
        """Let go of what a request held."""
        with self._changed:
            for name in [name for name, holder in self._held.items() if holder is turn]:
                del self._held[name]
                self._touch(name)
            self._changed.notify_all()

    # ------------------------------------------------------------ internals

    def _may_hold(self, names: Sequence[str]) -> bool:
        """Every held session has its place, or will get one: never more than there are."""
        free = not any(name in self._held for name in names)
        return free and len(self._held) + len(names) <= self.capacity

    def _stored(self, name: str, seq: int) -> Frozen | None:
        """Return the result of a seq that was sent before; None for one that is to run."""
        session = self._live.get(name)
        if session is None:
            if seq == 0:
                return None
            raise self._lost_error(name, seq)
        if seq == session.seq:
            return session.result
        if seq == session.seq + 1:
            return None
        again = f" or {session.seq} (the last one again)" if session.seq >= 0 else ""
        remedy = "Call reset_session() to start again." if seq == 0 else "Send that one."
        raise RequestError(
            f"seq of session {name!r} must be {session.seq + 1} (the next one){again}; got {seq}. "
            f"{remedy}"
        )

    def _lost_error(self, name: str, seq: int) -> SessionLost:
        kind = self._lost.get(name, SessionUnknown)
        why = {
            SessionEvicted: f"was evicted: others of {self.capacity} were used after it "
            "(runtime.max_sessions)",
            SessionExpired: f"expired: no request within {self.ttl_s} s (runtime.session_ttl_s)",
            SessionClosed: "was closed",
        }.get(kind, "is not known here")
        return kind(
            f"session {name!r} must be live for seq {seq}, and expected seq is 0; it {why}. Send "
            "seq 0 to open it anew."
        )

    def _slot_of(self, name: str | None, seq: int | None) -> dict[str, Tensor] | None:
        """Return the kept row of a request's session; None where there is none yet."""
        if name is None or seq is None:
            return None
        if name not in self._held:
            raise RequestError(
                f"session {name!r} must be held by its request; it is not. Send the request "
                "through Engine.step or submit."
            )
        if seq == 0:
            return None
        session = self._live.get(name)
        if session is None:  # closed since the request began
            raise self._lost_error(name, seq)
        if session.seq == seq:  # what failed after it was kept must not run on top of it
            raise RequestError(
                f"seq {seq} of session {name!r} must run once; it has run, and its result was "
                "lost. Send it again to get it."
            )
        return session.slot

    def _reserve(self, count: int) -> None:
        """Make rows for sessions that will be opened, as long as there may be more."""
        while len(self._free) < count and self._slots < self.capacity:
            names = {name: f"sessions/{self._slots}/{name}" for name in self._spec or ()}
            fresh = self._memory.allocate_all(
                {names[name]: wanted for name, wanted in (self._spec or {}).items()}
            )
            self._slots += 1
            self._free.append({name: fresh[full] for name, full in names.items()})

    def _open(self, name: str) -> _Session:
        if not self._free:
            self._lose(next(n for n in self._live if n not in self._held), SessionEvicted)
        self._lost.pop(name, None)
        self._counts["opened"] += 1
        session = self._live[name] = _Session(self._free.pop(), self.clock())
        return session

    def _lose(self, name: str, kind: type[SessionLost]) -> None:
        self._free.append(self._live.pop(name).slot)
        self._counts[_WAYS[kind]] += 1
        self._remember(name, kind)

    def _remember(self, name: str, kind: type[SessionLost]) -> None:
        self._lost[name] = kind
        self._lost.move_to_end(name)
        while len(self._lost) > LOST_KEPT:
            self._lost.popitem(last=False)

    def _expire(self) -> None:
        if self.ttl_s is None:
            return
        limit = self.clock() - self.ttl_s
        for name in [n for n, s in self._live.items() if s.used < limit and n not in self._held]:
            self._lose(name, SessionExpired)

    def _touch(self, name: str) -> None:
        if (session := self._live.get(name)) is not None:
            session.used = self.clock()
            self._live.move_to_end(name)

    def _refusal(self) -> Exception:
        if self._declared:
            return PluginContractError(
                f"plugin {self._plugin!r} offers sessions (capabilities['sessions'] is True), so "
                "its cache must have a session buffer; it has none. Declare one with "
                "BufferSpec(..., session=True)."
            )
        return RequestError(
            f"option 'session_id' needs a plugin that keeps sessions; capabilities['sessions'] of "
            f"{self._plugin!r} is {self._declared or False}. Send the request without it and "
            "without 'seq'."
        )


def _shown(wanted: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "none" if wanted is None else f"{list(wanted[0])} {wanted[1]}"
