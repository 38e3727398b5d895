"""The main path of one replica, from a prepared batch to results.

run(batch) = cache.load -> sessions.load -> encode -> start -> solve(predict) -> known -> output
             -> validate -> sessions.commit

Every part is bound to plain callables once, when its key is first seen; nothing passes through
the plugin manager while a request runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from phyai.addresses import nbytes
from phyai.cache import Cache
from phyai.errors import (
    ActionRejected,
    CapacityError,
    ConfigError,
    PluginContractError,
    SessionLost,
)
from phyai.known import Hold, impose
from phyai.rtc import GuidedRTC
from phyai.scheduler import Scheduler
from phyai.sessions import SessionStore
from phyai.types import (
    ActionChunk,
    Denoiser,
    Grid,
    Key,
    Prediction,
    Prepared,
    Solver,
    Step,
)

if TYPE_CHECKING:
    from phyai.adapter import Adapter
    from phyai.binding import HookBinder
    from phyai.services import Services
    from phyai.types import Tensors

_Place: TypeAlias = tuple[Key, int]  # what a live cache belongs to: key and batch bucket


class Runner:
    """Runs prepared batches through one adapter; holds the caches and graphs of its live keys."""

    def __init__(
        self,
        adapter: Adapter,
        services: Services,
        binder: HookBinder,
        scheduler: Scheduler,
        max_live_caches: int = 16,
        sessions: SessionStore | None = None,
    ) -> None:
        self.adapter, self.services, self.scheduler = adapter, services, scheduler
        self.sessions = sessions or SessionStore(services.memory, plugin=adapter.name)
        self.conditioning = binder.bind_part("phyai_conditioning", adapter.conditioning())
        self.spec = binder.bind_part("phyai_cache", adapter.cache())
        self.solver: Solver = binder.bind_part("phyai_solver", adapter.solver())
        self.output = binder.bind_part("phyai_output", adapter.output())
        self.network: Denoiser = binder.bind_denoiser("network", adapter.denoiser())
        self._binder = binder
        self.validators = binder.validators()
        self.max_live_caches = max_live_caches
        self._bound: OrderedDict[tuple[Key, int], _Bound] = OrderedDict()
        self._names = 0
        self._changes = 0
        self._counted = (-1, 0)  # changes when the model's bytes were counted, and the bytes
        _check_prediction(self.solver, self.network, adapter.name)
        self.rollout_solver: Solver | None = binder.bind_part(
            "phyai_rollout_solver", adapter.rollout_solver()
        )
        # Bound again for each key; what is broken must fail here and not at the first request.
        _check_prediction(self.solver, self.predict("off"), adapter.name)
        unit = getattr(adapter, "graph_unit", "loop")
        if unit != "loop":
            raise PluginContractError(
                f"graph_unit of adapter {adapter.name!r} must be 'loop' in this version; got "
                f"{unit!r}. Leave it out."
            )

    def run(self, batch: Prepared) -> Any:
        """Return one result per row (Observations) or the model-space tensors (model request)."""
        stage = self.services.profile.stage
        place = (batch.key, self.scheduler.batch_bucket(batch.rows))
        with torch.no_grad():
            try:
                with stage("load"):
                    bound = self._load(place, batch)
                with stage("encode"):
                    bound.encode()
                with stage("solve"):
                    bound.solve()
                with stage("output"):
                    results = self._output(bound.result(), bound.cache, batch)
            except SessionLost:  # closed while its request waited: nothing has run
                raise
            except BaseException as error:
                self._binder.add_note(error)
                self._forget(place)  # its buffers may hold NaN, or half a request
                raise
            with stage("validate"):
                self._validate(results, batch)
                self.sessions.commit(bound.cache, batch, results)
        return results

    def refresh(self) -> None:
        """Rebuild weight-derived tables of every live grid, in place.

        Graphs whose tensors are at other addresses afterwards are captured anew. Sessions are kept:
        their rows are of the robot, made with the weights of their time.
        """
        self.adapter.refresh()
        for bound in self._bound.values():
            _each(bound.predict, "prepare_grid", bound.grid)
        self._changes += 1
        self.services.graphs.recapture_moved()

    def predict(self, rtc: str) -> Denoiser:
        """Return predict = RTC(Guidance(Hold(network))) inside the hooks of stage prediction."""
        predict: Denoiser = Hold(_Recorded(self.network, self.services))
        if rtc == "guided":
            predict = GuidedRTC(predict, self.services.profile.recorder)
        return self._binder.bind_denoiser("prediction", predict)

    def model_objects(self, predict: Denoiser) -> Mapping[str, object]:
        """Return what holds the tensors that regions read besides their cache's.

        Besides the parts everything else the adapter holds: its ``start`` is part of a region.
        """
        return {
            **self.adapter.dump_targets(),
            "conditioning": _chain(self.conditioning),
            "solver": _chain(self.solver),
            "denoiser": _chain(predict),
            "adapter": self.adapter,
        }

    def model_nbytes(self) -> int:
        """Return the bytes of those tensors: weights and tables.

        Counted anew after a refresh and when caches came or went, for their grids have tables.
        """
        changes, (then, count) = self._changes, self._counted
        if then != changes:
            count = nbytes(self.model_objects(self.network))
            self._counted = changes, count  # as of before the walk: a change meanwhile is not lost
        return count

    def close(self) -> None:
        while self._bound:
            self._forget(next(iter(self._bound)))
        self.sessions.close()

    # ------------------------------------------------------------ internals

    def _output(self, x: Tensors, cache: Cache, batch: Prepared) -> Any:
        for leaf, tensor in x.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ActionRejected(
                    f"result {leaf!r} must be finite; got NaN or infinity. Check the checkpoint "
                    "and the inputs of this request."
                )
        if batch.meta is None:
            return self.output.tensors(x, cache, batch)
        results = self.output.decode(x, cache, batch)
        if len(results) != batch.rows:
            raise PluginContractError(
                f"output.decode of {self.adapter.name!r} must return one result per row; got "
                f"{len(results)} for {batch.rows} rows."
            )
        return results

    def _validate(self, results: Any, batch: Prepared) -> None:
        """Block chunks nobody may execute. A model request is checked for finiteness alone."""
        if batch.meta is None:
            return
        for chunk in results:
            if isinstance(chunk, ActionChunk):
                self._validate_chunk(chunk)

    def _validate_chunk(self, chunk: ActionChunk) -> None:
        if not np.isfinite(chunk.actions).all():
            raise ActionRejected(
                "actions must be finite in robot units; got NaN or infinity. Check the "
                "checkpoint's statistics."
            )
        guarded = _read_only(chunk) if self.validators else chunk
        for name, validator in self.validators:
            try:
                problem = validator(guarded)
            except (Exception, SystemExit) as error:
                raise ActionRejected(
                    f"validator {name!r} raised {type(error).__name__}: {error}. "
                    "The chunk was blocked."
                ) from error
            if problem:
                raise ActionRejected(f"validator {name!r} blocked the chunk: {problem}")

    def _load(self, place: _Place, batch: Prepared) -> _Bound:
        """Bind and load; over the memory budget the least recent caches make room first."""
        while True:
            try:
                bound = self._bind(place)
                bound.load(batch)
                return bound
            except CapacityError:
                self._forget(place)
                if not self._bound:
                    raise
                self._forget(next(iter(self._bound)))

    def _bind(self, place: _Place) -> _Bound:
        bound = self._bound.get(place)
        if bound is None:
            while len(self._bound) >= self.max_live_caches:
                self._forget(next(iter(self._bound)))
            self._names += 1
            bound = self._bound[place] = _Bound(self, *place, f"cache{self._names}")
            self._changes += 1
        self._bound.move_to_end(place)
        return bound

    def _forget(self, place: _Place) -> None:
        """Close a live cache, and drop its grid's tables when no other cache uses them."""
        bound = self._bound.pop(place, None)
        if bound is None:
            return
        bound.close()
        sigmas = bound.grid[0].grid
        if all(other.grid[0].grid != sigmas for other in self._bound.values()):
            _each(bound.predict, "release_grid", bound.grid)
        self._changes += 1


class _Bound:
    """What one (key, batch bucket) owns: cache, grid, composed prediction, graphs."""

    def __init__(self, runner: Runner, key: Key, bucket: int, name: str) -> None:
        self.runner, self.key = runner, key
        services, spec = runner.services, runner.spec(key)
        _refuse_unbuilt(key)
        runner.sessions.declare(spec)
        self.grid = runner.solver.grid(key)
        self.predict = runner.predict(key.rtc)
        _check_prediction(runner.solver, self.predict, runner.adapter.name)
        self.cache = Cache(name, key, bucket, spec, services.memory, services.device, "cond")
        try:
            _each(self.predict, "prepare_grid", self.grid)
        except BaseException:
            self.cache.close()
            raise
        self.x: Tensors = {}
        self._name = name
        self._regions: dict[str, Callable[[], Any]] = {}

    def load(self, batch: Prepared) -> None:
        self.cache.load(batch)
        self.runner.sessions.load(self.cache, batch)
        if (plan := _outermost(self.runner.conditioning, "plan")) is not None:
            plan(self.cache, batch)
        if not self.x:
            self._allocate_x()

    def encode(self) -> None:
        self._region("encode", self._encode, self.runner.conditioning)()

    def solve(self) -> None:
        self._region("solve", self._solve, self.runner.solver, self.predict)()

    def result(self) -> Tensors:
        """Return x of the batch's own rows, in fresh tensors."""
        own = {leaf: tensor[: self.cache.rows].clone() for leaf, tensor in self.x.items()}
        for leaf, tensor in own.items():
            self.runner.services.profile.record(f"result.{leaf}", tensor)
        return own

    def close(self) -> None:
        self.runner.services.graphs.release(self._name)
        self._regions.clear()
        self.x.clear()
        self.cache.close()

    def _encode(self) -> None:
        self.runner.conditioning.encode(self.cache)

    def _solve(self) -> None:
        x = impose(self.runner.adapter.start(self.cache), self.cache)
        x = self.runner.solver.solve(self.predict, x, self.cache, self.grid)
        for leaf, tensor in impose(x, self.cache).items():
            self.x[leaf].copy_(tensor)

    def _allocate_x(self) -> None:
        start = self.runner.adapter.start(self.cache)
        names = {leaf: f"{self.cache.name}/x.{leaf}" for leaf in start}
        fresh = self.runner.services.memory.allocate_all(
            {names[leaf]: (tuple(t.shape), t.dtype) for leaf, t in start.items()}
        )
        self.x = {leaf: fresh[name] for leaf, name in names.items()}

    def _region(self, name: str, fn: Callable[[], Any], *parts: Any) -> Callable[[], Any]:
        region = self._regions.get(name)
        if region is None:
            unsafe = next((type(p).__name__ for p in parts if not _capture_safe(p)), None)
            region = self.runner.services.graphs.capture(
                f"{self._name}/{name}",
                fn,
                (self.key, self.cache.capacity),
                unsafe=unsafe,
                reads=self.runner.model_objects(self.predict),
                updates=tuple(self.cache.session_buffers.values()),
            )
            self._regions[name] = region
        return fn if self.runner.services.profile.recorder.inside else region


class _Recorded:
    """The bare network, putting each step's x and prediction into the recorder when one listens."""

    def __init__(self, inner: Denoiser, services: Services) -> None:
        self.inner, self.recorder = inner, services.profile.recorder
        self.prediction: Prediction = inner.prediction

    def __call__(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        out = self.inner(x, step, cache)
        if self.recorder.active:
            for leaf in x:
                self.recorder.put(f"steps.{leaf}.x", x[leaf][: cache.rows])
                self.recorder.put(f"steps.{leaf}.{self.prediction}", out[leaf][: cache.rows])
        return out


def _read_only(chunk: ActionChunk) -> ActionChunk:
    """Return the chunk over the same memory, for eyes only: what is judged must not change."""
    views = {name: getattr(chunk, name).view() for name in ("actions", "mask", "model_actions")}
    for view in views.values():
        view.flags.writeable = False
    return replace(chunk, **views)


def _chain(part: Any) -> Sequence[Any]:
    """Return a part and everything it wraps (attribute ``inner``), outside first."""
    parts = []
    while part is not None:
        parts.append(part)
        part = getattr(part, "inner", None)
    return parts


def _capture_safe(part: Any) -> bool:
    return all(getattr(p, "capture_safe", True) for p in _chain(part))


def _each(predict: Denoiser, method: str, grid: Grid) -> None:
    """Call the outermost part that has ``method`` (prepare_grid, release_grid) with the grid."""
    if (call := _outermost(predict, method)) is not None:
        call(grid)


def _outermost(part: Any, method: str) -> Callable[..., Any] | None:
    """Return ``method`` of a part, or of the first part inside it that has it."""
    found = (getattr(p, method, None) for p in _chain(part))
    return next((call for call in found if call is not None), None)


def _check_prediction(solver: Solver, denoiser: Denoiser, adapter: str) -> None:
    if denoiser.prediction not in solver.accepts:
        raise PluginContractError(
            f"solver {type(solver).__name__} accepts {', '.join(sorted(solver.accepts))}; the "
            f"denoiser of {adapter!r} predicts {denoiser.prediction!r}. Wrap it with "
            "phyai.solver.to_velocity or choose another solver."
        )


def _refuse_unbuilt(key: Key) -> None:
    """Raise for what the contract knows but nothing acts on yet: a wrong result is worse."""
    if key.branches != ("cond",):
        raise ConfigError(
            f"guidance branches must be ('cond',) in this version; got {key.branches!r}. "
            "Set guidance_scale to 1."
        )
    if key.rollout:
        raise ConfigError(
            "key.rollout must be False in this version, which records no rollouts; got True."
        )
