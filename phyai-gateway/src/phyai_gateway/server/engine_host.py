"""The engine of a model server: built, warmed up, asked, watched and closed here.

The only module of this package that imports torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from phyai import plugins
from phyai.engine import Engine
from phyai.engine_core import max_rows
from phyai.errors import PhyaiError
from phyai.joining import with_deadline
from phyai.manifest import AdapterManifest
from phyai_gateway.contract import MAX_IN_FLIGHT, ModelContract
from phyai_gateway.messages import Call, Fault, InferReply, InferRequest, TensorData
from phyai_gateway.proto.encoded import decoded
from phyai_gateway.server.config import HARD_TIMEOUT_S, ServerConfig, TensorOptions
from phyai_gateway.server.dispatcher import Dispatcher, Done
from phyai_gateway.server.faults import fault_of
from phyai_gateway.server.policy import WARM_UP_SESSION, Policy
from phyai_gateway.server.tensor_backend import LABEL, TensorBackend

log = logging.getLogger("phyai.server")

STATS_EVERY_S = 0.5  # stats walk the model's weights; probes come often
RUN_SHARE = 0.9  # of the time that is left; the reply needs the rest

_DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bool": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Backend(Protocol):
    """How requests become the engine's and its results replies."""

    contract: ModelContract

    def build(self, request: InferRequest) -> Any: ...
    def engine_request(self, built: Any) -> Any: ...
    def reply(
        self, request: InferRequest, built: Any, result: Any, engine_s: float
    ) -> InferReply: ...


class EngineHost:
    """Owns one engine and answers requests with it.

    Made by ``load``; needs a running event loop from ``open`` on. ``engine`` may be any object with
    the methods of Engine that are used here.
    """

    def __init__(self, engine: Any, backend: Backend, config: ServerConfig) -> None:
        self.engine, self.backend, self._config = engine, backend, config
        self._dispatcher: Dispatcher | None = None
        self._contract: ModelContract | None = None
        self._stats: tuple[float, dict[str, Any]] = (-1e9, {})

    @property
    def contract(self) -> ModelContract:
        return self._contract or self.backend.contract

    @property
    def dispatcher(self) -> Dispatcher:
        if self._dispatcher is None:
            raise Fault("unavailable", "server is starting. Wait until it is ready.", retry_after=1)
        return self._dispatcher

    def open(self) -> None:
        """Begin to take requests, on the running event loop."""
        replicas = max(len(self.stats()["replicas"]), 1)
        options = self._config.server
        workers = options.workers or replicas * self._at_once()
        queue = 2 * workers if options.max_queue is None else options.max_queue
        self._dispatcher = Dispatcher(self._submit, workers=workers, max_queue=queue)
        # So that a gateway keeps more than these in its own queue, where any server may take them.
        found = self.backend.contract
        extra = {**found.extra, MAX_IN_FLIGHT: max(workers + queue, 1)}
        self._contract = replace(found, extra=extra)

    async def infer(self, request: InferRequest, call: Call) -> tuple[InferReply, Done]:
        """Return the reply to a request, and how long it took; raises Fault."""
        left = min(call.remaining(self._config.server.request_timeout_s), HARD_TIMEOUT_S)
        seen: dict[str, Any] = {}

        until = time.monotonic() + left

        def build() -> tuple[Any, float]:
            seen["request"] = whole = decoded(request)
            seen["built"] = self.backend.build(whole)
            return self.backend.engine_request(seen["built"]), until

        try:
            done = await self.dispatcher.run(build, until)
            reply = self.backend.reply(seen["request"], seen["built"], done.result, done.engine_s)
        except Exception as error:
            raise fault_of(error, request.request_id) from error
        return reply, done

    def _submit(self, due: tuple[Any, float]) -> Future[Any]:
        """Give the engine a request; one that joins others must know how long it may wait."""
        request, until = due
        if self._joins:
            request = with_deadline(request, RUN_SHARE * (until - time.monotonic()))
        future: Future[Any] = self.engine.submit(request)
        return future

    @property
    def _joins(self) -> bool:
        config = getattr(self.engine, "config", None)
        return config is not None and config.runtime.batch_wait_ms > 0

    def _at_once(self) -> int:
        """Return how many requests a replica gets: with joining, those of a batch and the next."""
        return 2 * max_rows(self._config.args.plugin_args) if self._joins else 1

    def stats(self, *, max_age_s: float = STATS_EVERY_S) -> dict[str, Any]:
        """Return ``Engine.stats()``, at most so old."""
        at, found = self._stats
        if time.monotonic() - at > max_age_s:
            found = self.engine.stats()
            self._stats = (time.monotonic(), found)
        return found

    def not_ready(self) -> str | None:
        """Return why no request would be taken now; None when one would."""
        if self._dispatcher is None:
            return "starting"
        if self._dispatcher.draining:
            return "draining"
        replicas = self.stats()["replicas"]
        if not any(replica["state"] == "ready" for replica in replicas):
            return "no replica is ready"
        return None

    def close(self) -> None:
        """Stop taking requests and close the engine, which waits for the one that runs."""
        if self._dispatcher is not None:
            self._dispatcher.close()
        self.engine.close()


def load(config: ServerConfig, progress: Callable[[int, int, str], None]) -> EngineHost:
    """Return a host with weights loaded and one request behind it; blocks meanwhile.

    Raises: what the engine's constructor raises.
    """
    manifest = plugins.find(config.args.plugin).manifest
    engine = Engine(config.args, deployment=config.deployment, progress=progress)
    try:
        engine.setup()
        backend = _backend(engine, manifest, config)
        if isinstance(backend, Policy) and config.server.warm_up:
            _warm_up(engine, backend)
    except BaseException:
        engine.close()
        raise
    return EngineHost(engine, backend, config)


def _backend(
    engine: Engine, manifest: AdapterManifest | None, config: ServerConfig
) -> Policy | TensorBackend:
    rows, name = max_rows(config.args.plugin_args), config.server.model_name
    if isinstance(config.adapter, TensorOptions):
        log.warning("model %r is served as raw tensors: %s", name, LABEL)
        return TensorBackend(
            name,
            config.adapter,
            manifest=manifest,
            max_rows=rows,
            to_tensor=partial(to_tensor, device=config.adapter.input_device),
            to_data=to_data,
        )
    return Policy(
        name,
        config.adapter,
        manifest=manifest,
        expects=engine.describe()["expects"],  # of a worker where the model lives in others
        max_rows=rows,
        max_image_pixels=config.server.max_image_pixels,
    )


def _warm_up(engine: Engine, policy: Policy) -> None:
    """Run a made-up observation; what only this request dislikes is no reason not to serve."""
    started = time.perf_counter()
    try:
        # At once, so that every replica gets one; a session has only one replica.
        count = 1 if policy.contract.stateful else len(engine.stats()["replicas"])
        for future in [engine.submit(policy.sample()) for _ in range(count)]:
            policy.learn(future.result())
    except (PhyaiError, TypeError, ValueError) as error:
        log.warning("warm-up request was refused, so the first one will be slower: %s", error)
        return
    if policy.contract.stateful:
        engine.close_session(WARM_UP_SESSION)
    log.info("warmed up in %.2f s", time.perf_counter() - started)


def to_tensor(data: TensorData, device: str = "cpu") -> torch.Tensor:
    """Return a tensor with memory of its own.

    >>> to_tensor(TensorData(bytes(8), (2,), "float32"))
    tensor([0., 0.])
    """
    dtype = _DTYPES[data.dtype]
    if not data.nbytes:  # torch refuses empty buffers
        return torch.empty(data.shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(data.data), dtype=dtype).reshape(data.shape).to(device)


def to_data(value: Any) -> TensorData | None:
    """Return a tensor or array for the wire; None for anything else and for other dtypes."""
    if isinstance(value, np.ndarray):
        try:
            value = torch.from_numpy(np.ascontiguousarray(value))
        except TypeError:
            return None
    if not isinstance(value, torch.Tensor) or value.dtype not in _DTYPE_NAMES:
        return None
    host = value.detach().to("cpu").contiguous()
    raw = host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
    return TensorData(raw, tuple(host.shape), _DTYPE_NAMES[value.dtype])
