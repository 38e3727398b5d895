"""The main path of one replica, from a prepared batch to results.

run(batch) = cache.load -> sessions.load -> encode -> start -> solve(predict) -> known -> output
             -> validate -> sessions.commit

A batch is one request, or several whole ones that were joined.

Every part is bound to plain callables once, when its key is first seen; nothing passes through
the plugin manager while a request runs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from phyai.addresses import nbytes
from phyai.bound import Bound, OnStep, chain, check_prediction, each
from phyai.cache import Cache
from phyai.errors import (
    ActionRejected,
    CapacityError,
    CommTimeoutError,
    PluginContractError,
    SessionLost,
)
from phyai.guidance import BRANCHES, COND, Guidance
from phyai.joining import Failed, joined, part_of, row_ranges
from phyai.known import Hold
from phyai.request_watch import Stops
from phyai.result_checks import check_chunks, not_finite
from phyai.rtc import GuidedRTC
from phyai.scheduler import Scheduler
from phyai.sessions import SessionStore
from phyai.step_unit import StepUnit
from phyai.types import Denoiser, Key, Prediction, Prepared, Solver, Step

if TYPE_CHECKING:
    from phyai.adapter import Adapter
    from phyai.binding import HookBinder
    from phyai.services import Services
    from phyai.types import Tensors

log = logging.getLogger("phyai")

_Place: TypeAlias = tuple[Key, int]  # what a live cache belongs to: key and batch bucket
Agree: TypeAlias = Callable[[BaseException | None], None]
"""agree(error): all ranks have loaded, or failed to; raises one error on all where any has."""


class Runner:
    """Runs prepared batches through one adapter; holds the caches and graphs of its live keys.

    agree: how ranks that load different branches agree that they have; None = there are none.
    """

    def __init__(
        self,
        adapter: Adapter,
        services: Services,
        binder: HookBinder,
        scheduler: Scheduler,
        max_live_caches: int = 16,
        sessions: SessionStore | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.adapter, self.services, self.scheduler = adapter, services, scheduler
        self.sessions = sessions or SessionStore(services.memory, plugin=adapter.name)
        self.conditioning = binder.bind_part("phyai_conditioning", adapter.conditioning())
        self.spec = binder.bind_part("phyai_cache", adapter.cache())
        self.solver: Solver = binder.bind_part("phyai_solver", adapter.solver())
        self.output = binder.bind_part("phyai_output", adapter.output())
        self.step_unit: StepUnit | None = None
        around = self._as_step_unit if _unit(adapter) == "step" else None
        self.network: Denoiser = binder.bind_denoiser("network", adapter.denoiser(), around=around)
        self._binder = binder
        self.validators = binder.validators()
        self.max_live_caches, self.agree = max_live_caches, agree
        self._bound: OrderedDict[tuple[Key, int], Bound] = OrderedDict()
        self._names = 0
        self._changes = 0
        self._counted = (-1, 0)  # changes when the model's bytes were counted, and the bytes
        self._warned = False
        check_prediction(self.solver, self.network, adapter.name)
        self.rollout_solver: Solver | None = binder.bind_part(
            "phyai_rollout_solver", adapter.rollout_solver()
        )
        # Bound again for each key; what is broken must fail here and not at the first request.
        check_prediction(self.solver, self.predict(Key()), adapter.name)

    def run(self, batch: Prepared) -> Any:
        """Return one result per row (Observations) or the model-space tensors (model request)."""
        (outcome,) = self.run_joined((batch,))
        if isinstance(outcome, Failed):
            raise outcome.error
        return outcome

    def run_joined(self, requests: Sequence[Prepared], stops: Stops | None = None) -> list[Any]:
        """Run whole requests as one batch; return the result of each, or Failed with its own error.

        stops: hears of the steps; who was stopped gets a CancelledError. None = nobody.
        Raises: what fails them all. Nothing was kept of any then, and each can be run alone.
        """
        stops = Stops() if stops is None else stops
        stops.told(0, 0)
        stage = self.services.profile.stage
        batch = joined(requests)
        parts = row_ranges(requests)
        place = (batch.key, self.scheduler.batch_bucket(batch.rows))
        with torch.no_grad():
            try:
                with stage("load"):
                    bound = self._load(place, batch)
                with stage("encode"):
                    bound.encode()
                with stage("solve"):
                    bound.solve(_hearing(stops, bound))
                with stage("output"):
                    x = bound.result()
                    outcomes, bad = self._output(x, bound.cache, batch, parts)
            except (SessionLost, CancelledError):
                raise  # closed while it waited, nothing has run; or stopped between two steps
            except BaseException as error:
                self._binder.add_note(error)
                self._forget(place)  # its buffers may hold NaN, or half a request
                raise
            with stage("validate"):
                stopped = stops.sealed()
                for number, request in enumerate(requests):
                    if number in stopped:
                        outcomes[number] = Failed(CancelledError())
                    elif number not in bad:
                        first = parts[number].start
                        outcomes[number] = self._accept(
                            outcomes[number], request, bound.cache, first
                        )
        if bad:
            self._forget(place)
        return outcomes

    def refresh(self) -> None:
        """Rebuild weight-derived tables of every live grid, in place.

        Graphs whose tensors are at other addresses afterwards are captured anew. Sessions are kept:
        their rows are of the robot, made with the weights of their time.
        """
        self.services.memo.clear()
        self.adapter.refresh()
        for bound in self._bound.values():
            each(bound.predict, "prepare_grid", bound.grid)
        self._changes += 1
        self.services.graphs.recapture_moved()

    def predict(self, key: Key, caches: Mapping[str, Cache] | None = None) -> Denoiser:
        """Return predict = RTC(Guidance(Hold(network))) inside the hooks of stage prediction.

        caches: by branch, of those this rank evaluates; without them nothing is guided.
        """
        recorder, cfg = self.services.profile.recorder, self.services.parallel.cfg
        predict: Denoiser = Hold(_Recorded(self.network, self.services))
        if caches and key.branches == BRANCHES:
            interval = key.guidance_interval
            predict = Guidance(predict, caches, interval=interval, cfg=cfg, recorder=recorder)
        elif caches and cfg.size > 1 and not self._warned:
            self._warned = True
            log.warning("a request without guidance: %d cfg ranks compute the same", cfg.size)
        if key.rtc == "guided":
            predict = GuidedRTC(predict, recorder)
        return self._binder.bind_denoiser("prediction", predict)

    def model_objects(self, predict: Denoiser) -> Mapping[str, object]:
        """Return what holds the tensors that regions read besides their cache's.

        Besides the parts everything else the adapter holds: its ``start`` is part of a region.
        """
        return {
            **self.adapter.dump_targets(),
            "conditioning": chain(self.conditioning),
            "solver": chain(self.solver),
            "denoiser": chain(predict),
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

    def _output(
        self, x: Tensors, cache: Cache, batch: Prepared, parts: Sequence[slice]
    ) -> tuple[list[Any], dict[int, ActionRejected]]:
        """Return what each request gets, and the errors of those whose numbers are not finite."""
        bad = not_finite(x, parts)
        if len(bad) == len(parts):
            raise bad[0]
        for error in bad.values():
            self._binder.add_note(error)
        if batch.meta is None:
            results = self.output.tensors(x, cache, batch)
        else:
            results = list(self.output.decode(x, cache, batch))
            if len(results) != batch.rows:
                raise PluginContractError(
                    f"output.decode of {self.adapter.name!r} must return one result per row; got "
                    f"{len(results)} for {batch.rows} rows."
                )
        if len(parts) == 1:
            return [results], bad
        outcomes = [part_of(results, rows, batch.rows) for rows in parts]
        return [Failed(bad[n]) if n in bad else out for n, out in enumerate(outcomes)], bad

    def _accept(self, results: Any, request: Prepared, cache: Cache, first: int) -> Any:
        """Validate and commit one request; its rows begin at ``first`` of the cache.

        A model request is checked for finiteness alone.
        """
        try:
            if request.meta is not None:
                check_chunks(results, self.validators)
            self.sessions.commit(cache, request, results, first)
        except BaseException as error:  # also an interrupt: others of the batch are kept by now
            return Failed(error)
        return results

    def _as_step_unit(self, network: Denoiser) -> Denoiser:
        graphs, recorder = self.services.graphs, self.services.profile.recorder
        self.step_unit = StepUnit(network, graphs, recorder)
        return self.step_unit

    def _load(self, place: _Place, batch: Prepared) -> Bound:
        """Bind and load; over the memory budget the least recent caches make room first.

        They do so on all ranks when one of them has no room: all keep caches of the same keys, or
        one would capture anew what others replay.
        """
        while True:
            try:
                return self._loaded(place, batch)
            except CapacityError:
                self._forget(place)
                if not self._bound:
                    raise
                self._forget(next(iter(self._bound)))

    def _loaded(self, place: _Place, batch: Prepared) -> Bound:
        """Bind and load. Raises: what that failed with here, or on another rank."""
        try:
            bound = self._bind(place)
            bound.load(batch)
        except (CommTimeoutError, KeyboardInterrupt):
            raise  # the ranks go on no more
        except BaseException as error:
            if self.agree is not None:
                self.agree(error)
            raise
        if self.agree is not None:
            self.agree(None)
        return bound

    def _bind(self, place: _Place) -> Bound:
        bound = self._bound.get(place)
        if bound is None:
            while len(self._bound) >= self.max_live_caches:
                self._forget(next(iter(self._bound)))
            self._names += 1
            bound = self._bound[place] = Bound(self, *place, f"cache{self._names}")
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
            each(bound.predict, "release_grid", bound.grid)
        self._changes += 1


def _unit(adapter: Adapter) -> str:
    """Return the adapter's graph unit, as it is once the adapter has loaded."""
    unit = getattr(adapter, "graph_unit", "loop")
    if unit not in ("loop", "step"):
        raise PluginContractError(
            f"graph_unit of adapter {adapter.name!r} must be 'loop' or 'step'; got {unit!r}. "
            "Choose one of them."
        )
    return unit


def _hearing(stops: Stops, bound: Bound) -> OnStep | None:
    """Return what tells of each step; None when nobody wants to know."""
    if stops.idle:
        return None
    return lambda step: stops.told(step.index + 1, len(bound.grid))


class _Recorded:
    """The bare network; counts evaluations, and puts each step into a recorder that listens.

    What the unconditional branch predicts is named ``steps.uncond.<leaf>``.
    """

    def __init__(self, inner: Denoiser, services: Services) -> None:
        self.inner, self.profile = inner, services.profile
        self.prediction: Prediction = inner.prediction

    def __call__(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        out = self.inner(x, step, cache)
        self.profile.count(f"evaluations.{cache.branch}")
        recorder = self.profile.recorder
        if recorder.active:
            at = "steps" if cache.branch == COND else f"steps.{cache.branch}"
            for leaf in x:
                recorder.put(f"{at}.{leaf}.x", x[leaf][: cache.rows])
                recorder.put(f"{at}.{leaf}.{self.prediction}", out[leaf][: cache.rows])
        return out
