"""The Ray actor of one rank of a replica: builds an EngineCore on its node and does as it is told.

The actor of rank 0 (in most replicas the only one) takes the requests, in order; those of other
ranks do what rank 0 says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phyai import __version__
from phyai.deployment.messages import WATCHED_STEP
from phyai.deployment.ray_frame import BROKEN, FAILURE, RESULT, Steps, reply, unpack
from phyai.deployment.values import WireError, decode, encode, encode_error
from phyai.errors import ConfigError, PluginError, RequestError

if TYPE_CHECKING:
    from phyai.deployment.launch import Launch, WorkerOrder


@dataclass(frozen=True)
class Host:
    """Where an actor runs.  stderr: the file Ray writes its output to, on that host."""

    pid: int
    node_id: str
    actor_id: str
    address: str
    hostname: str
    stderr: str


@dataclass(frozen=True)
class RankPlace:
    """Which rank an actor is, and the file in which the ranks of its replica meet.

    pid, descriptor: of rank 0's process and of the file there.  output_rank: whose results count.
    """

    rank: int
    output_rank: int
    pid: int
    descriptor: int


class RayReplica:
    """One rank of a copy of the model in a Ray worker process. Messages are bytes: ``ray_frame``.

    The event loop only passes messages on: a load or a request runs in a thread of its own, so a
    long one hides nothing but the GIL's holder.
    """

    def __init__(self) -> None:
        self._progress: tuple[int, int, str] = (0, 1, "importing torch")
        self._core: Any = None
        self._requests: Any = None
        self._next = 0  # ticket of the message that is due
        self._early: dict[int, asyncio.Event] = {}
        self._unwanted: set[int] = set()  # stopped before they were due
        self._running: dict[int, Any] = {}  # futures of the requests that are here
        self._steps: dict[int, list[tuple[int, int]]] = {}

    # ------------------------------------------------------------ start

    async def meet(self, phyai_version: str, environ: Mapping[str, str], ranks: int) -> bytes:
        """Say where this actor is: reply (Host, descriptor of a file for the ranks to meet in).

        environ: ``PHYAI_*`` variables of the engine's process, such as which plugins are allowed.
        """
        return await _in_thread(lambda: self._meet(phyai_version, environ, ranks))

    def _meet(self, phyai_version: str, environ: Mapping[str, str], ranks: int) -> bytes:
        os.environ.update(environ)
        host = _host()
        if __version__ != phyai_version:
            raise PluginError(
                f"phyai on node {host.address} must have version {phyai_version}, as in the "
                f"engine's process; got {__version__}. Install the same on every node."
            )
        descriptor = os.memfd_create("phyai-ranks") if ranks > 1 else -1
        return reply(RESULT, *encode((host, descriptor)))

    async def load(self, launch: Launch, place: RankPlace | None) -> bytes:
        """Build the core that takes requests; reply (information, description).

        place: None for the only rank of a replica.
        """
        return await _in_thread(lambda: self._load(launch, place))

    def _load(self, launch: Launch, place: RankPlace | None) -> bytes:
        self._build(launch, place)
        from phyai.deployment.worker import description, information
        from phyai.request_loop import RequestLoop
        from phyai.warmup import warm_up

        if launch.config.runtime.warmup:
            self._tell(0, 1, "warm-up")
            warm_up(self._core)
        self._requests = RequestLoop(self._core)
        return reply(RESULT, *encode((information(self._core), description(self._core))))

    async def follow(self, launch: Launch, place: RankPlace) -> bytes:
        """Build the core of another rank and do what rank 0 says; reply when rank 0 is closed."""
        return await _in_thread(lambda: self._follow(launch, place))

    def _follow(self, launch: Launch, place: RankPlace) -> bytes:
        self._build(launch, place)
        self._core.ranks.serve()
        with contextlib.suppress(Exception):
            self._core.close()
        return reply(RESULT, *encode(None))

    def _build(self, launch: Launch, place: RankPlace | None) -> None:
        order = None if place is None else _order(launch, place)
        import numpy as np
        import torch

        from phyai.deployment.worker import build

        if launch.config.device.target == "cpu":
            torch.set_num_threads(launch.num_threads)
        self._core = build(launch, self._tell, order)
        if launch.config.runtime.seed is None:  # else every replica would draw the same noise
            torch.seed()
            random.seed()
            np.random.seed()

    def _tell(self, done: int, total: int, name: str) -> None:
        self._progress = (int(done), int(total), str(name))

    async def progress(self) -> tuple[int, int, str]:
        """Return how far the load is."""
        return self._progress

    # ------------------------------------------------------------ calls

    async def call(self, ticket: int, kind: str, frame: bytes) -> bytes:
        """Do what the engine's process asks for; replies with a result or an error.

        ticket: counts this actor's calls. Ray may deliver them out of order; they begin in order.
        """
        await self._turn(ticket)
        try:
            future = self._begin(ticket, kind, frame)
        except Exception as error:
            return self._outcome(ticket, FAILURE, *encode_error(error))
        finally:
            self._next += 1
            if (waiting := self._early.pop(self._next, None)) is not None:
                waiting.set()
        answer: Future[bytes] = Future()
        future.add_done_callback(lambda done: answer.set_result(self._answer(ticket, done)))
        return await asyncio.wrap_future(answer)

    async def _turn(self, ticket: int) -> None:
        if ticket != self._next:
            await self._early.setdefault(ticket, asyncio.Event()).wait()

    def _begin(self, ticket: int, kind: str, frame: bytes) -> Future[Any]:
        if ticket in self._unwanted:
            self._unwanted.discard(ticket)
            raise CancelledError
        try:
            value = decode(*unpack(frame))
        except WireError as error:
            raise RequestError(
                f"request must be made of classes that every node can import; {error}"
            ) from error
        if kind in ("step", WATCHED_STEP):
            return self._submit(ticket, value, watched=kind == WATCHED_STEP)
        acts: dict[str, Callable[[Any], Any]] = {
            "reset_session": self._core.sessions.reset,
            "close_session": self._core.sessions.end,
        }
        if kind not in acts:
            raise RequestError(f"a worker must know what to do; got {kind!r}.")
        future: Future[Any] = Future()
        future.set_result(acts[kind](value))
        return future

    def _submit(self, ticket: int, request: Any, *, watched: bool) -> Future[Any]:
        from phyai.request_watch import RequestFuture

        def tell(done: int, total: int) -> None:
            told.append((done, total))

        told: list[tuple[int, int]] = []
        if watched:
            self._steps[ticket] = told
        future = RequestFuture(self._core.watch(tell if watched else None))
        self._running[ticket] = future
        self._requests.submit(request, future)
        return future

    def _answer(self, ticket: int, future: Future[Any]) -> bytes:
        """Return the bytes that tell an outcome; never raises."""
        try:
            from phyai.ranks.messages import on_host  # of a device's memory others cannot open

            body, buffers = encode(on_host(future.result()), where="result")
        except BaseException as error:
            ranks = self._core.ranks
            kind = FAILURE if ranks is None or ranks.broken is None else BROKEN
            return self._outcome(ticket, kind, *encode_error(error))
        return self._outcome(ticket, RESULT, body, buffers)

    def _outcome(self, ticket: int, kind: bytes, body: bytes, buffers: list[memoryview]) -> bytes:
        self._running.pop(ticket, None)
        steps = tuple(self._steps.pop(ticket, ()))
        return reply(kind, body, buffers, steps=steps)

    async def steps(self) -> dict[int, Steps]:
        """Return what the requests that are here have told of themselves, by ticket."""
        return {ticket: tuple(told) for ticket, told in list(self._steps.items()) if told}

    async def stop(self, ticket: int) -> None:
        """Have a request end without a result: now when it waits, else after a step."""
        if (future := self._running.get(ticket)) is not None:
            future.cancel()
        elif ticket >= self._next:
            self._unwanted.add(ticket)

    # ------------------------------------------------------------ life

    async def lives(self) -> None:
        """Never return: the caller learns from this call that the actor is gone."""
        await asyncio.Event().wait()

    async def state(self) -> bytes:
        """Return what ``Engine.stats`` tells of a replica besides its counts."""
        from phyai.deployment.worker import information

        try:
            return reply(RESULT, *encode(information(self._core)))
        except Exception as error:  # caches come and go while they are counted
            return reply(FAILURE, *encode_error(error))

    async def end(self) -> None:
        """Let go of the model in order, before the process is ended."""
        with contextlib.suppress(Exception):
            await _in_thread(self._end)

    def _end(self) -> bytes:
        self._requests.close()
        self._core.close()
        return b""


async def _in_thread(work: Callable[[], bytes]) -> bytes:
    """Run in a thread of its own: Ray's event loop must stay free, and a load may be stuck."""
    done: Future[bytes] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_result(reply(FAILURE, *encode_error(error)))

    threading.Thread(target=run, name="phyai-replica", daemon=True).start()
    return await asyncio.wrap_future(done)


def _order(launch: Launch, place: RankPlace) -> WorkerOrder:
    """Return what a rank is told, once it has opened the file in which the ranks meet.

    Rank 0 has it in memory; the others are on the same node, so they can open it by its number.
    """
    descriptor = place.descriptor
    if place.rank:
        path = f"/proc/{place.pid}/fd/{place.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"ranks of a replica must see each other's processes; got {error} on rank "
                f"{place.rank}. Run Ray's workers of a node as one user, in one container."
            ) from error
    from phyai.deployment.launch import WorkerOrder
    from phyai.ranks.spawned import RankOrder, loopback

    os.environ.update(loopback(os.environ))
    return WorkerOrder(
        replica=0,
        num_threads=launch.num_threads,
        heartbeat_s=0.0,
        result_device="cpu",
        reseed=False,
        ranks=RankOrder(place.rank, descriptor, place.output_rank),
    )


def _host() -> Host:
    import ray

    context = ray.get_runtime_context()
    try:
        stderr = os.readlink("/proc/self/fd/2")
    except OSError:
        stderr = ""
    return Host(
        os.getpid(),
        context.get_node_id(),
        context.get_actor_id() or "",
        ray.util.get_node_ip_address(),
        socket.gethostname(),
        stderr,
    )
