"""ReplicaPool: several replicas behind submit(), whatever their workers are.

A pool of processes (``local_pool``) or of Ray actors (``ray_pool``) starts, reaches and ends its
workers; all that they have in common is here: futures, failures, restarts, patience, counters.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phyai.deployment.answers import Answer
from phyai.deployment.config import DeploymentConfig
from phyai.deployment.dispatch import (
    Call,
    Dispatch,
    Replica,
    closed_pool,
    died_error,
    is_session_loss,
)
from phyai.deployment.requests import sessions_of
from phyai.errors import EngineUnavailableError, WeightUpdateError
from phyai.request_watch import OnProgress, Watch
from phyai.services import Progress, no_progress
from phyai.session_options import check_id

if TYPE_CHECKING:
    from torch import Tensor

    from phyai.adapter import AdapterArgs
    from phyai.engine_config import EngineConfig

log = logging.getLogger("phyai")

TICK_S = 0.1
"""How often a pool looks at its clocks, at least."""


@dataclass(frozen=True)
class PoolSpec:
    """What every replica of a pool runs, and where.

    version: of the plugin's distribution, which every worker must have, too.
    devices: names, one tuple per replica.
    """

    plugin: str
    plugin_args: AdapterArgs
    config: EngineConfig
    version: str | None
    deployment: DeploymentConfig
    devices: tuple[tuple[str, ...], ...]


@dataclass
class _Starting:
    """A worker that is not ready yet."""

    since: float
    stage: str = "starting its process"


@dataclass
class _Start:
    """What the caller of ``start`` is told, in its own thread."""

    events: queue.SimpleQueue[tuple[int, int, str] | None] = field(
        default_factory=queue.SimpleQueue
    )
    error: BaseException | None = None
    done: bool = False


class ReplicaPool(ABC):
    """Replicas of one model; thread-safe.

    A subclass starts workers in ``_launch``, sends in ``_send`` and ends them in ``_kill`` and
    ``_end``; it calls ``tick`` every ``TICK_S`` or so, and ``_ready``, ``_progressed``,
    ``_settled``, ``_heard`` and ``_died`` when something happened to a worker. A ``carrier`` is
    its object for one worker; a replica gets a new one at every restart and weight update.
    """

    def __init__(self, spec: PoolSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec, self.clock = spec, clock
        self.limits = spec.deployment.supervision
        self.dispatch = Dispatch(
            spec.devices,
            max_restarts=self.limits.max_restarts,
            restart_window_s=self.limits.restart_window_s,
            clock=clock,
        )
        self.described: dict[str, Any] = {}
        self._stoppable = False  # whether workers run steps one by one, and stop between them
        self.version = 0
        self._waiting_to_start: dict[int, _Starting] = {}
        self._start: _Start | None = None
        self._updating = threading.Lock()
        self._closing = threading.Lock()
        self._ended = False

    # ------------------------------------------------------------ for Engine

    def start(self, progress: Progress = no_progress) -> None:
        """Start every replica and wait until all are ready.

        Raises: what a worker failed with, after every process has ended; the same for a
            KeyboardInterrupt meanwhile.
        """
        if self.dispatch.closed:
            raise closed_pool()
        with self._closing:
            if self._start is not None:  # already started
                return
            start = self._start = _Start()
        try:
            self._open()
            with self.dispatch.lock:
                for replica in self.dispatch.replicas:
                    self._begin(replica)
            while (event := start.events.get()) is not None:
                progress(*event)
            if start.error is not None:
                raise start.error
            start.done = True
        except BaseException:
            self.close(timeout_s=0.0)
            raise

    def step(self, request: Any) -> Any:
        """Send a request and wait for its result.

        Raises: what it fails with; EngineUnavailableError (wrong_mode) on the thread that results
            arrive on, in the callback of a Future, which would wait for itself.
        """
        if self.on_own_thread():
            raise EngineUnavailableError(
                "step() must not be called in the callback of a Future, which would wait for "
                "itself; got one. Use submit() there.",
                reason="wrong_mode",
            )
        future = self.submit(request)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # interrupted
            raise

    def submit(
        self, request: Any, keep: object = None, on_progress: OnProgress | None = None
    ) -> Future[Any]:
        """Send a request to a replica; never raises, the Future holds the error.

        keep: lives until then.  on_progress: see ``Engine.submit``; called on the thread that
        results arrive on.  ``cancel()`` of the Future is decided here: what a worker still makes
        of the request is dropped.
        """
        try:
            sessions, opens = sessions_of(request)
        except Exception as error:
            return failed_future(error)
        retries = int(self.spec.deployment.retry_on_worker_death and not sessions)
        watch = Watch(on_progress, stoppable=self._stoppable)
        call = Call("step", request, sessions, opens, retries, keep=keep, watch=watch)
        call.future.waits = self._waits
        self._try_to_send(call)
        return call.future

    def session_call(self, kind: str, session_id: str) -> None:
        """Have a session's replica do ``reset_session`` or ``close_session``, and wait for it.

        A session that no replica has needs nothing. Raises: RequestError for a bad id;
        EngineUnavailableError when closed.
        """
        name = check_id(session_id)
        if self.dispatch.closed:
            raise closed_pool()
        replica = self.dispatch.replica_of(name)
        if replica is None:
            return
        call = Call(kind, name)
        self.dispatch.begin(replica, call)
        self._send_or_fail(replica, call)
        if not self.on_own_thread():  # a future's callback: waiting would wait for itself
            try:
                call.future.result()
            except EngineUnavailableError:  # it died: so did the session
                return

    def update_weights(
        self, items: Iterable[tuple[str, Tensor]], version: int | None = None
    ) -> int:
        """Give every replica new weights, or none: return the version, see ``Engine``."""
        with self._updating:
            if self.dispatch.closed:
                raise closed_pool()
            self._update(items)
            self.version = self.version + 1 if version is None else version
            return self.version

    def describe(self) -> dict[str, Any]:
        """Return what a worker said of the model; see ``Engine.describe``."""
        return dict(self.described)

    def stats(self) -> list[dict[str, Any]]:
        """Return one mapping per replica; see ``Engine.stats``."""
        return self.dispatch.stats()

    def close(self, timeout_s: float | None = None) -> None:
        """Take no requests any more, wait for those that run, end every process. Idempotent.

        timeout_s: how long to wait for them; None = ``shutdown_timeout_s``. What is left then
        fails with reason ``closed``.
        """
        with self._closing:
            if self._ended:
                return
            patience = self.limits.shutdown_timeout_s if timeout_s is None else timeout_s
            calls = self.dispatch.close()
            if calls and not self.on_own_thread():
                wait_for([call.future for call in calls], timeout=patience)
            for call in calls:
                call.fail(closed_pool())
            self._end()
            self._ended = True

    # ------------------------------------------------------------ for subclasses

    @abstractmethod
    def _open(self) -> None:
        """Start what supervises the workers, and calls ``tick``."""

    @abstractmethod
    def _launch(self, replica: Replica) -> None:
        """Begin to start a worker for a replica; must not wait. Later ``_ready`` or ``_died``."""

    @abstractmethod
    def _send(self, replica: Replica, call: Call) -> None:
        """Send a call to ``call.carrier``; must not wait.

        Raises: what is wrong with the payload (RequestError); nothing for a dead worker, whose
            ``_died`` fails the call.
        """

    @abstractmethod
    def _kill(self, replica: Replica, why: str) -> None:
        """End the replica's worker at once, also one that is starting; later ``_died(why)``."""

    @abstractmethod
    def _end(self) -> None:
        """End every process; return when all are gone. Called once."""

    def _update(self, items: Iterable[tuple[str, Tensor]]) -> None:
        raise WeightUpdateError(
            "weights of a pool must be updated by a deployment that can; this one cannot. Create "
            "a new Engine with the new checkpoint."
        )

    def on_own_thread(self) -> bool:
        """Return whether this is the thread that results arrive on."""
        return False

    # ------------------------------------------------------------ what happened

    def tick(self) -> float:
        """Look at the clocks: restarts that are due, workers that are stuck or late.

        Returns: seconds until it should be called again.
        """
        if self.dispatch.closed:
            return TICK_S
        for replica in self.dispatch.due():
            log.warning("replica %d: restart %d", replica.id, replica.restarts)
            self._begin(replica)
        timeout = self.limits.request_timeout_s
        for replica in self.dispatch.stuck(timeout):
            self._kill(
                replica,
                f"a worker that was stuck: no answer within request_timeout_s = {timeout:g} s, so "
                "it was killed.",
            )
        limit = self.limits.startup_timeout_s
        with self.dispatch.lock:
            late = [
                (self.dispatch.replicas[number], starting)
                for number, starting in self._waiting_to_start.items()
                if self.clock() - starting.since > limit
            ]
        for replica, starting in late:
            self._kill(
                replica,
                f"a worker that was not ready within startup_timeout_s = {limit:g} s (stage: "
                f"{starting.stage}), so it was killed.",
            )
        return TICK_S

    def _begin(self, replica: Replica) -> None:
        with self.dispatch.lock:
            self._waiting_to_start[replica.id] = _Starting(self.clock())
        self._launch(replica)

    def _ready(
        self, replica: Replica, carrier: Any, info: dict[str, Any], described: Mapping[str, Any]
    ) -> None:
        """A worker takes requests from now on."""
        with self.dispatch.lock:
            self._waiting_to_start.pop(replica.id, None)
            if described:
                self.described = dict(described)
                self._stoppable = bool(self.described.pop("stoppable", False))
            self.dispatch.ready(replica, carrier, info)
            everybody = all(r.state == "ready" for r in self.dispatch.replicas)
        if everybody and self._start is not None and not self._start.done:
            self._start.events.put(None)

    def _progressed(self, replica: Replica | None, done: int, total: int, name: str) -> None:
        """A worker that starts tells how far it is; None = what all replicas share."""
        with self.dispatch.lock:
            for number, starting in self._waiting_to_start.items():
                if replica is None or replica.id == number:
                    starting.stage = f"{name} ({done} of {total})"
        if self._start is not None and not self._start.done:
            self._start.events.put((done, total, name))

    def _heard(self, replica: Replica, info: dict[str, Any]) -> None:
        """A worker gave a sign of life."""
        self.dispatch.heard(replica, info)

    def _stepped(self, replica: Replica, call_id: int, done: int, total: int) -> None:
        """A worker is so far with a request."""
        call = self.dispatch.stepped(replica, call_id)
        if call is not None:
            call.watch.tell(done, total)

    def _settled(
        self,
        replica: Replica,
        call_id: int,
        *,
        result: Callable[[], Any] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """A worker answered.  result: gives it, in memory of this process."""
        call = self.dispatch.settle(replica, call_id, failed=error is not None)
        if call is None:
            return
        if error is not None:
            if is_session_loss(error):
                self.dispatch.lost_session(call)
            call.fail(error)
            return
        try:
            call.succeed(None if result is None else result())
        except Exception as failure:
            call.fail(failure)

    def _died(
        self, replica: Replica, carrier: Any, why: str, error: BaseException | None = None
    ) -> None:
        """A worker is gone, or failed to start with ``error``.

        why: the end of a sentence, ``a worker that ...``.
        """
        starting = self._waiting_to_start.pop(replica.id, None)
        if self._start is not None and not self._start.done and starting is not None:
            self._start.error = error or EngineUnavailableError(
                f"replica {replica.id} must become ready; got {why}", reason="worker_died"
            )
            self._start.events.put(None)
            return
        shown = why if error is None else f"{type(error).__name__}: {error}"
        if not self.dispatch.closed:
            log.warning("replica %d lost its worker: %s", replica.id, shown)
        self._fail_or_retry(replica, self.dispatch.died(replica, carrier, shown), why)

    def _lost_calls(self, replica: Replica, carrier: Any, why: str) -> None:
        """A worker that had been replaced is gone before it finished."""
        self._fail_or_retry(replica, self.dispatch.lost_calls(replica, carrier), why)

    def _fail_or_retry(self, replica: Replica, calls: list[Call], why: str) -> None:
        for call in calls:
            if call.retries_left and not self.dispatch.closed and not call.watch.stop_asked:
                call.retries_left -= 1
                self._try_to_send(call, exclude=(replica.id,))
            else:
                call.fail(died_error(replica, why))

    # ------------------------------------------------------------ internals

    def _try_to_send(self, call: Call, exclude: tuple[int, ...] = ()) -> None:
        try:
            replica = self.dispatch.choose(call, exclude)
        except Exception as error:
            call.fail(error)
            return
        self._send_or_fail(replica, call)

    def _waits(self, answer: Answer) -> bool:
        joins = self.spec.config.runtime.batch_wait_ms > 0
        return self.dispatch.waits(answer, int(self.described.get("max_rows", 1)) if joins else 1)

    def _send_or_fail(self, replica: Replica, call: Call) -> None:
        try:
            if call.watch.stop_asked:  # while it was kept back, or another worker had it
                raise CancelledError
            self._send(replica, call)
        except Exception as error:
            if self.dispatch.settle(replica, call.id, failed=True) is not None:
                call.fail(error)


def failed_future(error: BaseException) -> Future[Any]:
    """Return a Future that has failed already."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    future.set_exception(error)
    return future
