"""Ranks of the guided adapter, as a launcher would start them: threads, or this process's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from phyai import plugins
from phyai.deployment.inline import Inline
from phyai.engine_config import DeviceConfig, EngineConfig, ParallelConfig, RuntimeConfig
from phyai.engine_core import EngineCore
from phyai.parallel import Mesh, ParallelService
from phyai.plugins import create_manager
from tests.core.guided_adapter import GuidedAdapter, GuidedArgs, GuidedRequest
from tests.core.thread_ranks import on_all, services

FOUR = Mesh(cfg=2, tp=2)
LIMIT_S = 60.0


def core_of(
    parallel: ParallelService,
    cls: type[GuidedAdapter] = GuidedAdapter,
    runtime: dict[str, Any] | None = None,
    **args: Any,
) -> EngineCore:
    """Start the core of one rank; the class must be registered."""
    mesh = parallel.mesh
    runtime = dict(runtime or {})
    if parallel.rank:  # as ``join_launched`` has it
        runtime["batch_wait_ms"] = 0.0
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        runtime=RuntimeConfig(**runtime),
        parallel=ParallelConfig(tp_size=mesh.tp, cfg_size=mesh.cfg, timeout_s=LIMIT_S),
    )
    hooks = create_manager()  # of none: looking for them is what takes long here
    return EngineCore(cls.name, GuidedArgs(**args), config, parallel=parallel, hooks=hooks)


@contextmanager
def guided_ranks(
    mesh: Mesh = FOUR, cls: type[GuidedAdapter] = GuidedAdapter, **how: Any
) -> Iterator[list[Inline]]:
    """Give the engine of every rank; the ranks are threads."""
    plugins.register(cls)
    groups = services(mesh, LIMIT_S)
    engines = on_all(mesh.world, lambda rank: Inline(core_of(groups[rank], cls, **how)))
    for one in engines:
        if isinstance(one, BaseException):
            raise one
    try:
        yield engines
    finally:
        on_all(mesh.world, lambda rank: engines[rank].close())


def all_submit(
    engines: Sequence[Inline],
    requests: Sequence[Any],
    listener: Callable[[list[Any], int], Any] | None = None,
) -> list[list[Any]]:
    """Have every rank submit the requests at once; return the outcome of each, by rank.

    listener(futures, done): called on rank 0 for each step that the first request hears of.
    """
    futures: list[Any] = []

    def tell(done: int, total: int) -> None:
        while not futures:  # its own is about to be there
            time.sleep(0.001)
        if listener is not None:
            listener(futures, done)

    def one(rank: int) -> list[Any]:
        mine = futures if rank == 0 else []
        for number, request in enumerate(requests):
            heard = tell if rank == 0 and number == 0 else None
            mine.append(engines[rank].submit(request if rank == 0 else None, on_progress=heard))
        return [_outcome(future) for future in mine]

    return on_all(len(engines), one)


def _outcome(future: Any) -> Any:
    try:
        return future.result(LIMIT_S)
    except (CancelledError, Exception) as error:
        return error


def evaluations(engines: Sequence[Inline]) -> list[int]:
    """Return how often each rank's network ran, for whichever branch."""
    counters = [engine.core.services.profile.counters for engine in engines]
    return [one["evaluations.cond"] + one["evaluations.uncond"] for one in counters]


# ---------------------------------------------------------------- ranks that are processes


def over_gloo(parallel: ParallelService, request: GuidedRequest) -> dict[str, Any]:
    """Run, be refused by one branch, stop, run again; then have rank 1 fail alone in a step."""
    plugins.register(GuidedAdapter)
    alone = parallel.mesh.cfg == 1  # or others would wait for it in a collective of the step
    core = core_of(parallel, unit="step", refuses=(99,), fail_at=(1, 22) if alone else None)
    watch = core.watch(lambda done, _: done == 2 and watch.stop())
    bad = replace(request, uncond=torch.full_like(request.uncond, 99))  # type: ignore[arg-type]
    calls = {
        "want": (request, None),
        "refused": (bad, core.watch()),
        "stopped": (request, watch),
        "again": (request, core.watch()),
        "alone": (request, core.watch()),
    }
    found: dict[str, Any] = {}
    for name, (asked, heard) in calls.items():
        try:
            found[name] = core.step(asked, watch=heard)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    core.close()
    return found
