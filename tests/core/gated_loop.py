"""An engine whose model a test holds, so that what is submitted meanwhile waits and joins."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import torch

from phyai import Engine, Observation
from phyai.request_loop import RequestLoop
from tests.core.toy_adapter import FlowAdapter, open_engine

FOREVER_MS = 1e9  # a batch that starts before this starts for another reason
WAIT_S = 30.0


class Gate(FlowAdapter):
    """Waits in the network of a request whose state starts with 9; nine steps tell it apart."""

    name = "toy-gate"
    fails: BaseException | None = None

    def load(self) -> None:
        super().load()
        self.entered, self.open = threading.Event(), threading.Event()

    def denoiser(self) -> Any:
        gate, inner = self, super().denoiser()

        class Waiting:
            prediction = inner.prediction

            def __call__(self, x: Any, step: Any, cache: Any) -> Any:
                first = cache.inputs["state"][: cache.rows, 0].tolist()
                if 9.0 in first and not gate.open.is_set():
                    gate.entered.set()
                    assert gate.open.wait(WAIT_S)
                if gate.fails is not None and 8.0 in first:
                    raise gate.fails
                out = inner(x, step, cache)
                poison = torch.where(cache.inputs["state"][:, :1, None] == 7.0, float("nan"), 0.0)
                return {leaf: value + poison for leaf, value in out.items()}

        return Waiting()


def observation(first: float = 0.0, **options: Any) -> Observation:
    return Observation(state=[first, 0.5, 0.0, 0.0], options=options)


def loop_of(engine: Engine) -> RequestLoop:
    loop: RequestLoop = engine._back._loop  # type: ignore[union-attr]
    return loop


def batches(engine: Engine) -> dict[str, Any]:
    (replica,) = engine.stats()["replicas"]
    return dict(replica["batches"])


class Held:
    """An engine whose model is busy until the block ends: what is submitted inside waits."""

    def __init__(self, cls: type[Gate] = Gate, wait_ms: float = FOREVER_MS, **args: Any) -> None:
        runtime = {"batch_wait_ms": wait_ms, **args.pop("runtime", {})}
        self.engine = open_engine(cls, runtime=runtime, **args)
        self.gate: Any = self.engine.adapter

    def __enter__(self) -> Held:
        rows = self.engine.core.scheduler.max_rows
        first = [observation(9.0)] * rows  # full: starts at once
        self.first = self.engine.submit(first)
        assert self.gate.entered.wait(WAIT_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self.gate.open.set()


def alone(request: Any, cls: type[Any] = Gate, **args: Any) -> Any:
    with open_engine(cls, **args) as engine:
        return engine.step(request)


def result(future: Future[Any]) -> Any:
    return future.result(WAIT_S)


def until(true: Any) -> None:
    limit = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.001)
