"""Queue of one EngineCore: runs requests in order, and joins them when that is asked for."""

from __future__ import annotations

import collections
import copy
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from phyai.core_setup import on_device
from phyai.engine_core import closed_error
from phyai.errors import CapacityError, RequestError
from phyai.joining import Failed, NotRowsFirst, deadline_s, runs_alone
from phyai.memory import is_out_of_memory
from phyai.request_job import Job
from phyai.request_watch import RequestFuture, Watch, begins, settle, watch_of
from phyai.scheduler import Plan, RunTimes
from phyai.session_turn import OnWait
from phyai.types import Key, Prepared

if TYPE_CHECKING:
    from phyai.engine_core import EngineCore

log = logging.getLogger("phyai")

LONGEST_WAIT_S = 60.0  # of one look at the clock


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Any
    future: Future[Any]
    keep: object  # lives until the request is done
    since: float
    deadline: float | None
    ticket: int | None


@dataclass(slots=True, eq=False)
class _Ready:
    """A prepared request; a ``phyai.scheduler.Waiting``."""

    job: Job
    prepared: Prepared
    future: Future[Any]
    keep: object
    ready_at: float
    deadline: float | None


class RequestLoop:
    """Runs the queued requests of one core, first come first served, on threads of its own.

    With ``runtime.batch_wait_ms`` = 0 one request runs after the other, each alone. Otherwise one
    thread prepares requests ahead while another runs batches of whole requests, see
    ``Scheduler.plan``; requests of one session never share a batch, as each waits for the one
    before it. A batch whose forward fails, fails whole; one that has no room, or cannot be shared,
    is run again request by request. Thread-safe. The threads start with the first request and end
    with ``close``; the core is the owner's to close, after that.

    clock: monotonic seconds.
    """

    def __init__(self, core: EngineCore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._core, self._clock = core, clock
        self._wait_s = core.config.runtime.batch_wait_ms / 1e3
        self._wake = threading.Condition()
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._ready: list[_Ready] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        # While the next request waits for a session: tells whether that one is free.
        self._free: Callable[[], bool] | None = None
        self._times = RunTimes()
        self._limits: dict[tuple[Key, bool], int] = {}
        self._latencies: collections.deque[float] = collections.deque(maxlen=1024)
        self._in_flight = self._done = self._failed = 0

    def submit(
        self,
        request: Any,
        future: Future[Any],
        keep: object = None,
        ticket: int | None = None,
    ) -> None:
        """Queue a request whose outcome the future gets; it can be cancelled until it runs.

        A ``RequestFuture`` hears of the steps, too, and may stop the request between two of them.
        keep: an object that lives until then.  ticket: see ``EngineCore.step``.
        Never raises; closed, the future gets the error.
        """
        try:
            left = deadline_s(request) if self._wait_s else None
        except Exception:
            left = None  # preparing it says so
        due = None if left is None else self._clock() + left
        waiting = _Waiting(request, future, keep, time.perf_counter(), due, ticket)
        with self._wake:
            if not self._closed:
                if not self._threads:
                    self._start()
                self._in_flight += 1
                self._queue.append(waiting)
                self._wake.notify_all()
                return
        settle(future, error=closed_error())

    def step(self, request: Any, ticket: int | None = None) -> Any:
        """Run one request and return its result; with joining it queues like the others.

        ticket: see ``EngineCore.step``.
        Raises: EngineUnavailableError when closed; whatever the request fails with; RequestError
            in a callback of a Future, when joining and its session is in use.
        """
        inside = threading.current_thread() in self._threads
        if self._wait_s and not inside:
            future = RequestFuture(self._core.watch())
            self.submit(request, future, ticket=ticket)
            try:
                return future.result()
            except BaseException:
                future.cancel()  # interrupted
                raise
        with self._wake:
            if self._closed:
                raise closed_error()
            self._in_flight += 1
        on_wait = _refuse_to_wait if self._wait_s else None
        return self._alone(request, 0.0, on_wait, ticket=ticket)

    def close(self) -> None:
        """Fail what waits, let the running batch finish, end the threads; idempotent."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            queue, ready = list(self._queue), list(self._ready)
            if queue and self._core.ranks is not None and not self._core.ranks.leads:
                queue = []  # what becomes of them is rank 0's to say, also when it closes
            else:
                self._queue.clear()
            self._ready.clear()
            self._in_flight -= len(queue) + len(ready)
            self._wake.notify_all()
        for entry in ready:
            entry.job.failed(closed_error())
        for waiting in queue:
            self._untold(waiting, closed_error())
        for future in [*(entry.future for entry in ready), *(one.future for one in queue)]:
            settle(future, error=closed_error())
        if threading.current_thread() in self._threads:
            return  # closed by a callback, or by the end of what ``keep`` kept
        for thread in self._threads:
            thread.join()

    def stats(self) -> dict[str, Any]:
        """Return in_flight, done, failed, percentiles of latency (ms), and batches.

        batches: see ``BatchCounts``.
        """
        with self._wake:
            latencies = np.array(self._latencies)
            found: dict[str, Any] = {
                "in_flight": self._in_flight,
                "done": self._done,
                "failed": self._failed,
            }
        for q in (50, 95, 99):
            found[f"p{q}_ms"] = float(np.percentile(latencies, q)) if latencies.size else None
        return {**found, "batches": self._core.batches.as_dict()}

    def _start(self) -> None:
        targets = {"phyai-engine": self._serve}
        if self._wait_s:
            targets = {"phyai-engine": self._run_batches, "phyai-prepare": self._prepare_ahead}
        for name, target in targets.items():
            run = partial(self._on_device, target)
            self._threads.append(threading.Thread(target=run, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def _on_device(self, run: Callable[[], None]) -> None:
        on_device(self._core.device)
        run()

    def _count(self, error: BaseException | None, started: float) -> None:
        with self._wake:
            self._in_flight -= 1
            if error is None:
                self._done += 1
                self._latencies.append(1e3 * (time.perf_counter() - started))
            elif not isinstance(error, CancelledError):
                self._failed += 1

    # ------------------------------------------------------------ one after the other

    def _serve(self) -> None:
        while (waiting := self._next()) is not None:
            if not begins(waiting.future):
                self._dropped(waiting)
                del waiting  # what it kept may end here, and close this
                continue
            try:
                watch = watch_of(waiting.future)
                queued_ms = _ms_since(waiting.since)
                result = self._alone(waiting.request, queued_ms, watch=watch, ticket=waiting.ticket)
            except BaseException as error:
                settle(waiting.future, error=error)
            else:
                settle(waiting.future, result)
                del result
            del waiting

    def _next(self) -> _Waiting | None:
        """Return the next request; None when closed."""
        with self._wake:
            while not self._queue:
                if self._closed:
                    return None
                self._wake.wait()
            return self._queue.popleft()

    def _dropped(self, waiting: _Waiting) -> None:
        """Count a request that was cancelled before it began; other ranks have it cancelled, too.

        Not under the lock: a batch that runs may take it before the ranks can be told.
        """
        with self._wake:
            self._in_flight -= 1
        self._untold(waiting, CancelledError())

    def _untold(self, waiting: _Waiting, error: BaseException) -> None:
        """Tell other ranks, which have it too, the end of a request that never became a job."""
        if self._core.ranks is not None and waiting.ticket is not None:
            self._core.ranks.refuse(waiting.ticket, error)

    def _alone(
        self,
        request: Any,
        queued_ms: float,
        on_wait: OnWait | None = None,
        watch: Watch | None = None,
        ticket: int | None = None,
    ) -> Any:
        started = time.perf_counter()
        try:
            result = self._core.step(
                request, queued_ms=queued_ms, on_wait=on_wait, watch=watch, ticket=ticket
            )
        except BaseException as error:
            self._count(error, started)
            raise
        self._count(None, started)
        return result

    # ------------------------------------------------------------ joining: prepare

    def _prepare_ahead(self) -> None:
        while (waiting := self._next_to_prepare()) is not None:
            if waiting.future.cancelled():
                waiting.future.set_running_or_notify_cancel()
                self._dropped(waiting)
            else:
                self._prepare(waiting)
            del waiting

    def _next_to_prepare(self) -> _Waiting | None:
        """Return the next request while less than a batch is ready; None when closed."""
        with self._wake:
            while not self._queue or self._ready_rows() >= self._max_rows():
                if self._closed:
                    return None
                self._wake.wait()
            return self._queue.popleft()

    def _prepare(self, waiting: _Waiting) -> None:
        queued_ms, watch = _ms_since(waiting.since), watch_of(waiting.future)
        job = Job(
            self._core, waiting.request, queued_ms, self._session_in_use, watch, waiting.ticket
        )
        try:
            job.prepare()
            prepared = job.prepared
            result = job.done(None) if prepared is None else None
        except BaseException as error:
            settle(waiting.future, error=self._ended(job, error))
            return
        finally:
            self._free = None
        if prepared is None:
            self._count(None, job.started)
            settle(waiting.future, result)
            return
        entry = _Ready(job, prepared, waiting.future, waiting.keep, self._clock(), waiting.deadline)
        with self._wake:
            if not self._closed:
                self._ready.append(entry)
                self._wake.notify_all()
                return
            self._in_flight -= 1
        self._refuse(entry)

    def _session_in_use(self, free: Callable[[], bool]) -> None:
        """Let what is ready run: nothing can join it before the session is free."""
        with self._wake:
            self._free = free
            self._wake.notify_all()

    def _ready_rows(self) -> int:
        return sum(entry.prepared.rows for entry in self._ready)

    def _max_rows(self) -> int:
        return self._core.scheduler.max_rows

    # ------------------------------------------------------------ joining: run

    def _run_batches(self) -> None:
        while (batch := self._next_batch()) is not None:
            self._run([entry for entry in batch if self._starts(entry)])
            del batch

    def _next_batch(self) -> list[_Ready] | None:
        """Return the requests of the next batch when it is time to run it; None when closed."""
        with self._wake:
            while not self._closed:
                if not self._ready:
                    self._wake.wait()
                    continue
                plan = self._plan(now := self._clock())
                held_up = (free := self._free) is not None and not free()
                if plan.at <= now or held_up:
                    batch = self._ready[: plan.count]
                    del self._ready[: plan.count]
                    self._wake.notify_all()
                    return batch
                self._wake.wait(min(plan.at - now, LONGEST_WAIT_S))
        return None

    def _plan(self, now: float) -> Plan:
        scheduler = self._core.scheduler
        try:
            return scheduler.plan(self._ready, now, self._wait_s, self._times, self._limits)
        except Exception:  # a Prepared that is not what the contract wants has an error of its own
            return Plan(1, now)

    def _starts(self, entry: _Ready) -> bool:
        if entry.future.set_running_or_notify_cancel():
            return True
        error = CancelledError()
        entry.job.failed(error)
        self._count(error, entry.job.started)
        return False

    def _run(self, batch: list[_Ready]) -> None:
        """Run requests as one batch, or each alone when they cannot share one."""
        if not batch:
            return
        rows = sum(entry.prepared.rows for entry in batch)
        began = self._clock()
        outcomes: list[Any] | None = None
        try:
            outcomes = self._core.run([entry.job for entry in batch])
        except BaseException as error:
            if len(batch) > 1 and runs_alone(error):
                self._learn(batch[0].prepared, error, rows)
            else:
                copies = (_copy_of(error) for _ in batch[1:])
                outcomes = [Failed(error), *(Failed(other) for other in copies)]
        else:
            bucket = self._core.scheduler.batch_bucket(rows)
            self._times.add(batch[0].prepared.key, bucket, self._clock() - began)
        if outcomes is None:  # not while the error is at hand: it holds on to the batch's memory
            for entry in batch:
                self._run([entry])
            return
        finished = [self._finished(*pair) for pair in zip(batch, outcomes, strict=True)]
        for entry, outcome in zip(batch, finished, strict=True):  # callbacks find no session in use
            if isinstance(outcome, Failed):
                settle(entry.future, error=outcome.error)
            else:
                settle(entry.future, outcome)

    def _learn(self, first: Prepared, error: BaseException, rows: int) -> None:
        """Join less of this kind from now on, when its size or its kind was the reason."""
        small = isinstance(error, CapacityError) or is_out_of_memory(error)
        if small or isinstance(error, NotRowsFirst):
            if len(self._limits) >= 64:
                self._limits.clear()  # they are learnt again
            self._limits[first.key, first.meta is None] = max(rows // 2, 1) if small else 1

    # ------------------------------------------------------------ outcomes

    def _finished(self, entry: _Ready, outcome: Any) -> Any:
        """End a request; return its result, or Failed."""
        error = outcome.error if isinstance(outcome, Failed) else None
        try:
            result = entry.job.done(outcome) if error is None else None
        except BaseException as raised:
            error = raised
        if error is None:
            self._count(None, entry.job.started)
            return result
        return Failed(self._ended(entry.job, error))

    def _ended(self, job: Job, error: BaseException) -> BaseException:
        """End a request that failed; return its caller's error."""
        failure = job.failed(error)
        self._count(failure, job.started)
        return failure

    def _refuse(self, entry: _Ready) -> None:
        settle(entry.future, error=entry.job.failed(closed_error()))


def _refuse_to_wait(_: Callable[[], bool]) -> None:
    """Who uses the session may wait for this thread: a callback that waited would for ever."""
    raise RequestError(
        "step() in a callback of a Future must not wait for others; its session is in use, or all "
        "places of sessions are. Use submit() there."
    )


def _copy_of(error: BaseException) -> BaseException:
    """Return an error of its own for another caller; the same one when it cannot be copied."""
    try:
        other = copy.copy(error)
    except Exception:
        return error
    other.__cause__, other.__context__ = error.__cause__, error.__context__
    other.__suppress_context__ = error.__suppress_context__
    return other.with_traceback(error.__traceback__)


def _ms_since(then: float) -> float:
    return 1e3 * (time.perf_counter() - then)
