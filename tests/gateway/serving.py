"""A model server on loopback in this process, and a small model whose timing tests control."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml

from phyai.adapter import Adapter, AdapterArgs, draw_noise, observations
from phyai.engine import Engine
from phyai.errors import RequestError
from phyai.manifest import AdapterManifest
from phyai.request_values import checked
from phyai.solver import Direct
from phyai.types import Key, Prepared
from phyai_gateway.server import config as server_config
from phyai_gateway.server import engine_host
from phyai_gateway.server.model_server import ModelServer
from tests.core.toy_adapter import registry

HORIZON, ACTION_DIM, STATE_DIM = 6, 3, 4
CAMERAS = ("front", "wrist")
LIMIT_S = 30.0  # of one test's wait; far above what is needed


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    """Forget the models a test registers; modules import it to have it around their tests."""
    with registry():
        yield


class Gate:
    """Holds the model's requests until it is opened; counts those that reached it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.entered = threading.Semaphore(0)

    def shut(self) -> None:
        self.entered = threading.Semaphore(0)
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.entered.release()
        assert self._open.wait(LIMIT_S)

    async def reached(self) -> None:
        """Return when another request is at the gate."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=LIMIT_S)


GATE = Gate()


@dataclass
class ScaleArgs(AdapterArgs):
    max_batch_size: int = 4


@dataclass(frozen=True)
class ScaleRequest:
    """Model request: noise [B, 6, 3] comes back times ``factor``."""

    noise: torch.Tensor
    factor: float = 1.0


class _Gated:
    prediction = "clean"

    def __call__(self, x: Any, step: Any, cache: Any) -> Any:
        GATE.pass_through()
        return {"action": cache.inputs["noise.action"].clone()}


class ScaleAdapter(Adapter):
    """Actions are noise + mean of the state + mean of the pictures; some prompts break it."""

    name = "gateway_scale"
    args_cls = ScaleArgs
    args: ScaleArgs
    fail: ClassVar[dict[str, Exception]] = {
        "refuse": RequestError("prompt must not be 'refuse'; got it. Say something else."),
        "explode": RuntimeError("secret detail in /root/secret.py"),
    }

    def expects(self) -> dict[str, Any]:
        return {"cameras": CAMERAS, "state_dim": STATE_DIM, "prompt": True, "tokenizer": "/a/path"}

    def prepare(self, request: Any) -> Prepared:
        if isinstance(request, ScaleRequest):
            noise = checked("noise", request.noise, (None, HORIZON, ACTION_DIM))
            return Prepared({"noise.action": noise * request.factor}, len(noise), Key())
        rows = observations(request, max_rows=self.args.max_batch_size, options=("seed",))
        actions = []
        for row in rows:
            if row.prompt in self.fail:
                raise self.fail[row.prompt]
            noise = draw_noise((HORIZON, ACTION_DIM), row.seed)
            pixels = float(np.mean([image.mean() for image in row.images.values()]))
            actions.append(noise + float(np.mean(row.state)) + pixels)
            if row.prompt == "nan":
                actions[-1] += float("nan")
        key = Key()
        return Prepared({"noise.action": torch.stack(actions)}, len(rows), key, meta=tuple(rows))

    def denoiser(self) -> Any:
        return _Gated()

    def solver(self) -> Any:
        return Direct()


def manifest(**changes: Any) -> AdapterManifest:
    """Return the small model's manifest, or one that differs in some fields."""
    found = AdapterManifest(
        "gateway_scale",
        "a small model for tests",
        f"{__name__}:ScaleAdapter",
        f"{__name__}:ScaleArgs",
        capabilities={"options": ["seed"], "sessions": False},
    )
    return replace(found, **changes)


def register() -> None:
    """Make the model known to this process, once."""
    Engine.register(ScaleAdapter, manifest())


def write_config(folder: Path, **server: Any) -> Path:
    """Write a file that serves a small model on free ports; plugin and adapter are keys beside."""
    adapter, plugin = server.pop("adapter", None), server.pop("plugin", "gateway_scale")
    data: dict[str, Any] = {
        "plugin": plugin,
        "plugin_args": {"max_batch_size": 4},
        "config": {"device": {"target": "cpu", "params_dtype": "float32"}},
        "server": {"model_name": "scale", "port": 0, "http_port": 0, **server},
    }
    if adapter is not None:
        data["adapter"] = adapter
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


@asynccontextmanager
async def serving(folder: Path, **server: Any) -> AsyncIterator[ModelServer]:
    """Serve the small model; gives the running server."""
    register()
    loaded = server_config.load(write_config(folder, **server))
    running = ModelServer(loaded, lambda config: engine_host.load(config, lambda *_: None))
    try:
        await running.start()
        yield running
    finally:
        GATE.open()
        await running.stop()


def address(server: ModelServer) -> str:
    return f"127.0.0.1:{server.ports['native']}"


def picture(value: int = 10, side: int = 8) -> np.ndarray[Any, Any]:
    return np.full((side, side, 3), value, np.uint8)


def pictures(value: int = 10) -> dict[str, Any]:
    return {name: picture(value) for name in CAMERAS}


def state(value: float = 0.5) -> np.ndarray[Any, Any]:
    return np.full(STATE_DIM, value, np.float32)


def expected(server: ModelServer, value: int, state_value: float, seed: int) -> Any:
    """Return what the engine itself gives for the same observation."""
    from phyai.types import Observation

    assert server.host is not None
    seen = Observation(pictures(value), state(state_value), "go", {"seed": seed})
    return server.host.engine.step(seen).actions


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run an async test with an upper bound on its time."""

    async def bounded() -> None:
        async with asyncio.timeout(2 * LIMIT_S):
            await test()

    asyncio.run(bounded())
