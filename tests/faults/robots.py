"""Robots that ask one request after the other over plain gRPC, and what became of each request."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from tests.faults.model_process import CAMERAS, STATE_DIM

INFER = "/robot.inference.v1.ModelInference/Infer"
PAUSE_S = 0.05  # after a refusal, as a robot would
CODE = grpc.StatusCode


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: when it was sent and ended, and how. number: of the server that answered."""

    began: float
    ended: float
    code: grpc.StatusCode
    number: int | None = None
    started: bool = True
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.code is CODE.OK

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def message(request_id: str, image: bytes = bytes(8 * 8 * 3), encoding: int = 1) -> bytes:
    """Return one serialised request; encoding: 1 raw 8x8, 2 JPEG."""
    shape = (8, 8, 3) if encoding == 1 else ()
    images = [
        pb.Image(name=name, data=image, shape=shape, dtype=1, encoding=encoding, layout=1)
        for name in CAMERAS
    ]
    state = pb.Tensor(data=bytes(4 * STATE_DIM), shape=(STATE_DIM,), dtype=6)
    whole = pb.InferenceRequest(
        request_id=request_id, images=images, robot_state=state, instruction="go",
        model_name="stub",
    )  # fmt: skip
    data: bytes = whole.SerializeToString()
    return data


class Robots:
    """Closed-loop robots, each with a connection of its own.

    deadline_s: of each request.  pause_s: between requests.  robot_ids: tell the gateway who asks.
    make: returns the message of a request id.
    """

    def __init__(
        self,
        port: int,
        count: int,
        *,
        deadline_s: float = 15.0,
        pause_s: float = 0.0,
        robot_ids: bool = False,
        make: Callable[[str], bytes] = message,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.asked: dict[str, float] = {}
        """When each request that is not answered yet was sent, by its id."""
        self._port, self._deadline_s, self._pause_s = port, deadline_s, pause_s
        self._ids, self._make = robot_ids, make
        self._ends = False
        self._tasks = [asyncio.create_task(self._robot(n)) for n in range(count)]

    async def _robot(self, robot: int) -> None:
        options = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 10_000),  # gRPC's limit of one attempt, too
            ("grpc.max_reconnect_backoff_ms", 500),
        )
        count = 0
        metadata = (("x-robot-id", f"r{robot}"),) if self._ids else ()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._port}", options) as channel:
            ask = channel.unary_unary(INFER)
            while not self._ends:
                count += 1
                outcome = await self._one(ask, f"{robot}-{count}", metadata)
                self.outcomes.append(outcome)
                await asyncio.sleep(self._pause_s if outcome.ok else max(self._pause_s, PAUSE_S))

    async def _one(self, ask: Any, request_id: str, metadata: Any) -> Outcome:
        began = time.monotonic()
        self.asked[request_id] = began
        try:
            raw = await ask(self._make(request_id), timeout=self._deadline_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            hints = dict(error.trailing_metadata() or ())
            text = str(error.details())
            refused = "failed to connect" in text.lower()
            started = not refused and hints.get("x-phyai-started") != "0"
            return Outcome(began, time.monotonic(), error.code(), None, started, text)
        finally:
            del self.asked[request_id]
        reply = pb.InferenceResponse.FromString(raw)
        assert reply.request_id == request_id  # never another robot's or another tick's actions
        (number,) = struct.unpack_from("<f", reply.actions.data)
        return Outcome(began, time.monotonic(), CODE.OK, int(number))

    # ------------------------------------------------------------ what became of them

    def bad(self, since: float = 0.0) -> list[Outcome]:
        """Return what failed of the requests sent after a time."""
        return [one for one in self.outcomes if not one.ok and one.began >= since]

    def lost(self, since: float = 0.0) -> list[Outcome]:
        """Return what may have run and was not answered."""
        return [one for one in self.bad(since) if one.started]

    def good(self, since: float = 0.0) -> list[Outcome]:
        return [one for one in self.outcomes if one.ok and one.began >= since]

    def by_server(self, since: float = 0.0) -> Counter[int | None]:
        return Counter(one.number for one in self.good(since))

    def codes(self, since: float = 0.0) -> Counter[str]:
        return Counter(one.code.name for one in self.outcomes if one.began >= since)

    async def settled(self, since: float) -> None:
        """Wait until everything that was sent before a time is answered or refused."""
        await self.until(lambda: all(began >= since for began in self.asked.values()), 30.0)

    async def more(self, count: int, limit_s: float = 30.0) -> None:
        """Wait for so many further good answers."""
        mark = len(self.good())
        await self.until(lambda: len(self.good()) >= mark + count, limit_s)

    async def until(self, holds: Callable[[], bool], limit_s: float) -> float:
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < limit_s, self.codes()
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    async def end(self) -> None:
        self._ends = True
        await asyncio.gather(*self._tasks)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def robots(port: int, count: int, **given: Any) -> AsyncIterator[Robots]:
    """Robots at work; they end with the block, and none of them has failed in itself."""
    made = Robots(port, count, **given)
    try:
        yield made
        await made.end()
    finally:
        made.cancel()
