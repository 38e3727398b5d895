"""A worker: one process that answers the requests of one replica."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from phyai.core_setup import on_device
from phyai.deployment.channel import Channel, ChannelClosed, Message
from phyai.deployment.ears import Ears
from phyai.deployment.launch import Launch, WorkerOrder
from phyai.deployment.messages import WATCHED_STEP
from phyai.deployment.values import encode, encode_error
from phyai.engine_core import EngineCore, closed_error, max_rows
from phyai.errors import RequestError
from phyai.ranks.messages import on_host
from phyai.ranks.spawned import join_spawned
from phyai.request_loop import RequestLoop
from phyai.request_watch import RequestFuture, Watch
from phyai.services import Progress
from phyai.session_moving import adopt, exported
from phyai.warmup import warm_up

log = logging.getLogger("phyai")


class Telling:
    """Progress of a load, told to the engine's process, not more often than people can read."""

    def __init__(self, channel: Channel, every_s: float = 0.05) -> None:
        self.channel, self.every_s = channel, every_s
        self._last = -1e9

    def __call__(self, done: int, total: int, name: str) -> None:
        now = time.monotonic()
        if now - self._last < self.every_s and done < total:
            return
        self._last = now
        self.channel.send("progress", 0, *encode((int(done), int(total), str(name))))


def load_and_work(sock: socket.socket, launch: Launch, order: WorkerOrder) -> NoReturn:
    """Run as a worker that loads its own copy of the model."""
    channel = Channel(sock, "worker")
    try:
        core = build(launch, Telling(channel), order)
    except BaseException as error:
        refuse(channel, error)
    work(core, channel, order, warm=launch.config.runtime.warmup)


def build(launch: Launch, progress: Progress, order: WorkerOrder | None = None) -> EngineCore:
    """Return the core, loaded but not warmed up; order: where it is one rank of several."""
    config = launch.config
    cold = config.replace(runtime=config.runtime.replace(warmup=False))
    ranks = None if order is None else order.ranks
    return EngineCore(
        launch.plugin,
        launch.plugin_args,
        cold,
        version=launch.version,
        progress=progress,
        parallel=None if ranks is None else join_spawned(config, ranks),
        output_rank=0 if ranks is None else ranks.output_rank,
    )


def settle(order: WorkerOrder) -> None:
    """Have the process compute as it is told to."""
    torch.set_num_threads(order.num_threads)
    if order.reseed:
        torch.seed()
        random.seed()
        np.random.seed()


def refuse(channel: Channel, error: BaseException) -> NoReturn:
    """Tell why this process cannot start, and end it."""
    with contextlib.suppress(ChannelClosed):
        channel.send("start_error", 0, *encode_error(error))
    leave(1)


def give_up(channel: Channel, error: BaseException) -> NoReturn:
    """Tell what the ranks of this replica cannot go on with, and end this one."""
    with contextlib.suppress(ChannelClosed):
        channel.send("broken", 0, *encode_error(error))
    leave(1)


def leave(code: int = 0) -> NoReturn:
    """End the process now: threads may run, and exit handlers are another process's."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def work(core: EngineCore, channel: Channel, order: WorkerOrder, *, warm: bool) -> NoReturn:
    """Get ready, then answer until the engine's process says exit or is gone."""
    try:
        settle(order)
        if warm:
            warm_up(core)
        channel.send("ready", 0, *encode((information(core), description(core))))
    except BaseException as error:
        refuse(channel, error)
    Worker(core, channel, order).run()


@dataclass(slots=True, eq=False)
class _Step:
    """A request that was heard.  heard_at: ``time.perf_counter``."""

    call_id: int
    request: Any
    heard_at: float
    watch: Watch


@dataclass(slots=True, eq=False)
class _Update:
    """New weights of several ranks, which are taken over between two requests."""

    call_id: int
    items: dict[str, torch.Tensor]


class Worker:
    """Answers messages; requests run one after the other.

    Without joining they run on the thread that hears them, see ``Ears``; what else arrives
    meanwhile is heard on another. With joining a RequestLoop has threads for them.
    """

    def __init__(self, core: EngineCore, channel: Channel, order: WorkerOrder) -> None:
        self.core, self.channel, self.order = core, channel, order
        joins = core.config.runtime.batch_wait_ms > 0
        self._loop = RequestLoop(core) if joins else None
        self._queue: deque[_Step | _Update] = deque()
        self._running: _Step | _Update | None = None
        self._placed = False  # the ears, on the device
        self._joined: dict[int, RequestFuture] = {}  # by call
        self._exiting = False

    def run(self) -> NoReturn:
        threading.Thread(target=self._beat, name="phyai-heartbeat", daemon=True).start()
        on_device(self.core.device)
        ears = Ears(self.channel, self._hear_meanwhile)
        try:
            while not self._exiting:
                if not self._queue:
                    self._hear(wait=True)
                    continue
                work = self._running = self._queue.popleft()  # before the ears may look for it
                with ears:
                    self._run(work)
                self._running = None
                del work
        except ChannelClosed:  # the engine's process is gone: nobody waits for anything
            leave()
        with contextlib.suppress(Exception):
            if self._loop is not None:
                self._loop.close()
            self.core.close()
        leave()

    # ------------------------------------------------------------ hearing

    def _hear(self, *, wait: bool) -> None:
        message = self.channel.receive(wait=wait)
        if message is None:
            return
        if message.kind == "exit":
            self._exiting = True
            while self._queue:
                self._fail(self._queue.popleft().call_id, closed_error())
        elif message.kind == "cancel":
            self._leave_out(int(message.value()))
        else:
            self._take(message)

    def _hear_meanwhile(self) -> None:
        try:
            if not self._placed:
                self._placed = True
                on_device(self.core.device)
            self._hear(wait=False)
        except ChannelClosed:
            leave()
        except BaseException:
            traceback.print_exc()
            leave(1)

    def _take(self, message: Message) -> None:
        call_id = message.call_id
        try:
            value = message.value()
            if message.kind in ("step", WATCHED_STEP):
                self._begin(call_id, value, watched=message.kind == WATCHED_STEP)
                return
            if message.kind == "update_weights":
                self._update(_Update(call_id, value))
                return
            act = self._acts().get(message.kind)
            if act is None:
                raise RequestError(f"a worker must know what to do; got {message.kind!r}.")
            self._reply(call_id, act(value))
        except Exception as error:
            self._fail(call_id, error)

    # ------------------------------------------------------------ calls

    def _begin(self, call_id: int, request: Any, *, watched: bool) -> None:
        watch = self.core.watch(partial(self._stepped, call_id) if watched else None)
        if self._loop is None:
            self._queue.append(_Step(call_id, request, time.perf_counter(), watch))
            return
        future = self._joined[call_id] = RequestFuture(watch)
        future.add_done_callback(partial(self._answer, call_id))
        self._loop.submit(request, future)

    def _run(self, work: _Step | _Update) -> None:
        if isinstance(work, _Update):
            self._change(work)
            return
        try:
            queued_ms = 1e3 * (time.perf_counter() - work.heard_at)
            result = self.core.step(work.request, queued_ms=queued_ms, watch=work.watch)
        except BaseException as error:  # a plugin may raise anything
            self._fail(work.call_id, error)
        else:
            self._reply(work.call_id, result)

    def _leave_out(self, call_id: int) -> None:
        """Make nothing, or nothing more, of a request: its caller has given it up."""
        if (future := self._joined.get(call_id)) is not None:
            future.cancel()
            return
        for work in (self._running, *self._queue):
            if isinstance(work, _Step) and work.call_id == call_id:
                if work is self._running:
                    work.watch.stop()
                else:
                    self._queue.remove(work)
                    self._fail(call_id, CancelledError())
                return

    def _stepped(self, call_id: int, done: int, total: int) -> None:
        with contextlib.suppress(ChannelClosed):
            self.channel.send("stepped", call_id, *encode((done, total)))

    def _acts(self) -> dict[str, Callable[[Any], Any]]:
        sessions = self.core.sessions
        return {
            "reset_session": sessions.reset,
            "close_session": sessions.end,
            "export_sessions": lambda _: exported(sessions),
            "import_sessions": partial(adopt, sessions),
        }

    def _update(self, update: _Update) -> None:
        """Take new weights over in turn; meanwhile everything is heard."""
        if self._loop is None:
            self._queue.append(update)
        else:  # the core lets it in between two batches
            threading.Thread(target=self._change, args=(update,), daemon=True).start()

    def _change(self, update: _Update) -> None:
        """Change weights in place; after a change that may be half done there is no way back."""
        on_device(self.core.device)
        try:
            self.core.update_weights(update.items.items())
        except BaseException as error:  # on a thread of its own nobody else would answer
            if error.__cause__ is not None:
                give_up(self.channel, error)
            self._fail(update.call_id, error)
        else:
            self._reply(update.call_id, None)

    def _answer(self, call_id: int, future: Future[Any]) -> None:
        self._joined.pop(call_id, None)
        if future.cancelled():
            self._fail(call_id, CancelledError())
        elif (error := future.exception()) is not None:
            self._fail(call_id, error)
        else:
            self._reply(call_id, future.result())

    def _reply(self, call_id: int, result: Any) -> None:
        try:
            if self.order.result_device == "cpu":
                result = on_host(result)
            body, buffers = encode(result, where="result")
        except Exception as error:
            self._fail(call_id, error)
            return
        with contextlib.suppress(ChannelClosed):
            self.channel.send("result", call_id, body, buffers, reply=True)

    def _fail(self, call_id: int, error: BaseException) -> None:
        if self.core.ranks is not None and self.core.ranks.broken is not None:
            give_up(self.channel, error)
        with contextlib.suppress(ChannelClosed):
            self.channel.send("failure", call_id, *encode_error(error), reply=True)

    def _beat(self) -> None:
        while True:
            time.sleep(self.order.heartbeat_s)
            try:
                self.channel.send("beat", 0, *encode(information(self.core)))
            except ChannelClosed:
                return
            except Exception as error:  # caches come and go while they are counted
                log.debug("a heartbeat was left out: %r", error)


def information(core: EngineCore) -> dict[str, Any]:
    """Return what ``Engine.stats`` tells of a replica besides its counts."""
    return {
        "pid": os.getpid(),
        "memory_bytes": core.services.memory.nbytes,
        "memory": core.memory_report(),
        "sessions": core.sessions.stats(),
        "observer_failures": core.observer_failures(),
        "graphs": core.services.graphs.stats(),
        "memo": core.services.memo.stats(),
        "batches": core.batches.as_dict(),
        "busy_s": core.batches.busy_s,
        **({} if core.ranks is None else {"rank_pids": list(core.ranks.pids)}),
    }


def description(core: EngineCore) -> dict[str, Any]:
    """Return what servers need to know of an adapter; see ``Engine.describe``.

    stoppable: whether a request can end between two steps; for the pool alone.
    """
    return {
        "expects": dict(core.adapter.expects()),
        "max_rows": max_rows(core.args),
        "device": str(core.device),
        "stoppable": core.watch().stoppable,
    }
