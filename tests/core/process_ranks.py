"""Ranks that are processes: one function on all of them, on this machine, with one thread each."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

SECONDS = 240.0
START = timedelta(seconds=200)


def on_processes(
    target: str, mesh: tuple[int, int], folder: Path, *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Run ``module:function(parallel, *args)`` on every rank of a (cfg, tp) mesh.

    Returns what each rank returned, tensors as arrays; None for one that ended without a word. An
    exception on a rank fails the test with its traceback.
    """
    world = mesh[0] * mesh[1]
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        context.Process(
            target=_rank, args=(pipes[rank][1], target, mesh, rank, str(meeting), timeout_s, args)
        )
        for rank in range(world)
    ]
    try:
        for process, (_, sending) in zip(ranks, pipes, strict=True):
            process.start()
            sending.close()
        deadline = time.monotonic() + SECONDS
        found = [_answer(pipe, deadline) for pipe, _ in pipes]
    finally:
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    problems = [text for state, text in found if state == "error"]
    assert not problems, "\n".join(problems)
    return [value for _, value in found]


def _answer(pipe: Any, deadline: float) -> tuple[str, Any]:
    if not pipe.poll(max(deadline - time.monotonic(), 0)):
        return "error", "a rank gave no answer in time"
    try:
        answer: tuple[str, Any] = pipe.recv()
    except EOFError:
        return "gone", None
    return answer


def _rank(
    pipe: Any,
    target: str,
    mesh: tuple[int, int],
    rank: int,
    meeting: str,
    timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from phyai.parallel import Mesh, ParallelService

    torch.set_num_threads(1)
    try:
        store: Any = dist.FileStore(  # type: ignore[attr-defined]
            meeting, mesh[0] * mesh[1]
        )
        module, _, name = target.partition(":")
        function = getattr(importlib.import_module(module), name)
        # Short limits of a test are of what ranks do, not of how long they take to start.
        store.set(f"here {rank}", "")
        store.wait([f"here {other}" for other in range(mesh[0] * mesh[1])], START)
        parallel = ParallelService.start(
            Mesh(*mesh), rank, torch.device("cpu"), store=store, timeout_s=timeout_s
        )
        result = function(parallel, *args)
        pipe.send(("done", _arrays(result)))
        parallel.close()
    except BaseException:
        pipe.send(("error", f"rank {rank}: {traceback.format_exc()}"))


def _arrays(value: Any) -> Any:
    """The value with arrays for tensors: those would be handed over by a process that ends."""
    import torch

    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, dict):
        return {name: _arrays(part) for name, part in value.items()}
    return value
