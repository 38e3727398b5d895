"""What the ranks of the tests of collectives do."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phyai.errors import CommTimeoutError, ConfigError
from phyai.parallel import Mesh, ParallelService

SHORT_S = 4.0


def collectives(parallel: ParallelService) -> dict[str, Any]:
    """Use every collective; return what came of it and what was counted."""
    world, rank, tp, cfg = parallel.world, parallel.rank, parallel.tp, parallel.cfg
    drawn = torch.Generator().manual_seed(rank)
    x = torch.randn(257, generator=drawn)
    column = torch.randn(3, 4, generator=drawn).t()  # not contiguous
    found = {
        "coordinates": (cfg.rank, tp.rank),
        "members": (tp.ranks, cfg.ranks),
        "mine": x.clone(),
        "tp_sum": tp.all_reduce(x.clone()),
        "low": tp.all_reduce(torch.full((3,), 1.0 + rank / 128, dtype=torch.bfloat16)),
        "counted_ints": tp.all_reduce(torch.tensor([rank, 1])),
        "column": column.clone(),
        "column_sum": world.all_reduce(column.clone(memory_format=torch.preserve_format)),
        "cfg_all": cfg.all_gather(torch.tensor([[rank]])),
        "told": world.broadcast(torch.tensor([rank]), src=parallel.mesh.world - 1),
        "host": parallel.control.broadcast(torch.tensor([7 + rank]), timeout_s=60.0),
        "empty": parallel.control.all_gather(torch.empty(0)).shape,
    }
    world.barrier()
    counters = parallel.counters
    found["counters"] = {axis: (t.collectives, t.payload_bytes) for axis, t in counters.items()}
    return found


def lose(parallel: ParallelService, how: str, who: int, axis: str) -> Any:
    """Have one rank not come to a collective; return what the others say."""
    group = getattr(parallel, axis)
    group.all_reduce(torch.ones(1))
    if parallel.rank == who:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2 * SHORT_S)  # it hangs outside of any collective
        return None
    try:
        if how == "limit":
            parallel.control.all_gather(torch.ones(1), timeout_s=0.5)
        # Ranks that do not share the group with the lost one wait for those that do.
        group.all_reduce(torch.ones(1))
        parallel.world.all_reduce(torch.ones(1))
    except CommTimeoutError as error:
        return error.ranks, str(error)
    return "no error"


def within_a_group(parallel: ParallelService) -> dict[str, Any]:
    """Start a second service inside the process group that is there; what it must refuse."""
    world = dist.get_world_size()
    inner = ParallelService.start(Mesh(cfg=2), parallel.rank, torch.device("cpu"), timeout_s=60.0)
    found = {
        "axes": (inner.tp.size, inner.cfg.ranks),
        "sum": inner.cfg.all_reduce(torch.ones(2)),
        "counted": {axis: traffic.collectives for axis, traffic in inner.counters.items()},
    }
    for name, mesh, rank in (
        ("mesh", Mesh(tp=4), parallel.rank),
        ("rank", Mesh(tp=2), 1 - parallel.rank),
    ):
        try:
            ParallelService.start(mesh, rank, torch.device("cpu"))
        except ConfigError as error:
            found[name] = str(error)
    found["compiled"], found["compiled_calls"] = _compiled(inner)
    inner.close()
    inner.close()
    found["outer"] = parallel.tp.all_reduce(torch.ones(2))  # the caller's groups go on
    found["world"] = (world, dist.is_initialized())
    try:
        inner.cfg.all_reduce(torch.ones(2))
    except CommTimeoutError as error:
        found["closed"] = str(error)
    return found


def one_after_the_other(parallel: ParallelService) -> dict[str, Any]:
    """Close services in the order they were started in, and be in a group of somebody else's."""
    store = dist.distributed_c10d._get_default_store()
    second = ParallelService.start(Mesh(tp=2), parallel.rank, torch.device("cpu"), timeout_s=60.0)
    parallel.close()
    found: dict[str, Any] = {"second": second.tp.all_reduce(torch.ones(2))}
    second.close()
    found["left"] = dist.is_initialized()
    theirs = dist.PrefixStore("theirs", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=theirs, rank=parallel.rank, world_size=2)
    for number in range(2):
        third = ParallelService.start(
            Mesh(tp=2), parallel.rank, torch.device("cpu"), timeout_s=60.0
        )
        found[f"guest {number}"] = third.tp.all_reduce(torch.ones(2))
        third.close()
    total = torch.ones(2)
    dist.all_reduce(total)
    found["theirs"] = total
    dist.destroy_process_group()
    return found


def leave_early(parallel: ParallelService) -> str:
    """Have rank 1 leave with an error that it keeps, while rank 0 waits for it for an hour."""
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        if parallel.rank == 0:
            parallel.tp.all_gather(torch.ones(1))
        else:
            parallel.control.all_gather(torch.ones(1), timeout_s=0.5)
    except CommTimeoutError as error:
        parallel.close()
        store.set(f"left {parallel.rank}", "")
        store.wait(["left 0", "left 1"], timedelta(seconds=200))  # the error lives that long
        return str(error)
    return "no error"


def alone(folder: str) -> tuple[tuple[int, ...], str]:
    """Be the only one of two ranks that starts."""
    store: Any = dist.FileStore(  # type: ignore[attr-defined]
        f"{folder}/meeting", 2
    )
    try:
        ParallelService.start(Mesh(tp=2), 0, torch.device("cpu"), store=store, timeout_s=1.0)
    except CommTimeoutError as error:
        assert not dist.is_initialized()
        return error.ranks, str(error)
    raise AssertionError("nobody came, and it started")


def _compiled(parallel: ParallelService) -> tuple[torch.Tensor, int]:
    """Return what a function with two collectives gives when it is traced as a whole."""
    group, before = parallel.cfg, parallel.cfg.traffic.collectives

    def region(x: torch.Tensor) -> torch.Tensor:
        return group.all_gather(group.all_reduce(x * 2) + 1).sum(0)

    traced = torch.compile(region, backend="aot_eager", fullgraph=True)
    traced(torch.ones(3))
    total = traced(torch.full((3,), 1.0 + parallel.rank))
    return total, group.traffic.collectives - before
