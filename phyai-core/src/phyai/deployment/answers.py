"""Answers of a pool: a thread that waits for one hears it itself, and no other is woken first."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from phyai.deployment.channel import ChannelClosed, Message
from phyai.deployment.values import WireError
from phyai.request_watch import StoppableFuture

if TYPE_CHECKING:
    from phyai.deployment.calls import Call
    from phyai.deployment.local_pool import LocalPool
    from phyai.deployment.members import Worker

SLICE_S = 0.1
"""How long to look at nothing but the channel: a Future may also be settled by others."""


class Answer(StoppableFuture):
    """The Future of a call.

    listen: waits for the answer on this thread, for so many seconds at most; None when another
    thread settles it.  called_back: whether anybody wants to be called.
    waits: tells whether the worker has hardly begun with it.  stop: has the worker leave it; what
    the caller gets is decided here, by the watch.
    taken: the thread that settles it because it waited, and what runs callbacks elsewhere.
    """

    listen: Callable[[float | None], None] | None = None
    waits: Callable[[Answer], bool] | None = None
    stop: Callable[[], object] | None = None
    taken: tuple[int, Callable[[Callable[[], None]], None]] | None = None
    called_back = False

    def cancel(self) -> bool:
        """Return whether the call gets no result.

        Of a request whose steps are run one by one, until its result has arrived; of any other
        as long as its worker has others to run before it.
        """
        if self.done():
            return False
        waits = self.waits
        if not self.watch.stop(waits=waits is not None and waits(self)):
            return False
        if (stop := self.stop) is not None:
            stop()
        return True

    def let_go(self) -> None:
        """Know nothing of the worker any more: the call is about to be settled."""
        self.listen = self.waits = self.stop = None

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        self.called_back = True
        super().add_done_callback(partial(_call_back, fn))

    def result(self, timeout: float | None = None) -> Any:
        return super().result(self._listened(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._listened(timeout))

    def _listened(self, timeout: float | None) -> float | None:
        """Listen, and return what is left of the time."""
        listen = self.listen
        if listen is None or self.done():
            return timeout
        began = time.monotonic()
        listen(timeout)
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - began))


def _call_back(fn: Callable[[Future[Any]], object], future: Any) -> None:
    """Run a callback, but not on a thread that settles the future because it waited for it."""
    taken = future.taken
    if taken is not None and taken[0] == threading.get_ident():
        taken[1](partial(fn, future))
    else:
        fn(future)


class Listening:
    """Hears a worker's answer on the thread that waits for it; all else is the supervisor's.

    Only while that call is the worker's only one, and nobody else listens. Callbacks of Futures
    always run on the supervisor's thread.
    """

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool

    def wait(self, worker: Worker, call_id: int, timeout_s: float | None) -> None:
        """Return when the call is settled, the time is over, or others have to settle it."""
        calls = worker.replica.calls
        call = calls.get(call_id)
        if call is None or len(calls) > 1 or self.pool.on_own_thread():
            return
        if not worker.listening.acquire(blocking=False):
            return
        mine, hand = None, _Hand()
        try:
            try:
                self.pool.supervisor.pause(worker.channel)
                mine = self._hear(worker, call, timeout_s, hand)
            finally:
                self._resume(worker)
            if mine is not None:
                self._settle(worker, call, mine)
        except BaseException as error:  # Ctrl-C: maybe with the answer in hand, which is gone
            if not hand.empty:
                if mine is not None:
                    mine.release()
                self.pool.dispatch.settle(worker.replica, call.id, failed=True)
                call.fail(error)
            raise

    def _resume(self, worker: Worker) -> None:
        supervisor = self.pool.supervisor
        try:
            supervisor.resume(worker.channel)
        except BaseException:  # Ctrl-C; nobody would hear the worker any more
            supervisor.soon(partial(supervisor.resume, worker.channel))
            raise
        finally:
            worker.listening.release()

    def _settle(self, worker: Worker, call: Call, message: Message) -> None:
        call.future.taken = threading.get_ident(), self.pool.supervisor.soon
        try:
            self.pool.heard_from(worker, message)
        finally:
            call.future.taken = None

    def _hear(
        self, worker: Worker, call: Call, timeout_s: float | None, hand: _Hand
    ) -> Message | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        channel = worker.channel
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        try:
            while not call.future.done():
                left_s = SLICE_S if deadline is None else deadline - time.monotonic()
                if not poll.poll(1e3 * min(max(left_s, 0.0), SLICE_S)):
                    if left_s <= 0:
                        break
                    continue
                hand.empty = False
                if (message := channel.receive()) is not None:
                    own = message.call_id == call.id and message.reply
                    if own and not call.future.called_back:
                        return message
                    self.pool.supervisor.soon(partial(self.pool.heard_from, worker, message))
                hand.empty = True
        except ChannelClosed:  # the supervisor finds out why
            hand.empty = True
        except WireError as error:
            hand.empty = True
            self.pool.supervisor.soon(partial(self.pool.not_understood, worker, error))
        return None


class _Hand:
    """Whether a thread that listens may have the answer in hand, and nobody else."""

    __slots__ = ("empty",)

    def __init__(self) -> None:
        self.empty = True
