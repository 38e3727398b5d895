"""Stub backends, a clock that tests move, and gateways over them."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from phyai_gateway.backends import Backend, Member
from phyai_gateway.breaker import BreakerSettings
from phyai_gateway.contract import ModelContract
from phyai_gateway.gateway import Gateway, GatewaySettings
from phyai_gateway.health import ProbeSettings
from phyai_gateway.messages import Call, Fault, InferReply, InferRequest, TensorData

PI05 = ModelContract(
    "pi05",
    cameras={"main_images": None, "wrist_images": None},
    state_dim=8,
    action_dim=7,
    horizon=50,
)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class StubBackend(Backend):
    """Answers with its own number as the only action value.

    hold: requests wait for ``release``.  fault: raised instead of an answer.  down: probes fail.
    """

    def __init__(self, number: float = 0.0, contract: ModelContract = PI05) -> None:
        self.number, self.published = number, contract
        self.seen: list[InferRequest] = []
        self.timeouts: list[float] = []
        self.cancelled = 0
        self.running = self.most_running = 0
        self.delay_s = 0.0
        self.fault: Fault | None = None
        self.down = False
        self.closed = False
        self.rows = 0
        self.reply_id: str | None = None
        self.release = asyncio.Event()
        self.release.set()

    async def infer(self, request: InferRequest, timeout: float) -> InferReply:
        self.seen.append(request)
        self.timeouts.append(timeout)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.release.wait()
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if self.fault is not None:
            raise self.fault
        rows = len(request.instructions) or self.rows
        shape = (rows, 1, 1) if rows else (1, 1)
        data = struct.pack("<f", self.number) * max(rows, 1)
        identity = request.request_id if self.reply_id is None else self.reply_id
        return InferReply(identity, TensorData(data, shape, "float32"), inference_time_us=1000)

    async def probe(self) -> None:
        if self.down:
            raise Fault("unavailable", "stub is down.")

    async def contract(self) -> ModelContract:
        return self.published

    async def close(self) -> None:
        self.closed = True


class World:
    """A gateway over stub backends; ``add`` makes one and probes it once."""

    def __init__(self, settings: GatewaySettings, clock: Callable[[], float]) -> None:
        self.stubs: dict[str, StubBackend] = {}
        self.gateway = Gateway(self._connect, settings, clock=clock)
        self._next: StubBackend | None = None

    def _connect(self, endpoint: str, model: str) -> Backend:
        stub = self.stubs[endpoint] = self._next or StubBackend(len(self.stubs))
        self._next = None
        return stub

    async def add(self, stub: StubBackend | None = None, model: str = "pi05") -> StubBackend:
        self._next = stub = stub or StubBackend(len(self.stubs))
        member = self.gateway.add(model, f"10.0.0.1:{1000 + len(self.stubs)}")
        await self.probe(member)
        return stub

    def member(self, stub: StubBackend) -> Member:
        return next(m for m in self.gateway.members() if m.backend is stub)

    async def probe(self, member: Member) -> None:
        await self.gateway.health.probe(self.gateway.router.pools[member.model], member)

    async def ask(self, model: str = "pi05", call: Call | None = None, **fields: Any) -> float:
        """Send one request; returns the number of the stub that answered."""
        request = InferRequest(f"r{time.monotonic_ns()}", model, **fields)
        reply = await self.gateway.router.infer(request, call or Call("test"))
        assert reply.actions is not None
        value: float = struct.unpack_from("<f", reply.actions.data)[0]
        return value


@asynccontextmanager
async def world(
    count: int = 0, *, clock: Callable[[], float] = time.monotonic, **settings: Any
) -> AsyncIterator[World]:
    """A started gateway with ``count`` ready stub backends, probed only when a test says so."""
    settings.setdefault("probe", ProbeSettings(period_s=3600, first_period_s=3600))
    settings.setdefault("breaker", BreakerSettings(slow_start_s=0))
    made = World(GatewaySettings(**settings), clock)
    await made.gateway.start()
    try:
        for _ in range(count):
            await made.add()
        yield made
    finally:
        await made.gateway.stop()


def run(work: Callable[[], Awaitable[None]], limit_s: float = 60.0) -> None:
    """Run an async test, bounded in time."""

    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
            await work()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Wait for a condition that other tasks bring about."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def fault_of(work: object) -> Fault:
    with pytest.raises(Fault) as caught:
        await work  # type: ignore[misc]
    return caught.value
