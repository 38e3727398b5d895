"""EngineCore: one rank's life cycle, from the plugin lookup to the last close."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from phyai.adapter import Adapter, AdapterArgs
from phyai.backends import with_backends
from phyai.binding import HookBinder
from phyai.engine_config import EngineConfig, resolve_device
from phyai.errors import CapacityError, ConfigError, EngineUnavailableError, PluginError
from phyai.graph import GraphService
from phyai.kernel_setup import apply_policy, kernel_table
from phyai.kernels import native
from phyai.memory import Arena, is_out_of_memory
from phyai.plugin_rules import OBSERVER_HOOKS
from phyai.plugins import find, load_hook_plugins
from phyai.runner import Runner
from phyai.scheduler import Scheduler
from phyai.services import Progress, Services, no_progress
from phyai.sessions import SessionStore, Turn, declares_sessions
from phyai.tensor_dump import TensorDumper, open_dumper
from phyai.timers import Profile
from phyai.types import ActionChunk, Media, Observation, Prepared
from phyai.warmup import warm_up

if TYPE_CHECKING:
    from pluggy import PluginManager

    from phyai.cuda_graph import Capturer
    from phyai.weights import LoadReport

log = logging.getLogger("phyai")


@dataclass(frozen=True)
class RequestInfo:
    """What observers are told about a request; never its content."""

    plugin: str
    rows: int | None = None
    milliseconds: float | None = None
    error: str | None = None


class EngineCore:
    """The in-process runtime of one rank.

    Start-up order: plugin and argument types, config, device, threads, services, hooks, adapter
    load, parts. One request runs at a time (``lock``); ``prepare`` runs outside the lock.

    plugin: id or ``dist:id``.  version: what the distribution must have; a worker gets both from
    its parent and looks the plugin up in its own environment.
    hooks: the hook plugins; None = those installed.  capturer: what records regions instead of the
    configured back end, see ``GraphService``.
    """

    def __init__(
        self,
        plugin: str,
        plugin_args: AdapterArgs,
        config: EngineConfig,
        *,
        version: str | None = None,
        progress: Progress = no_progress,
        hooks: PluginManager | None = None,
        capturer: Capturer | None = None,
    ) -> None:
        self.plugin, self.args = plugin, plugin_args
        record = find(plugin, version=version)
        cls = record.load_class()
        expected = record.load_args()
        if not isinstance(plugin_args, expected):
            raise TypeError(
                f"plugin_args of plugin {plugin!r} must be {expected.__name__}; "
                f"got {type(plugin_args).__name__}."
            )
        self.manifest = record.manifest
        self.config = config
        self.device: torch.device = resolve_device(config)
        if config.runtime.num_threads is not None:
            torch.set_num_threads(config.runtime.num_threads)
        if config.runtime.seed is not None:
            torch.manual_seed(config.runtime.seed)
        self.lock = threading.Lock()
        self.closed = False
        self._idle = threading.Condition()
        self._preparing = 0
        self.load_report: LoadReport | None = None
        self.last_timing: Mapping[str, float] = {}  # of the latest request, also a model request
        self._runner: Runner | None = None
        self._adapter: Adapter | None = None
        self._dumper: TensorDumper | None = None
        manager = load_hook_plugins() if hooks is None else hooks
        self.services = Services(
            graphs=GraphService(
                _graph_backend(config, self.device) if capturer is None else "cuda",
                self.device,
                static_shapes=config.runtime.static_shapes,
                capturer=capturer,
            ),
            kernels=kernel_table(config, self.device, record.id),
            memory=Arena(self.device, config.runtime.memory_budget_bytes),
            profile=Profile(self.device),
            device=self.device,
            dtype=config.device.params_dtype,
            progress=progress,
        )
        self.sessions = SessionStore(
            self.services.memory,
            capacity=config.runtime.max_sessions,
            ttl_s=config.runtime.session_ttl_s,
            plugin=record.id,
            declared=declares_sessions(record.manifest.capabilities if record.manifest else {}),
        )
        try:
            started = time.perf_counter()
            rows = HookBinder(manager, record, None, self.services).kernel_rows()
            self.services.kernels.add(rows)
            kernels = self.services.kernels
            apply_policy(kernels, with_backends(config, kernels, self.device))
            _compile_kernels(self.device, progress)
            self._adapter = cls(plugin_args, config, self.services)
            self.load_report = _load(self._adapter)
            self.binder = HookBinder(manager, record, self._adapter, self.services)
            self._notify = {name: self.binder.observers(name) for name in OBSERVER_HOOKS}
            self._runner = Runner(
                self._adapter,
                self.services,
                self.binder,
                Scheduler(max_rows(plugin_args), self.services.graphs.static_shapes),
                config.runtime.max_live_caches,
                self.sessions,
            )
            self._dumper = open_dumper(self._adapter.dump_targets(), config.runtime)
            if config.runtime.freeze_kernel_choices:
                kernels.freeze()
            if config.runtime.warmup:
                warm_up(self)
        except BaseException as error:
            try:
                self.close()
            except Exception as second:  # what went wrong first is what the caller must see
                log.warning("closing after a failed start also failed: %r", second)
            if isinstance(error, SystemExit):
                raise _exits(plugin, error, "the engine started") from error
            raise
        log.info(
            "plugin %s ready in %.2f s on %s", plugin, time.perf_counter() - started, self.device
        )
        self._notify["phyai_engine_ready"](RequestInfo(plugin))

    @property
    def adapter(self) -> Adapter:
        if self._adapter is None:
            raise closed_error()
        return self._adapter

    @property
    def runner(self) -> Runner:
        if self._runner is None:
            raise closed_error()
        return self._runner

    def step(self, request: Any, *, queued_ms: float = 0.0) -> Any:
        """Run one request; see ``Engine.step``."""
        self._notify["phyai_request_started"](RequestInfo(self.plugin))
        started = time.perf_counter()
        turn = self.sessions.turn(request)
        self.services.profile.timers.reset()
        try:
            with turn:
                waited_ms = 1e3 * (time.perf_counter() - started)  # for a session in use
                result, decoded, timing = self._answer(turn, queued_ms + waited_ms)
            timing["total"] = queued_ms + 1e3 * (time.perf_counter() - started)
        except BaseException as error:
            milliseconds = 1e3 * (time.perf_counter() - started)
            self._notify["phyai_request_finished"](
                RequestInfo(self.plugin, turn.rows, milliseconds, repr(error))
            )
            if isinstance(error, SystemExit):
                raise _exits(self.plugin, error, "a request ran") from error
            raise
        self.last_timing = timing
        self._notify["phyai_request_finished"](RequestInfo(self.plugin, turn.rows, timing["total"]))
        return _with_timing(request, result, timing, decoded)

    def _answer(self, turn: Turn, queued_ms: float) -> tuple[Any, bool, dict[str, float]]:
        """Return the result of a request, whether it is decoded, and its timing.

        Rows that a session has seen before get their stored result; the others are prepared and
        run. When none is left, nothing is.
        """
        timing, result, prepared = {"queue": queued_ms}, None, None
        if turn.runs:
            started = time.perf_counter()
            prepared = self._prepare(turn.request)
            if not turn.adopt(prepared, self.runner.spec):
                prepared = self._prepare(turn.request)
                turn.adopt(prepared, self.runner.spec)
            timing["prepare"] = 1e3 * (time.perf_counter() - started)
        if turn.runs and prepared is not None:
            waiting = time.perf_counter()
            with self.lock:
                timing["queue"] += 1e3 * (time.perf_counter() - waiting)
                with nullcontext() if self._dumper is None else self._dumper.step():
                    result = self.runner.run(prepared)
                timing.update(self.services.profile.timers.collect())
        merged = turn.merged(result)
        decoded = isinstance(merged, list) if prepared is None else prepared.meta is not None
        return merged, decoded, timing

    def observer_failures(self) -> dict[str, int]:
        """Return how often observers of each plugin raised; those that never did are left out."""
        return dict(sum((notify.failures for notify in self._notify.values()), Counter[str]()))

    def _prepare(self, request: Any) -> Prepared:
        """Prepare on the caller's thread, many at a time; ``close`` waits for the last one."""
        with self._idle:
            adapter = self.adapter
            self._preparing += 1
        try:
            return adapter.prepare(request)
        finally:
            with self._idle:
                self._preparing -= 1
                self._idle.notify_all()

    def memory_report(self) -> dict[str, int | None]:
        """Return bytes by what holds them: model (weights and tables), buffers, graphs.

        buffers: static buffers of the live caches; buffers_peak: the most they were;
        budget: the limit of buffers, None = none.
        """
        memory, runner = self.services.memory, self.runner
        return {
            "model": runner.model_nbytes(),
            "buffers": memory.nbytes,
            "buffers_peak": memory.peak_nbytes,
            "budget": memory.budget_bytes,
            "graphs": self.services.graphs.nbytes,
        }

    def close(self) -> None:
        """Release everything; every step runs, the first error is raised at the end."""
        with self.lock, self._idle:
            if self.closed:
                return
            self.closed = True
            runner, adapter = self._runner, self._adapter
            self._runner = self._adapter = None
            self._idle.wait_for(lambda: self._preparing == 0)
        errors: list[BaseException] = []
        steps: list[Callable[[], Any]] = []
        if runner is not None:
            steps += [
                lambda: self._notify["phyai_engine_closing"](RequestInfo(self.plugin)),
                runner.close,
            ]
        if self._dumper is not None:
            steps.append(self._dumper.close)
        if adapter is not None:
            steps.append(adapter.close)
        steps += [
            self.sessions.close,
            self.services.graphs.close,
            lambda: self.services.memory.release(""),
        ]
        for step in steps:
            try:
                step()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def closed_error() -> EngineUnavailableError:
    """Return the error of a request to an engine that was closed."""
    return EngineUnavailableError(
        "engine must be open to take requests; it is closed. Create a new Engine.",
        reason="closed",
    )


def _exits(plugin: str, error: SystemExit, when: str) -> PluginError:
    """Return what to raise instead: a plugin must not end the process of the robot."""
    return PluginError(
        f"code of plugin {plugin!r} or of its hooks must not end the process; it raised "
        f"SystemExit({error.code!r}) while {when}. Raise another error there."
    )


def max_rows(args: AdapterArgs) -> int:
    """Return the adapter's max_batch_size, 1 when it has no such argument."""
    return int(getattr(args, "max_batch_size", 1))


def _compile_kernels(device: torch.device, progress: Progress) -> None:
    """Have the C++ kernels ready before a layer asks for them; the first time that takes long."""
    if device.type == "cpu" and not native.built():
        progress(0, 1, "compiling C++ kernels, once")
        native.available()
        progress(1, 1, "compiled C++ kernels")


def _load(adapter: Adapter) -> LoadReport | None:
    try:
        return adapter.load()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(
            f"weights of plugin {adapter.name!r} must fit the memory of the device; got {error}. "
            "Check the sizes in the checkpoint's config, or use a larger device."
        ) from error


def _graph_backend(config: EngineConfig, device: torch.device) -> Any:
    """Return the back end of a config on a device; a tensor dump needs the Python of eager."""
    wanted = _wanted_backend(config, device)
    if config.runtime.debug_tensor_dump_dir is None or wanted == "eager":
        return wanted
    log.warning("graph back end %s is left out: a tensor dump needs eager regions", wanted)
    return "eager"


def _wanted_backend(config: EngineConfig, device: torch.device) -> str:
    backend = config.runtime.graph_backend
    if backend == "cuda" and not config.runtime.use_cuda_graph:
        return "eager"
    if backend != "auto":
        if backend == "cuda" and device.type != "cuda":
            raise ConfigError(
                f"runtime.graph_backend 'cuda' needs a CUDA device; got {str(device)!r}. "
                "Use 'auto', 'eager' or 'inductor'."
            )
        return backend
    return "cuda" if device.type == "cuda" and config.runtime.use_cuda_graph else "eager"


def _with_timing(request: Any, result: Any, timing: Mapping[str, float], decoded: bool) -> Any:
    """Put the stage timing into decoded results; a lone Observation gets a lone result."""
    if not decoded:
        return result
    rows = [
        replace(row, timing=dict(timing)) if isinstance(row, (ActionChunk, Media)) else row
        for row in result
    ]
    return rows[0] if isinstance(request, Observation) else rows
