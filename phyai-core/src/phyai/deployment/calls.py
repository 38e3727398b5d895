"""A call of a replica, and a replica as the dispatching side knows it."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Literal

from phyai.deployment.answers import Answer
from phyai.request_watch import Watch

State = Literal["starting", "ready", "restarting", "dead"]

log = logging.getLogger("phyai")

_LATENCIES = 1024

_ids = itertools.count(1)


def next_id() -> int:
    """Return a number no other call of this process has."""
    return next(_ids)


@dataclass(eq=False)
class Call:
    """One message to a replica, and the future that waits for its answer.

    kind: ``step``, ``reset_session``, ``close_session``, or what a pool adds.
    payload: of a step the request.  sessions: ids its rows name; opens: those with seq 0.
    carrier: the worker it was sent to (a replica's worker changes); None before that.
    counts: whether it is a request, for the counters and the load.
    watch: hears of the steps of a request, and may stop it.
    """

    kind: str
    payload: Any
    sessions: tuple[str, ...] = ()
    opens: frozenset[str] = frozenset()
    retries_left: int = 0
    packed: Any = None  # as it was sent, while it may be sent again
    keep: object = None  # an engine whose owner only kept the future
    watch: Watch = field(default_factory=Watch)
    future: Answer = field(init=False)
    id: int = field(default_factory=next_id)
    sent_at: float = 0.0
    carrier: Any = None

    def __post_init__(self) -> None:
        self.future = Answer(self.watch)
        self.future.set_running_or_notify_cancel()  # sent at once
        if self.watch.listens:  # its answer stays behind its steps
            self.future.called_back = True

    @property
    def counts(self) -> bool:
        return self.kind == "step"

    def succeed(self, result: Any) -> None:
        self._settle(self.future.set_result, result)

    def fail(self, error: BaseException) -> None:
        self._settle(self.future.set_exception, error)

    def _settle(self, act: Callable[[Any], None], outcome: Any) -> None:
        self.future.let_go()
        if self.future.done():
            return
        try:
            act(outcome)
        except InvalidStateError:  # another thread was faster: an answer, and close()
            pass
        except BaseException as error:  # sys.exit in a callback; Future logs an Exception itself
            if isinstance(error, KeyboardInterrupt):  # of the thread that closes
                raise
            log.exception("the callback of a Future must not end its thread; it goes on")


@dataclass(eq=False)
class Replica:
    """One complete copy of the model, and what is known of it.

    carrier: the worker that takes its calls now.  calls: without answer yet, oldest first, also
    those an older worker still has.  info: what the worker said of itself.
    """

    id: int
    devices: tuple[str, ...]
    state: State = "starting"
    carrier: Any = None
    calls: OrderedDict[int, Call] = field(default_factory=OrderedDict)
    done: int = 0
    failed: int = 0
    restarts: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    last_error: str | None = None
    ready_at: float | None = None
    heard_at: float | None = None
    answered_at: float = 0.0
    restart_at: float | None = None
    _deaths: deque[float] = field(default_factory=deque)
    _latencies_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))

    @property
    def in_flight(self) -> int:
        return sum(call.counts for call in self.calls.values())
