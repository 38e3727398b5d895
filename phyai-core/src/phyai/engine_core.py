"""EngineCore: one rank's life cycle, from the plugin lookup to the last close."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from phyai.adapter import Adapter, AdapterArgs
from phyai.backends import with_backends
from phyai.batch_counts import BatchCounts
from phyai.binding import HookBinder
from phyai.core_setup import check_ranks, compile_kernels, graph_backend, load_weights
from phyai.engine_config import EngineConfig, resolve_device
from phyai.errors import CommTimeoutError, EngineUnavailableError, WeightUpdateError
from phyai.graph import GraphService
from phyai.joining import Failed
from phyai.kernel_setup import apply_policy, kernel_table
from phyai.memo import Memo
from phyai.memory import Arena
from phyai.parallel import ParallelService
from phyai.plugin_rules import OBSERVER_HOOKS
from phyai.plugins import find, load_hook_plugins
from phyai.ranks import REQUEST, UPDATE, Ranks, loading_of
from phyai.request_job import Job, exits
from phyai.request_job import RequestInfo as RequestInfo
from phyai.request_watch import OnProgress, Stops, Watch
from phyai.runner import Runner
from phyai.scheduler import Scheduler
from phyai.services import Progress, Services, no_progress
from phyai.session_turn import OnWait
from phyai.sessions import SessionStore, declares_sessions
from phyai.tensor_dump import TensorDumper, open_dumper
from phyai.timers import Profile
from phyai.types import Prepared
from phyai.warmup import warm_up

if TYPE_CHECKING:
    from pluggy import PluginManager
    from torch import Tensor

    from phyai.cuda_graph import Capturer
    from phyai.weights import LoadReport

log = logging.getLogger("phyai")


class EngineCore:
    """The in-process runtime of one rank.

    Start-up order: plugin and argument types, config, device, threads, services, hooks, adapter
    load, parts. One request runs at a time (``lock``); ``prepare`` runs outside the lock.
    In a replica of several ranks all of them run what rank 0 runs, see ``phyai.ranks``.

    plugin: id or ``dist:id``.  version: what the distribution must have; a worker gets both from
    its parent and looks the plugin up in its own environment.
    hooks: the hook plugins; None = those installed.  capturer: what records regions instead of the
    configured back end, see ``GraphService``.
    parallel: this rank and its groups, which end with the core; None = one rank.
    output_rank: the rank whose results count.
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
        parallel: ParallelService | None = None,
        output_rank: int = 0,
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
        parallel = ParallelService.single() if parallel is None else parallel
        check_ranks(record, config.parallel, parallel.mesh)
        self.device: torch.device = resolve_device(config)
        if config.runtime.num_threads is not None:
            torch.set_num_threads(config.runtime.num_threads)
        if config.runtime.seed is not None:
            torch.manual_seed(config.runtime.seed)
        self.lock = threading.Lock()
        self._runs_on: int | None = None  # the thread that runs a batch
        self.closed = False
        self._idle = threading.Condition()
        self._preparing = 0
        self.load_report: LoadReport | None = None
        self.last_timing: Mapping[str, float] = {}  # of the latest request, also a model request
        self.batches = BatchCounts()
        self._runner: Runner | None = None
        self._adapter: Adapter | None = None
        self._dumper: TensorDumper | None = None
        manager = load_hook_plugins() if hooks is None else hooks
        self.services = Services(
            graphs=GraphService(
                graph_backend(config, self.device) if capturer is None else "cuda",
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
            parallel=parallel,
            memo=Memo(config.runtime.memo_bytes),
        )
        self.ranks = Ranks(self, parallel, output_rank) if parallel.mesh.world > 1 else None
        self.scheduler = Scheduler(max_rows(plugin_args), self.services.graphs.static_shapes)
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
            compile_kernels(self.device, progress)
            self._adapter = cls(plugin_args, config, self.services)
            self.load_report = load_weights(self._adapter, self.services.profile)
            self.binder = HookBinder(manager, record, self._adapter, self.services)
            self._notify = {name: self.binder.observers(name) for name in OBSERVER_HOOKS}
            self._runner = Runner(
                self._adapter,
                self.services,
                self.binder,
                self.scheduler,
                config.runtime.max_live_caches,
                self.sessions,
                agree=None if self.ranks is None else loading_of(self.ranks),
            )
            self._dumper = open_dumper(self._adapter.dump_targets(), config.runtime)
            if config.runtime.freeze_kernel_choices:
                kernels.freeze()
            if self.ranks is not None:
                self.ranks.assemble()
            if config.runtime.warmup:
                warm_up(self)
        except BaseException as error:
            try:
                self.close()
            except Exception as second:  # what went wrong first is what the caller must see
                log.warning("closing after a failed start also failed: %r", second)
            if isinstance(error, SystemExit):
                raise exits(plugin, error, "the engine started") from error
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

    @property
    def runs_here(self) -> bool:
        """Whether this thread runs a batch now: we are called by it, as by ``on_progress``."""
        return self._runs_on == threading.get_ident()

    def watch(self, on_progress: OnProgress | None = None) -> Watch:
        """Return what listens to a request, and may stop it where steps are run one by one.

        Several ranks stop when rank 0's is told to; on the others none is heard.
        """
        runner, leads = self._runner, self.ranks is None or self.ranks.leads
        steps = runner is not None and runner.step_unit is not None
        return Watch(on_progress, stoppable=steps and leads)

    def step(
        self,
        request: Any,
        *,
        queued_ms: float = 0.0,
        on_wait: OnWait | None = None,
        watch: Watch | None = None,
        ticket: int | None = None,
    ) -> Any:
        """Run one request, alone; see ``Engine.step``, and ``Turn`` for on_wait.

        On a rank that follows, the request is rank 0's, whatever is given here.
        ticket: number of the call among those of this rank; None = it is made here and now.
        """
        if self.ranks is not None and not self.ranks.leads:
            return self.ranks.answer(REQUEST, self.ranks.ticket() if ticket is None else ticket)
        job = Job(self, request, queued_ms, on_wait, watch, ticket)
        try:
            job.prepare()
            result = None
            if job.prepared is not None:
                (result,) = self.run([job])
                if isinstance(result, Failed):
                    raise result.error
            return job.done(result)
        except BaseException as error:
            failure = job.failed(error)
            if failure is error:
                raise
            raise failure from error

    def run(self, jobs: Sequence[Job]) -> list[Any]:
        """Run prepared requests as one batch; return the result of each, or Failed.

        Raises: what fails them all; see ``Runner.run_joined``.
        """
        requests = [job.prepared for job in jobs if job.prepared is not None]
        stops = Stops([job.watch for job in jobs if job.prepared is not None])
        with self.lock:
            began = time.perf_counter()
            self._runs_on = threading.get_ident()
            try:
                if self.ranks is not None:
                    stops = self.ranks.announce(jobs)
                results, stages = self.run_batch(requests, stops)
            finally:
                self._runs_on = None
        for job in jobs:
            job.timing["queue"] += 1e3 * (began - job.ready_at)
            job.timing.update(stages)
            job.batch_rows = sum(request.rows for request in requests)
        return results

    def run_batch(
        self, requests: Sequence[Prepared], stops: Stops | None = None
    ) -> tuple[list[Any], dict[str, float]]:
        """Return the outcome of each request of a batch, and its milliseconds per stage.

        Under the lock, and on all ranks alike: an announced batch on rank 0, which a rank that
        follows was told of.  stops: see ``Runner.run_joined``.
        """
        timers, run = self.services.profile.timers, self.runner.run_joined
        timers.reset()
        dump = nullcontext() if self._dumper is None else self._dumper.step()
        rows = sum(request.rows for request in requests)
        with self.batches.running(len(requests), rows), dump:
            if self.ranks is None:
                results = run(requests, stops)
            else:
                results = self.ranks.together(lambda: run(requests, stops))
        return results, timers.collect()

    def run_prepared(self, request: Prepared) -> None:
        """Run a request that nobody made, on all ranks; it counts nowhere."""
        with self.lock:
            if self.ranks is None:
                self.runner.run(request)
            else:
                self.ranks.run_prepared(request)

    def update_weights(
        self, items: Iterable[tuple[str, Tensor]], ticket: int | None = None
    ) -> None:
        """Change weights in place on every rank, between two requests; rank 0's values count.

        ticket: see ``step``. Raises: WeightUpdateError; one without a ``__cause__`` has changed
        nothing.
        """
        if self.ranks is None:
            with self.lock:
                self.apply_weights(items)
            return
        ticket = self.ranks.ticket() if ticket is None else ticket
        if not self.ranks.leads:
            self.ranks.answer(UPDATE, ticket)
            return
        with self.lock:
            self.apply_weights(self.ranks.announce_update(items, ticket))

    def apply_weights(self, items: Any) -> None:
        """Take over weights on this rank, under the lock; items: a mapping, or pairs."""

        def act() -> None:
            self.services.memo.clear()  # also when the update fails half-way
            try:
                self.adapter.update_weights(items)
                self.runner.refresh()
            except (WeightUpdateError, EngineUnavailableError, CommTimeoutError):
                raise
            except (Exception, SystemExit) as error:  # a plugin must not end the process
                raise WeightUpdateError(
                    f"weights must fit plugin {self.plugin!r}; got {type(error).__name__}: "
                    f"{error}. Some may be new already: update again, or create a new Engine."
                ) from error

        if self.ranks is None:
            act()
        else:
            self.ranks.together(act)

    def notify(self, hook: str, info: RequestInfo) -> None:
        """Tell the observers of a hook."""
        self._notify[hook](info)

    def observer_failures(self) -> dict[str, int]:
        """Return how often observers of each plugin raised; those that never did are left out."""
        return dict(sum((notify.failures for notify in self._notify.values()), Counter[str]()))

    def prepare(self, request: Any) -> Prepared:
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
        """Return bytes by what holds them: model (weights and tables), buffers, graphs, memo.

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
            "memo": self.services.memo.nbytes,
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
            if self.ranks is not None:
                self.ranks.close()  # under the lock: nobody announces a batch that will not run
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
            self.services.memo.clear,
            self.services.graphs.close,
            lambda: self.services.memory.release(""),
            self.services.parallel.close,
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


def max_rows(args: AdapterArgs) -> int:
    """Return the adapter's max_batch_size, 1 when it has no such argument."""
    return int(getattr(args, "max_batch_size", 1))
