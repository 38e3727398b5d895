"""A router with contracts and no model, and a thread that runs listeners for plain clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Call, Fault, InferReply, InferRequest, TensorData
from phyai_gateway.protocols.base import Listener

T = TypeVar("T")
HORIZON = 12
WAIT_S = 30.0


class StubRouter:
    """Answers with known actions, and keeps the requests it got.

    before: awaited ahead of each answer; may raise a Fault.
    """

    def __init__(self, *contracts: ModelContract) -> None:
        self.contracts = {contract.name: contract for contract in contracts}
        self.seen: list[tuple[InferRequest, Call]] = []
        self.actions: np.ndarray[Any, Any] | None = None
        self.cancelled = 0
        self.before: Callable[[InferRequest], Coroutine[Any, Any, None]] | None = None

    def models(self) -> tuple[str, ...]:
        return tuple(sorted(self.contracts))

    def contract(self, model: str) -> ModelContract:
        if model not in self.contracts:
            raise Fault("not_found", f"model must be one of {', '.join(self.models())}.")
        return self.contracts[model]

    async def infer(self, request: InferRequest, call: Call) -> InferReply:
        self.seen.append((request, call))
        try:
            if self.before is not None:
                await self.before(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.answer(request)

    def answer(self, request: InferRequest) -> InferReply:
        contract = self.contract(request.model)
        actions = self.actions
        if actions is None:
            actions = actions_of(contract.action_dim or 7, rows_of(request))
        data = np.ascontiguousarray(actions, "<f4")
        tensor = TensorData(data.tobytes(), data.shape, "float32")
        return InferReply(request.request_id, tensor, inference_time_us=1500)


def rows_of(request: InferRequest) -> int:
    """Return the rows that a request asks for."""
    if request.instructions:
        return len(request.instructions)
    if request.state is not None and len(request.state.shape) == 2:
        return request.state.shape[0]
    return 1


def actions_of(width: int, rows: int = 1) -> np.ndarray[Any, Any]:
    """Return float32 [rows, HORIZON, width] that are not round numbers."""
    count = rows * HORIZON * width
    return (np.arange(count, dtype=np.float32) / 7 - 3).reshape(rows, HORIZON, width)


class LoopThread:
    """An event loop in a thread: listeners run there, plain clients here."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


@contextmanager
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    try:
        yield thread
    finally:
        thread.close()


@contextmanager
def serving(thread: LoopThread, make: Callable[[], Listener]) -> Iterator[int]:
    """Run one listener; yields its port."""

    async def begin() -> tuple[Listener, int]:
        listener = make()
        return listener, await listener.start()

    listener, port = thread.run(begin())
    try:
        yield port
    finally:
        thread.run(listener.stop())
