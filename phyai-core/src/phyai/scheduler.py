"""Picks the batch bucket a request runs in, which waiting requests share a batch, and when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from phyai.joining import may_join
from phyai.types import Key, Prepared

KEYS_KEPT = 64  # keys whose run times are remembered
EWMA_WEIGHT = 0.2
SLOWER, MARGIN_S = 1.25, 0.002  # a batch may take so much longer than lately, and its results too


class Waiting(Protocol):
    """A prepared request that waits.  Times: seconds of one clock.

    ready_at: when it could have run.  deadline: when its result must be there; None = any time.

    >>> from types import SimpleNamespace
    >>> from phyai.types import Key
    >>> one = SimpleNamespace(prepared=Prepared({}, 1, Key()), ready_at=2.0, deadline=None)
    >>> Scheduler(max_rows=8).plan([one], 2.1, 0.5, RunTimes(), {})
    Plan(count=1, at=2.5)
    """

    @property
    def prepared(self) -> Prepared: ...
    @property
    def ready_at(self) -> float: ...
    @property
    def deadline(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The next batch.  count: how many of the waiting requests.  at: when to start it.

    >>> Plan(count=3, at=12.5).count
    3
    """

    count: int
    at: float


@dataclass(frozen=True, slots=True)
class Scheduler:
    """Bucket choice and joining of one replica.

    static_shapes: graphs need fixed shapes, so rows are padded to a power of two (or to
    max_rows); without graphs a batch runs at its own size and no padding row is computed.

    >>> Scheduler(max_rows=6, static_shapes=True).batch_bucket(3)
    4
    """

    max_rows: int
    static_shapes: bool = False

    def batch_bucket(self, rows: int) -> int:
        if not self.static_shapes:
            return rows
        bucket = 1
        while bucket < rows:
            bucket *= 2
        return min(bucket, self.max_rows)

    def plan(
        self,
        waiting: Sequence[Waiting],
        now: float,
        wait_s: float,
        times: RunTimes,
        limits: Mapping[tuple[Key, bool], int],
    ) -> Plan:
        """Return which of the waiting requests (at least one) make the next batch, and when.

        Whole requests, in order, up to the first one that does not fit: of another key, too many
        rows, or one that would make another's deadline be missed. Nothing can join after such a
        one, nor to a full batch: both start now. Otherwise the batch starts ``wait_s`` after its
        first request was ready, or when the earliest deadline asks for it.
        limits: fewer rows than max_rows, of (key, whether a model request).
        """
        first = waiting[0].prepared
        most = min(self.max_rows, limits.get((first.key, first.meta is None), self.max_rows))
        rows, due, count = first.rows, waiting[0].deadline, 1
        closed = not first.joinable
        for other in waiting[1:]:
            more = rows + other.prepared.rows
            closed = closed or more > most or not may_join(first, other.prepared)
            if closed or self._makes_late(times, first.key, rows, more, due, now):
                closed = True
                break
            rows, count = more, count + 1
            due = min((d for d in (due, other.deadline) if d is not None), default=None)
        if closed or rows >= most:
            return Plan(count, now)
        at = waiting[0].ready_at + wait_s
        if due is not None:
            takes = self._takes(times, first.key, rows)
            at = now if takes is None else min(at, due - takes)
        return Plan(count, max(at, now))

    def _takes(self, times: RunTimes, key: Key, rows: int) -> float | None:
        expected = times.expected(key, self.batch_bucket(rows))
        return None if expected is None else SLOWER * expected + MARGIN_S

    def _makes_late(
        self, times: RunTimes, key: Key, rows: int, more: int, due: float | None, now: float
    ) -> bool:
        """Whether a batch that is in time with ``rows`` is not with ``more``."""
        if due is None:
            return False
        lone, shared = self._takes(times, key, rows), self._takes(times, key, more)
        return lone is not None and shared is not None and now + lone <= due < now + shared


class RunTimes:
    """How long batches took lately: a moving average per key and rows.

    >>> from phyai.types import Key
    >>> times = RunTimes()
    >>> times.add(Key(), 2, 0.1)
    >>> times.expected(Key(), 2), times.expected(Key(), 4), times.expected(Key(num_steps=9), 2)
    (0.1, 0.2, None)
    """

    def __init__(self) -> None:
        self._of: OrderedDict[Key, dict[int, float]] = OrderedDict()
        self._first: set[tuple[Key, int]] = set()

    def add(self, key: Key, rows: int, seconds: float) -> None:
        known = self._of.setdefault(key, {})
        self._of.move_to_end(key)
        if rows in known and (key, rows) not in self._first:
            known[rows] += EWMA_WEIGHT * (seconds - known[rows])
        elif rows in known:  # the first one built graphs and tables: it tells nothing
            known[rows] = seconds
            self._first.discard((key, rows))
        else:
            known[rows] = seconds
            self._first.add((key, rows))
        if len(self._of) > KEYS_KEPT:
            old, _ = self._of.popitem(last=False)
            self._first = {place for place in self._first if place[0] != old}

    def expected(self, key: Key, rows: int) -> float | None:
        """Return the seconds a batch will take; None when none of its key has run.

        A size that has not run yet is taken to cost as much per row as the costliest known one.
        """
        known = self._of.get(key)
        if not known:
            return None
        if rows in known:
            return known[rows]
        return max(seconds * max(1.0, rows / size) for size, seconds in known.items())
