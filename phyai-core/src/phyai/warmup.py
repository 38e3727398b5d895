"""Start-up of an engine that shall not build anything during its first requests."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phyai.cost import CostModel

if TYPE_CHECKING:
    from phyai.engine_core import EngineCore

log = logging.getLogger("phyai")


def warm_up(core: EngineCore) -> int:
    """Run the checkpoint's full request once per batch bucket; return how many.

    Caches are allocated, graphs captured or compiled and grids' tables built, so that the first
    requests of these sizes find everything there. Requests of other sizes still build their own.
    Without graphs every number of rows has its own bucket; only 1 and the largest are run then.

    In a replica of several ranks rank 0 has all of them run it.
    Raises: CapacityError when the caches of all buckets do not fit the memory budget.
    """
    if core.ranks is None:
        return _run_all(core)
    if not core.ranks.leads:
        core.ranks.until_ready()
        return 0
    count = _run_all(core)
    core.ranks.announce_ready()
    return count


def _run_all(core: EngineCore) -> int:
    if core.manifest is None or not core.manifest.cost:
        log.warning("plugin %s says no request to warm up with: nothing is built yet", core.plugin)
        return 0
    model = _load(core.manifest.cost)(core.args)
    buckets = batch_buckets(core)
    graphs = core.services.graphs
    for number, rows in enumerate(buckets):
        workload = replace(model.workload(), rows=rows)
        core.services.progress(number, len(buckets), f"warming up: {workload.label}")
        started, captures = time.perf_counter(), graphs.captures
        core.run_prepared(core.adapter.prepare(model.request(workload)))
        seconds = time.perf_counter() - started
        done = graphs.captures - captures
        log.info("warm-up of %s: %.2f s, %d regions captured", workload.label, seconds, done)
    core.services.progress(len(buckets), len(buckets), "warmed up")
    return len(buckets)


def batch_buckets(core: EngineCore) -> tuple[int, ...]:
    """Return the batch buckets to build at start."""
    scheduler = core.runner.scheduler
    if not scheduler.static_shapes:
        return tuple(sorted({1, scheduler.max_rows}))
    sizes = {scheduler.batch_bucket(rows) for rows in range(1, scheduler.max_rows + 1)}
    return tuple(sorted(sizes))


def _load(path: str) -> Callable[[Any], CostModel]:
    module, _, name = path.partition(":")
    function: Callable[[Any], CostModel] = getattr(importlib.import_module(module), name)
    return function
