"""Engine: what users hold. Construct, step, submit, stats, close."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phyai import env, plugins
from phyai.adapter import Adapter, AdapterArgs
from phyai.deployment import DeploymentConfig, replica_devices, resolve_mode
from phyai.engine_config import EngineConfig
from phyai.engine_core import EngineCore, closed_error
from phyai.errors import ConfigError
from phyai.errors import EngineUnavailableError as EngineUnavailableError
from phyai.manifest import AdapterManifest
from phyai.services import Progress, no_progress

log = logging.getLogger("phyai")

Entry = Adapter
EntryArgs = AdapterArgs


@dataclass(frozen=True)
class EngineArgs:
    """Which plugin to run, with what arguments, how.

    config=None starts from ``EngineConfig.auto()``; ``PHYAI_*`` variables override either.

    >>> EngineArgs("my_policy", AdapterArgs()).plugin
    'my_policy'
    """

    plugin: str
    plugin_args: AdapterArgs
    config: EngineConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.plugin, str):
            raise TypeError(f"plugin must be a str; got {type(self.plugin).__name__}.")
        if self.config is not None and not isinstance(self.config, EngineConfig):
            raise TypeError(f"config must be an EngineConfig; got {type(self.config).__name__}.")


@dataclass
class _Waiting:
    engine: Engine  # an engine whose owner only kept futures lives until they are done
    request: Any
    future: Future[Any]
    since: float = field(default_factory=time.perf_counter)


class Engine:
    """Runs one plugin; thread-safe.

    A request is an Observation (-> ActionChunk), a sequence of them (-> list of ActionChunk) or the
    plugin's own model request (-> model-space tensor). Options ``session_id`` and ``seq`` make it
    one of a session, see ``phyai.sessions``; a weight update keeps the sessions.

    >>> import torch
    >>> from phyai.engine_config import DeviceConfig
    >>> from phyai.types import Key, Prepared
    >>> class Falling:
    ...     prediction = "velocity"
    ...     def __call__(self, x, step, cache):
    ...         return {"action": torch.ones_like(x["action"])}
    >>> class FallingAdapter(Adapter):
    ...     name = "falling"
    ...     def prepare(self, request):
    ...         return Prepared({"noise.action": request}, len(request), Key(num_steps=4))
    ...     def denoiser(self):
    ...         return Falling()
    >>> _ = Engine.register(FallingAdapter)
    >>> config = EngineConfig(device=DeviceConfig(target="cpu", params_dtype="float32"))
    >>> with Engine(EngineArgs("falling", AdapterArgs(), config)) as engine:
    ...     engine.step(torch.zeros(1, 2, 1)).flatten()
    tensor([-1., -1.])
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        deployment: DeploymentConfig | None = None,
        progress: Progress = no_progress,
    ) -> None:
        if not isinstance(args, EngineArgs):
            raise TypeError(f"args must be an EngineArgs; got {type(args).__name__}.")
        if deployment is not None and not isinstance(deployment, DeploymentConfig):
            raise TypeError(
                f"deployment must be a DeploymentConfig; got {type(deployment).__name__}."
            )
        self.args = args
        self.deployment = deployment or DeploymentConfig()
        for name in env.unknown_names():
            log.warning("variable %s is read by nothing.%s", name, env.suggestion(name))
        self.config = EngineConfig.from_env(args.config)
        self.mode = resolve_mode(self.deployment, self.config.parallel, os.environ)
        _check_single(self.deployment, self.config)
        self.config = _placed(self.deployment, self.config)
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._wake = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._latencies: collections.deque[float] = collections.deque(maxlen=1024)
        self._done = self._failed = self._running = 0
        self._core = EngineCore(args.plugin, args.plugin_args, self.config, progress=progress)

    # ------------------------------------------------------------ requests

    def step(self, request: Any) -> Any:
        """Run one request and return its result.

        Raises: EngineUnavailableError when closed; RequestError for a bad request, after which
        the engine goes on.
        """
        with self._wake:
            self._check_open()
            self._running += 1
        return self._run(request, 0.0)

    def submit(self, request: Any) -> Future[Any]:
        """Queue one request; never raises for a closed engine, the Future then holds the error.

        The Future can be cancelled until its request starts.
        """
        future: Future[Any] = Future()
        with self._wake:
            if self._closed:
                future.set_exception(closed_error())
                return future
            if self._worker is None:
                self._worker = threading.Thread(
                    target=_serve,
                    args=(weakref.ref(self), self._wake, self._queue),
                    name="phyai-engine",
                    daemon=True,
                )
                self._worker.start()
            self._queue.append(_Waiting(self, request, future))
            self._wake.notify()
        return future

    def _run(self, request: Any, queued_ms: float) -> Any:
        started = time.perf_counter()
        try:
            result = self._core.step(request, queued_ms=queued_ms)
        except BaseException:
            with self._wake:
                self._running -= 1
                self._failed += 1
            raise
        with self._wake:
            self._running -= 1
            self._done += 1
            self._latencies.append(1e3 * (time.perf_counter() - started))
        return result

    # ------------------------------------------------------------ sessions

    def reset_session(self, session_id: str) -> None:
        """Forget what a session keeps; its next request is seq 0. Unknown ids are fine.

        A request of the session that is running still gets its result, and leaves nothing.
        Raises: RequestError for a bad id; EngineUnavailableError when closed.
        """
        self._check_open()
        self._core.sessions.reset(session_id)

    def close_session(self, session_id: str) -> None:
        """Forget a session and free its place; as ``reset_session`` for the rest.

        A request of it that has not begun to run fails with SessionClosed, too, unless it is seq 0.
        Its next request is a SessionClosed error, or seq 0, which opens it anew.
        """
        self._check_open()
        self._core.sessions.end(session_id)

    # ------------------------------------------------------------ life cycle

    def setup(self) -> None:
        """Start managed workers (none inline). Raises EngineUnavailableError when closed."""
        self._check_open()

    def close(self) -> None:
        """Fail what waits, let the running request finish, release everything; idempotent."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            pending = list(self._queue)
            self._queue.clear()
            self._wake.notify_all()
        for waiting in pending:
            if waiting.future.set_running_or_notify_cancel():
                waiting.future.set_exception(closed_error())
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join()
        self._core.close()

    def __enter__(self) -> Engine:
        self.setup()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        with contextlib.suppress(Exception):
            self.close()

    # ------------------------------------------------------------ introspection

    @property
    def adapter(self) -> Adapter:
        """The running adapter (inline mode)."""
        return self._core.adapter

    entry = adapter

    @property
    def core(self) -> EngineCore:
        return self._core

    def stats(self) -> dict[str, Any]:
        """Return counts, latencies (ms), memory, sessions, graphs, observer failures."""
        with self._wake:
            latencies = np.array(self._latencies)
            replica: dict[str, Any] = {
                "id": 0,
                "devices": [str(self._core.device)],
                "state": "closed" if self._closed else "ready",
                "in_flight": self._running + len(self._queue),
                "done": self._done,
                "failed": self._failed,
                "restarts": 0,
            }
        for q in (50, 95, 99):
            replica[f"p{q}_ms"] = float(np.percentile(latencies, q)) if latencies.size else None
        replica["memory_bytes"] = self._core.services.memory.nbytes
        with contextlib.suppress(EngineUnavailableError):  # closed, maybe a moment ago
            replica["memory"] = self._core.memory_report()
        replica["sessions"] = self._core.sessions.stats()
        replica["observer_failures"] = self._core.observer_failures()
        replica["graphs"] = self._core.services.graphs.stats()
        return {"plugin": self.args.plugin, "mode": self.mode, "replicas": [replica]}

    @staticmethod
    def register(cls: type[Adapter], manifest: AdapterManifest | None = None) -> type[Adapter]:
        """Register an adapter class for this process (notebooks); workers need an entry point."""
        plugins.register(cls, manifest)
        return cls

    @staticmethod
    def registered() -> tuple[str, ...]:
        """Return the ids of discovered and registered adapters, importing none of them."""
        return plugins.registered()

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error()


def _serve(
    owner: weakref.ref[Engine], wake: threading.Condition, queue: collections.deque[_Waiting]
) -> None:
    """Run queued requests; holds the engine only while there is one, so it can be collected."""
    while (waiting := _next(owner, wake, queue)) is not None:
        future = waiting.future
        try:
            queued_ms = 1e3 * (time.perf_counter() - waiting.since)
            future.set_result(waiting.engine._run(waiting.request, queued_ms))
        except BaseException as error:
            future.set_exception(error)
        del waiting, future


def _next(
    owner: weakref.ref[Engine], wake: threading.Condition, queue: collections.deque[_Waiting]
) -> _Waiting | None:
    """Return the next request that was not cancelled; None when the engine is closed or gone."""
    with wake:
        while True:
            while not queue:
                engine = owner()
                if engine is None or engine._closed:
                    return None
                del engine
                if owner() is None:  # ours was the last reference: close() has already notified
                    return None
                wake.wait()
            waiting = queue.popleft()
            if waiting.future.set_running_or_notify_cancel():
                waiting.engine._running += 1
                return waiting
            del waiting


def _placed(deployment: DeploymentConfig, config: EngineConfig) -> EngineConfig:
    """Return the config with the device the deployment names.

    Raises: ConfigError when the two contradict each other: one of them is a mistake.
    """
    replicas = replica_devices(deployment, config.parallel)
    if replicas is None:
        return config
    device, target = replicas[0][0], config.device.target
    if device == target:
        return config
    if target == "cuda" and device.startswith("cuda:"):
        return config.replace(device=config.device.replace(target=device))
    raise ConfigError(
        f"DeploymentConfig.devices must agree with EngineConfig.device.target {target!r}; got "
        f"{device!r}. Change one of them (PHYAI_DEVICE overrides the target)."
    )


def _check_single(deployment: DeploymentConfig, config: EngineConfig) -> None:
    if deployment.replica_count > 1:
        raise ConfigError(
            "replica_count must be 1 in this version, which has no replica pool yet; got "
            f"{deployment.replica_count}. Start one Engine per process instead."
        )
    world = config.parallel.infer_replica_world_size()
    if world > 1:
        raise ConfigError(
            "parallel sizes must be 1 in this version, which runs one rank per replica; got a "
            f"replica of {world} ranks."
        )
