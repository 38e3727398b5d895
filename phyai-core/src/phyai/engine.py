"""Engine: what users hold. Construct, step, submit, stats, close."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phyai import env, plugins
from phyai.adapter import Adapter, AdapterArgs
from phyai.core_setup import check_ranks
from phyai.deployment import DeploymentConfig, resolve_mode
from phyai.deployment.inline import Inline
from phyai.deployment.managed import open_pool
from phyai.engine_config import EngineConfig
from phyai.engine_core import EngineCore, closed_error
from phyai.errors import EngineUnavailableError as EngineUnavailableError
from phyai.errors import WeightUpdateError
from phyai.manifest import AdapterManifest
from phyai.ranks.launched import join_launched
from phyai.request_watch import OnProgress
from phyai.services import Progress, no_progress

if TYPE_CHECKING:
    from torch import Tensor

    from phyai.deployment.pool import ReplicaPool

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
        if self.config.parallel.infer_replica_world_size() > 1:
            check_ranks(plugins.find(args.plugin), self.config.parallel, None)
        self._closed = False
        self._progress = progress
        self._back: Inline | ReplicaPool
        if self.mode == "local" or self.mode == "ray":
            self._back = open_pool(
                self.mode, args.plugin, args.plugin_args, self.config, self.deployment
            )
            if self.deployment.auto_start:
                self._back.start(progress)
        else:
            self._back = Inline(self._core_here())

    # ------------------------------------------------------------ requests

    def step(self, request: Any) -> Any:
        """Run one request and return its result.

        Raises: EngineUnavailableError when closed; RequestError for a bad request, after which
        the engine goes on.
        """
        return self._back.step(request)

    def submit(self, request: Any, on_progress: OnProgress | None = None) -> Future[Any]:
        """Queue one request; never raises for a closed engine, the Future then holds the error.

        on_progress: called as ``on_progress(done, total)`` with solver steps, on the thread that
            runs the request: after each step of an adapter with graph_unit ``step``, else once at
            the end. What it raises is logged and changes nothing. It must not wait for the engine:
            ``step``, ``update_weights_all`` and ``close`` are errors there.

        Inline, the Future can be cancelled until its request starts and, with graph_unit ``step``,
        between two of its steps. With replicas the request is sent at once, whole, to the one with
        the fewest in flight, which leaves it alike when it is cancelled, see docs/replicas.md. With
        ``runtime.batch_wait_ms`` requests that wait together at one replica may share a batch, see
        docs/performance.md.
        Raises: TypeError for an on_progress that cannot be called.
        """
        if on_progress is not None and not callable(on_progress):
            raise TypeError(
                f"on_progress must be callable, or None; got {type(on_progress).__name__}. "
                "Pass a function of (done, total)."
            )
        # An engine whose owner only kept futures lives until they are done.
        return self._back.submit(request, keep=self, on_progress=on_progress)

    # ------------------------------------------------------------ sessions

    def reset_session(self, session_id: str) -> None:
        """Forget what a session keeps; its next request is seq 0. Unknown ids are fine.

        A request of the session that is running still gets its result, and leaves nothing.
        Raises: RequestError for a bad id; EngineUnavailableError when closed.
        """
        self._check_open()
        self._back.session_call("reset_session", session_id)

    def close_session(self, session_id: str) -> None:
        """Forget a session and free its place; as ``reset_session`` for the rest.

        A request of it that has not begun to run fails with SessionClosed, too, unless it is seq 0.
        Its next request is a SessionClosed error, or seq 0, which opens it anew.
        """
        self._check_open()
        self._back.session_call("close_session", session_id)

    # ------------------------------------------------------------ weights

    @property
    def version(self) -> int:
        """How many weight updates there were, or the number given to the last one."""
        return self._back.version

    def update_weights_all(
        self,
        items: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        version: int | None = None,
    ) -> int:
        """Give every replica new values of named weights (checkpoint names); return the version.

        Replicas get a copy with the new weights and switch to it together, while requests go on;
        sessions are kept. Inline the weights are changed in place, between two requests.
        version: the engine's version afterwards; None = one more.
        Raises: WeightUpdateError; with replicas, all of them have the weights they had then.
        """
        self._check_open()
        if version is not None and (type(version) is not int or version < 0):
            raise WeightUpdateError(
                f"version must be an int >= 0 or None; got {version!r}. Nothing was changed."
            )
        pairs = items.items() if isinstance(items, Mapping) else items
        return self._back.update_weights(pairs, version)

    # ------------------------------------------------------------ life cycle

    def setup(self) -> None:
        """Start managed workers (none inline). Raises EngineUnavailableError when closed."""
        self._check_open()
        self._back.start(self._progress)

    def close(self) -> None:
        """Fail what waits, let what runs finish, release everything; idempotent.

        Replicas get ``shutdown_timeout_s`` for what they run; what is left then fails.
        """
        closed, self._closed = self._closed, True
        try:
            self._back.close()
        except EngineUnavailableError:  # it is open: it would have waited for whoever called
            self._closed = closed
            raise

    def __enter__(self) -> Engine:
        self.setup()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or getattr(self, "_back", None) is None:
            return
        with contextlib.suppress(Exception):
            self.close()

    # ------------------------------------------------------------ introspection

    @property
    def adapter(self) -> Adapter:
        """The running adapter; None where it lives in other processes."""
        return None if self._inline is None else self._inline.core.adapter  # type: ignore[return-value]

    entry = adapter

    @property
    def core(self) -> EngineCore:
        """The core of this process; None where there are others."""
        return None if self._inline is None else self._inline.core  # type: ignore[return-value]

    def describe(self) -> dict[str, Any]:
        """Return what servers need to know of the model, in every mode.

        expects: see ``Adapter.expects``.  max_rows: of one request.  device: of a replica.
        manifest: an AdapterManifest, or None.
        """
        manifest = plugins.find(self.args.plugin).manifest
        return {**self._back.describe(), "manifest": manifest}

    def stats(self) -> dict[str, Any]:
        """Return per replica: state, counts, latencies (ms), memory, sessions, graphs, memo,
        batches.

        busy_s: time the model ran.  What a worker says of itself (memory, sessions, graphs,
        memo, batches, busy_s) is as of its last sign of life. In a replica of several ranks all
        of it is rank 0's, under a launcher this rank's.
        """
        return {"plugin": self.args.plugin, "mode": self.mode, "replicas": self._back.stats()}

    @staticmethod
    def register(cls: type[Adapter], manifest: AdapterManifest | None = None) -> type[Adapter]:
        """Register an adapter class for this process (notebooks); workers need an entry point."""
        plugins.register(cls, manifest)
        return cls

    @staticmethod
    def registered() -> tuple[str, ...]:
        """Return the ids of discovered and registered adapters, importing none of them."""
        return plugins.registered()

    def _core_here(self) -> EngineCore:
        """Return the core of this process; in mode external it is one rank of its replica."""
        args, parallel = self.args, None
        if self.config.parallel.infer_replica_world_size() > 1:
            self.config, parallel = join_launched(self.config, os.environ)
        try:
            return EngineCore(
                args.plugin,
                args.plugin_args,
                self.config,
                progress=self._progress,
                parallel=parallel,
                output_rank=self.deployment.output_rank,
            )
        except BaseException:
            if parallel is not None:
                parallel.close()
            raise

    @property
    def _inline(self) -> Inline | None:
        return self._back if isinstance(self._back, Inline) else None

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error()
