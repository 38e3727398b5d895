"""What the caller of a running request hears of it, and how it stops one between two steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeAlias

log = logging.getLogger("phyai")

OnProgress: TypeAlias = Callable[[int, int], object]
"""on_progress(done, total): solver steps of a request; in unit ``loop`` once, at the end."""


class Watch:
    """One request's listener, and the wish to stop it.

    on_progress: called on the thread that runs the request. What it raises is logged, once.
    stoppable: whether the request can end between two steps.  listens: whether somebody hears of
    them.  stop_asked: whether it is to end.

    >>> from phyai.request_watch import Watch
    >>> watch = Watch(lambda done, total: print(done, "of", total), stoppable=True)
    >>> watch.tell(1, 4)
    1 of 4
    >>> watch.stop(), watch.stop_asked, watch.seal()
    (True, True, True)
    """

    stop_asked = False
    _told = 0
    _sealed = False

    def __init__(self, on_progress: OnProgress | None = None, *, stoppable: bool = False) -> None:
        self.stoppable, self._on_progress = stoppable, on_progress
        self.listens = on_progress is not None
        self._lock = threading.Lock()

    @property
    def idle(self) -> bool:
        """Whether nobody listens, nor can stop the request."""
        return self._on_progress is None and not self.stoppable

    def tell(self, done: int, total: int) -> None:
        """Pass progress on, once for each step."""
        if self._on_progress is None or done <= self._told:
            return
        self._told = done
        try:
            self._on_progress(done, total)
        except (Exception, SystemExit):  # as of a Future's callback
            log.exception("on_progress of a request raised; it is not called again")
            self._on_progress = None

    def stop(self, *, waits: bool = False) -> bool:
        """Ask the request to end; False when it cannot, or is about to have its result.

        waits: it has not begun, so it can be left out, also where steps are not run one by one.
        """
        with self._lock:
            if (self.stoppable or waits) and not self._sealed:
                self.stop_asked = True
            return self.stop_asked

    def seal(self) -> bool:
        """Let nobody stop the request any more; return whether somebody has."""
        with self._lock:
            self._sealed = True
            return self.stop_asked


class StoppableFuture(Future[Any]):
    """The Future of a request that its watch may stop: then it is cancelled, however it ends.

    >>> from phyai.request_watch import StoppableFuture, Watch
    >>> future = StoppableFuture(Watch(stoppable=True))
    >>> future.watch.stop()
    True
    >>> future.set_result(7)
    >>> future.cancelled()
    True
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def cancelled(self) -> bool:
        if super().cancelled():
            return True
        return self.done() and isinstance(super().exception(), CancelledError)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        if isinstance(error, CancelledError):
            raise error  # as of a Future that was cancelled before it ran
        return error

    def set_result(self, result: Any) -> None:
        if self.watch.seal():
            super().set_exception(CancelledError())
        else:
            super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_exception(CancelledError() if self.watch.seal() else exception)


class RequestFuture(StoppableFuture):
    """The Future of a request that can be cancelled while it waits, and between two steps.

    >>> from phyai.request_watch import RequestFuture, Watch
    >>> future = RequestFuture(Watch(stoppable=True))
    >>> future.set_running_or_notify_cancel(), future.cancel(), future.cancelled()
    (True, True, False)
    >>> future.set_result(7)  # came too late
    >>> future.cancelled()
    True
    """

    def cancel(self) -> bool:
        """Return whether the request gets no result: at once, or after the step that runs."""
        return super().cancel() or (self.running() and self.watch.stop())


def watch_of(future: Future[Any]) -> Watch | None:
    """Return what listens to the request of a future; None for one of another kind."""
    return future.watch if isinstance(future, RequestFuture) else None


def begins(future: Future[Any]) -> bool:
    """Return whether a request that comes from the queue is to run: nobody has cancelled it."""
    return future.running() or future.set_running_or_notify_cancel()


def settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Tell a future its outcome, unless it was cancelled. Never raises: other requests follow."""
    try:
        if not future.running() and not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except BaseException as raised:
        log.error("callback of a request's future must not end its thread; it raised %r", raised)


class Stops:
    """The watches of the requests of one batch: who hears of its steps, and who leaves it.

    watches: one per request, or none: then nobody hears, nor leaves.

    >>> from phyai.request_watch import Stops, Watch
    >>> stops = Stops([Watch(stoppable=True), Watch(stoppable=True)])
    >>> stops.watches[1].stop(), stops.told(1, 4)
    (True, None)
    >>> stops.sealed(), stops.watches[0].stop()
    (frozenset({1}), False)
    """

    def __init__(self, watches: Sequence[Watch] = ()) -> None:
        self.watches = watches

    @property
    def idle(self) -> bool:
        """Whether nobody needs to hear of a step."""
        return all(watch.idle for watch in self.watches)

    def told(self, done: int, total: int) -> None:
        """Tell the requests that a step is done.

        Raises: CancelledError when every one of them was stopped.
        """
        for watch in self.watches:
            watch.tell(done, total)
        if self.watches and all(watch.stop_asked for watch in self.watches):
            raise CancelledError()

    def sealed(self) -> frozenset[int]:
        """Let nobody stop a request any more; return the numbers of those that were."""
        return frozenset(n for n, watch in enumerate(self.watches) if watch.seal())
