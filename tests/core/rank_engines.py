"""Engines of the ranks of one replica, as a launcher would start them; the ranks are threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pluggy import PluginManager

from phyai.deployment.inline import Inline
from phyai.engine_config import DeviceConfig, EngineConfig, ParallelConfig, RuntimeConfig
from phyai.engine_core import EngineCore
from phyai.parallel import Mesh
from phyai.plugins import create_manager
from tests.core.rank_adapter import PLUGIN_ID
from tests.core.thread_ranks import on_all, services

TWO = ParallelConfig(tp_size=2, timeout_s=5.0)


def config(parallel: ParallelConfig = TWO, **runtime: Any) -> EngineConfig:
    return EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        runtime=RuntimeConfig(**runtime),
        parallel=parallel,
    )


@contextmanager
def ranks(
    args: Any,
    parallel: ParallelConfig = TWO,
    output_rank: int = 0,
    hooks: PluginManager | None = None,
    **runtime: Any,
) -> Iterator[list[Inline]]:
    """Give the engines of all ranks; hooks: None = there are none."""
    mesh = Mesh(cfg=parallel.cfg_size, tp=parallel.tp_size or 1)
    groups = services(mesh, parallel.timeout_s)

    def start(rank: int) -> Inline:
        wait = {"batch_wait_ms": 0.0} if rank else {}
        core = EngineCore(
            PLUGIN_ID,
            args,
            config(parallel, **{**runtime, **wait}),
            parallel=groups[rank],
            hooks=hooks or create_manager(),  # looking for installed ones is what takes long here
            output_rank=output_rank,
        )
        return Inline(core)

    found = on_all(mesh.world, start)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    try:
        yield found
    finally:
        on_all(mesh.world, lambda rank: found[rank].close())


def all_step(engines: Sequence[Inline], request: Any) -> list[Any]:
    """Have every rank call step, the others with a request that counts for nothing."""
    return on_all(len(engines), lambda rank: engines[rank].step(request if rank == 0 else None))
