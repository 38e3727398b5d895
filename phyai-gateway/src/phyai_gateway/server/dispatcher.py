"""A bounded queue before the engine: admission, order, deadlines, and requests nobody waits for.

The event loop never runs model code: inputs are decoded on a few threads, the engine has its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from phyai_gateway.messages import Fault

DECODE_THREADS = 4
FIRST_GUESS_S = 0.1  # of a request's time, before any was measured
EWMA_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Done:
    """One result.  queue_s: from acceptance until the engine had it; engine_s: from then on."""

    result: Any
    queue_s: float
    engine_s: float


class Dispatcher:
    """Gives at most ``workers`` requests to the engine at once; ``max_queue`` more may wait.

    submit: hands a request to the engine and returns its Future at once.
    """

    def __init__(
        self, submit: Callable[[Any], Future[Any]], *, workers: int, max_queue: int
    ) -> None:
        self.workers, self.max_queue = workers, max_queue
        self.draining = False
        self._submit = submit
        self._slots = asyncio.Semaphore(workers)
        self._decoders = ThreadPoolExecutor(DECODE_THREADS, thread_name_prefix="phyai-decode")
        self._accepted = self._waiting = self._running = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._ewma_s = FIRST_GUESS_S
        self._busy_s, self._busy_at = 0.0, time.monotonic()

    @property
    def waiting(self) -> int:
        """Accepted requests the engine has not got yet."""
        return self._waiting

    @property
    def running(self) -> int:
        """Requests the engine has, also those whose client has gone."""
        return self._running

    @property
    def busy_seconds(self) -> float:
        """Seconds summed over workers in which one had a request."""
        self._tick()
        return self._busy_s

    async def run(self, build: Callable[[], Any], deadline: float) -> Done:
        """Return what the engine makes of ``build()``, which runs on a thread.

        deadline: ``time.monotonic()`` seconds. Cancelling gives the place in the queue back; what
        the engine has begun it finishes, and its result is dropped.
        Raises: Fault when refused, late or draining; whatever ``build`` and the engine raise.
        """
        self._admit(deadline)
        self._accepted += 1
        self._empty.clear()
        since = time.monotonic()
        try:
            built = await self._turn(build, deadline)
            return await self._in_engine(built, since, deadline)
        finally:
            self._accepted -= 1
            if not self._accepted:
                self._empty.set()

    async def drain(self) -> None:
        """Take nothing new, and return when everything accepted is answered."""
        self.draining = True
        await self._empty.wait()

    def close(self) -> None:
        """Stop the threads; what they decode now is finished and dropped."""
        self.draining = True
        self._decoders.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ parts

    def _admit(self, deadline: float) -> None:
        if self.draining:
            raise Fault("unavailable", "server is stopping. Ask another one.", retry_after=1.0)
        if deadline <= time.monotonic():
            raise _late("before it could be queued", started=False)
        # What the engine still works on for clients that have gone takes places, too.
        if self._waiting + self._running >= self.workers + self.max_queue:
            raise Fault(
                "resource_exhausted",
                f"server must have at most {self.max_queue} requests waiting; it has that many. "
                "Try again later or ask another one.",
                retry_after=self._wait_s(),
            )

    async def _turn(self, build: Callable[[], Any], deadline: float) -> Any:
        """Return what was built, with a slot held."""
        loop = asyncio.get_running_loop()
        self._waiting += 1
        try:
            async with asyncio.timeout_at(_loop_time(loop, deadline)):
                built = await loop.run_in_executor(self._decoders, build)
                await self._slots.acquire()
            return built
        except TimeoutError:
            raise _late("before the model could begin", started=False) from None
        finally:
            self._waiting -= 1

    async def _in_engine(self, built: Any, since: float, deadline: float) -> Done:
        """Run with a slot held; the slot comes back when the engine is done, not the client."""
        loop = asyncio.get_running_loop()
        started = time.monotonic()
        try:
            future = self._submit(built)
        except BaseException:
            self._slots.release()
            raise
        self._tick()
        self._running += 1
        future.add_done_callback(lambda _: _call_soon(loop, self._release, started))
        try:
            async with asyncio.timeout_at(_loop_time(loop, deadline)):
                result = await asyncio.wrap_future(future)
        except TimeoutError:
            if future.done() and not future.cancelled() and future.exception() is not None:
                raise  # the engine's own
            raise _late("while the model ran", started=not future.cancel()) from None
        return Done(result, started - since, time.monotonic() - started)

    def _release(self, started: float) -> None:
        self._tick()
        self._running -= 1
        self._ewma_s += EWMA_WEIGHT * (time.monotonic() - started - self._ewma_s)
        self._slots.release()

    def _tick(self) -> None:
        now = time.monotonic()
        self._busy_s += self._running * (now - self._busy_at)
        self._busy_at = now

    def _wait_s(self) -> float:
        """Return a guess of the seconds until a place in the queue is free."""
        return max(self._ewma_s / self.workers, 0.001)


def _call_soon(
    loop: asyncio.AbstractEventLoop, function: Callable[[float], None], at: float
) -> None:
    if not loop.is_closed():  # a request outlived the server
        loop.call_soon_threadsafe(function, at)


def _loop_time(loop: asyncio.AbstractEventLoop, deadline: float) -> float:
    return loop.time() + deadline - time.monotonic()


def _late(when: str, *, started: bool) -> Fault:
    return Fault("deadline_exceeded", f"request's deadline passed {when}.", started=started)
