"""What one (key, batch bucket) owns: a cache per guidance branch, grid, prediction, regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from phyai.cache import Cache
from phyai.errors import ConfigError, PluginContractError
from phyai.guidance import check_guidance, check_scale, local_branches
from phyai.known import impose
from phyai.types import Denoiser, Grid, Key, Prepared, Solver, Step

if TYPE_CHECKING:
    from phyai.runner import Runner
    from phyai.types import Tensors

OnStep = Callable[[Step], None]


class Bound:
    """The parts of a runner, bound to the static buffers of one key and batch bucket.

    caches: one per branch that this rank evaluates.  cache: the first of them; start, solver, RTC,
    output and sessions work with it. The conditional branch's, except on the second of two cfg
    ranks, which has no other than its own.
    """

    def __init__(self, runner: Runner, key: Key, bucket: int, name: str) -> None:
        self.runner, self.key = runner, key
        self._name = name
        refuse_unbuilt(key)
        check_guidance(key)
        branches = local_branches(key, runner.services.parallel.cfg)
        self.grid = runner.solver.grid(key)
        self.x: Tensors = {}
        self._regions: dict[str, Callable[[], Any]] = {}
        self.caches: list[Cache] = []
        try:
            for branch in branches:
                self.caches.append(self._new_cache(branch, bucket))
            self.cache = self.caches[0]
            self.predict = runner.predict(key, {cache.branch: cache for cache in self.caches})
            check_prediction(runner.solver, self.predict, runner.adapter.name)
            each(self.predict, "prepare_grid", self.grid)
        except BaseException:
            self.close()
            raise

    def load(self, batch: Prepared) -> None:
        if len(self.key.branches) > 1:
            check_scale(batch)
        plan = outermost(self.runner.conditioning, "plan")
        for cache in self.caches:
            own = batch.for_branch(cache.branch)
            cache.load(own)
            self._load_sessions(cache, own)
            if plan is not None:
                plan(cache, own)
        if not self.x:
            self._allocate_x()

    def encode(self) -> None:
        for cache in self.caches:
            name, encode = f"{cache.name}/encode", partial(self.runner.conditioning.encode, cache)
            self._region(name, encode, self.runner.conditioning)()

    def solve(self, on_step: OnStep | None = None) -> None:
        """Integrate; in unit ``step`` the update runs eagerly and ``on_step`` hears of each.

        In unit ``loop`` all steps are one region, and it hears of the last one.
        """
        if self.runner.step_unit is not None:
            self._solve(on_step)
            return
        self._region(f"{self._name}/solve", self._solve, self.runner.solver, self.predict)()
        if on_step is not None:
            on_step(self.grid[-1])

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
        for cache in reversed(self.caches):  # the first one's memory is that of all
            if self.runner.step_unit is not None:
                self.runner.step_unit.detach(cache)
            cache.close()

    # ------------------------------------------------------------ internals

    def _new_cache(self, branch: str, bucket: int) -> Cache:
        """Return the cache of a branch; its key has the branch's own buckets."""
        key = self.key.for_branch(branch)
        name = self._name if not self.caches else f"{self._name}/{branch}"
        runner, spec = self.runner, self.runner.spec(key)
        runner.sessions.declare(spec)
        memory, device = runner.services.memory, runner.services.device
        return Cache(name, key, bucket, spec, memory, device, branch)

    def _load_sessions(self, cache: Cache, batch: Prepared) -> None:
        """Put the sessions' rows into the conditional branch; the others start from zeros."""
        if cache.branch == self.key.branches[0]:
            self.runner.sessions.load(cache, batch)
            return
        for tensor in cache.session_buffers.values():
            tensor.zero_()

    def _solve(self, on_step: OnStep | None = None) -> None:
        hears: dict[str, Any] = {} if on_step is None else {"on_step": on_step}
        x = impose(self.runner.adapter.start(self.cache), self.cache)
        x = self.runner.solver.solve(self.predict, x, self.cache, self.grid, **hears)
        for leaf, tensor in impose(x, self.cache).items():
            self.x[leaf].copy_(tensor)

    def _allocate_x(self) -> None:
        start = self.runner.adapter.start(self.cache)
        shapes = {f"x.{leaf}": (tuple(t.shape), t.dtype) for leaf, t in start.items()}
        unit = self.runner.step_unit
        if unit is not None:
            outs = {f"out.{leaf}": (tuple(t.shape), torch.float32) for leaf, t in start.items()}
            shapes = {**shapes, **outs, "position": ((1,), torch.int64)}
        fresh = self.runner.services.memory.allocate_all(
            {f"{self._name}/{name}": shape for name, shape in shapes.items()}
        )
        buffers = {name: fresh[f"{self._name}/{name}"] for name in shapes}
        self.x = {leaf: buffers[f"x.{leaf}"] for leaf in start}
        if unit is not None:
            reads = self.runner.model_objects(self.predict)
            for cache in self.caches:
                unit.attach(cache, self.grid[0].grid, buffers, unsafe=_unsafe(unit), reads=reads)

    def _region(self, name: str, fn: Callable[[], Any], *parts: Any) -> Callable[[], Any]:
        region = self._regions.get(name)
        if region is None:
            updates = [t for cache in self.caches for t in cache.session_buffers.values()]
            region = self.runner.services.graphs.capture(
                name,
                fn,
                (self.key, self.cache.capacity),
                unsafe=_unsafe(*parts),
                reads=self.runner.model_objects(self.predict),
                updates=tuple(updates),
            )
            self._regions[name] = region
        return fn if self.runner.services.profile.recorder.inside else region


def chain(part: Any) -> Sequence[Any]:
    """Return a part and everything it wraps (attribute ``inner``), outside first."""
    parts = []
    while part is not None:
        parts.append(part)
        part = getattr(part, "inner", None)
    return parts


def outermost(part: Any, method: str) -> Callable[..., Any] | None:
    """Return ``method`` of a part, or of the first part inside it that has it."""
    found = (getattr(p, method, None) for p in chain(part))
    return next((call for call in found if call is not None), None)


def each(predict: Denoiser, method: str, grid: Grid) -> None:
    """Call the outermost part that has ``method`` (prepare_grid, release_grid) with the grid."""
    if (call := outermost(predict, method)) is not None:
        call(grid)


def check_prediction(solver: Solver, denoiser: Denoiser, adapter: str) -> None:
    if denoiser.prediction not in solver.accepts:
        raise PluginContractError(
            f"solver {type(solver).__name__} accepts {', '.join(sorted(solver.accepts))}; the "
            f"denoiser of {adapter!r} predicts {denoiser.prediction!r}. Wrap it with "
            "phyai.solver.to_velocity or choose another solver."
        )


def refuse_unbuilt(key: Key) -> None:
    """Raise for what the contract knows but nothing acts on yet: a wrong result is worse."""
    if key.rollout:
        raise ConfigError(
            "key.rollout must be False in this version, which records no rollouts; got True."
        )


def _unsafe(*parts: Any) -> str | None:
    """Return the class of the first part that says it cannot be captured."""
    unsafe = (type(p).__name__ for p in parts if not _capture_safe(p))
    return next(unsafe, None)


def _capture_safe(part: Any) -> bool:
    return all(getattr(p, "capture_safe", True) for p in chain(part))
