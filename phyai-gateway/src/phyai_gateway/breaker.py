"""When a backend is left alone: failure classes, ejection with growing pauses, one trial after.

Requests that fail through their own fault say nothing about the backend that refused them, and
"busy" is no failure: counting either would let one bad client empty the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from phyai_gateway.messages import Fault

Clock: TypeAlias = Callable[[], float]
Outcome = Literal["success", "failure", "neutral"]
State = Literal["closed", "open", "half_open"]

FAILURES = frozenset({"unavailable", "deadline_exceeded", "internal", "data_loss"})
NEUTRAL = frozenset({"resource_exhausted", "cancelled"})
SLOWEST_START = 0.1  # share of its turn that a backend gets right after its return


def outcome_of(fault: Fault) -> Outcome:
    """Return what the fault says about the backend that gave it.

    >>> outcome_of(Fault("invalid_argument", "state must have 8 values; got 7."))
    'success'
    """
    if fault.status in FAILURES:
        return "failure"
    return "neutral" if fault.status in NEUTRAL else "success"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """failures: in a row until ejection.  slow_factor: p95 over the others' median that counts as
    slow, after slow_s seconds of it.  slow_start_s: until full share after a return."""

    failures: int = 5
    base_ejection_s: float = 10.0
    max_ejection_s: float = 300.0
    forget_after_s: float = 300.0
    slow_factor: float = 5.0
    slow_s: float = 30.0
    slow_start_s: float = 10.0


class Breaker:
    """The circuit of one backend.

    >>> breaker = Breaker(BreakerSettings(failures=1))
    >>> breaker.record("failure"), breaker.state
    (True, 'closed')
    """

    def __init__(self, settings: BreakerSettings, clock: Clock = time.monotonic) -> None:
        self.settings, self._clock = settings, clock
        self.failures_in_row = 0
        self.ejections = 0
        self._until: float | None = None
        self._returned: float | None = None
        self._slow_since: float | None = None
        self._trial = False

    @property
    def state(self) -> State:
        if self._until is None:
            return "closed"
        return "open" if self._clock() < self._until else "half_open"

    @property
    def wait_s(self) -> float:
        """Seconds until a trial is allowed; 0 when not open."""
        return 0.0 if self._until is None else max(self._until - self._clock(), 0.0)

    @property
    def admits(self) -> bool:
        """Whether a request may be sent now; half open takes one at a time."""
        return self.state == "closed" or (self.state == "half_open" and not self._trial)

    @property
    def share(self) -> float:
        """Part of a full turn, growing from 0.1 to 1 after a return."""
        if self._returned is None or self.settings.slow_start_s <= 0:
            return 1.0
        done = (self._clock() - self._returned) / self.settings.slow_start_s
        return min(max(done, SLOWEST_START), 1.0)

    def begin(self) -> bool:
        """Say that a request is sent now; returns whether it is the trial."""
        if self.state != "half_open" or self._trial:
            return False
        self._trial = True
        return True

    def relent(self) -> None:
        """Allow a trial now: there is nothing better left."""
        if self._until is not None:
            self._until = self._clock()

    def record(self, outcome: Outcome, *, trial: bool = False) -> bool:
        """Count an outcome; returns whether the backend has earned an ejection.

        The caller decides, for the last one that works is never ejected.
        """
        if trial:
            self._trial = False
        if outcome == "neutral" or (self._until is not None and not trial):
            return False  # what was sent before the ejection tells nothing new
        if outcome == "failure":
            self.failures_in_row += 1
            return trial or self.failures_in_row >= self.settings.failures
        self.failures_in_row = 0
        if trial:
            self.close()
        return False

    def watch_slowness(self, p95_s: float, others_median_s: float) -> bool:
        """Compare with the other backends; returns whether it was too slow for too long."""
        if others_median_s <= 0 or p95_s <= self.settings.slow_factor * others_median_s:
            self._slow_since = None
            return False
        if self._slow_since is None:
            self._slow_since = self._clock()
        return self._clock() - self._slow_since >= self.settings.slow_s

    def trip(self) -> float:
        """Eject; returns for how many seconds."""
        now = self._clock()
        if self._returned is not None and now - self._returned > self.settings.forget_after_s:
            self.ejections = 0
        self.ejections += 1
        pause = min(self.settings.base_ejection_s * self.ejections, self.settings.max_ejection_s)
        self._until, self._trial, self._slow_since = now + pause, False, None
        self.failures_in_row = 0
        return pause

    def close(self) -> None:
        """Take the backend back, slowly."""
        if self._until is not None:
            self._returned = self._clock()
        self._until, self._trial, self.failures_in_row = None, False, 0
