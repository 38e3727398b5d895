"""Mixed requests through one engine, in a process of its own, and what it holds on the way.

``python -m tests.pi.steady_memory MODEL BACKEND TOTAL`` prints one JSON list: what the engine holds
after every round of the same requests. BACKEND is ``exact``, ``static`` or ``recorded``.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from phyai import Engine
from tests.pi.mixed_requests import rss_bytes
from tests.pi.recorded_engines import recorded_engine
from tests.pi.tiny_requests import cpu_config, engine_of, pi_config, random_request

DISTINCT = 50
TOKENS = 24


def requests(model: str) -> list[Any]:
    """Return requests of every number of rows, cameras, steps and token bucket: over 16 keys."""
    made = []
    for number in range(DISTINCT):
        draw = random.Random(number)
        rows, cameras = draw.randint(1, 4), draw.randint(1, 3)
        masks = [[True, *(draw.random() < 0.7 for _ in range(cameras - 1))] for _ in range(rows)]
        lens = [draw.randint(1, TOKENS) for _ in range(rows)]
        steps = draw.choice((1, 1, 1, 2, 3))
        made.append(random_request(model, masks, lens, pad_to=TOKENS, num_steps=steps, seed=number))
    return made


def held(engine: Engine) -> dict[str, int]:
    """Return counts of what an engine and its process hold."""
    gc.collect()
    core, stats = engine.core, engine.stats()["replicas"][0]["graphs"]
    report = core.memory_report()
    denoiser: Any = core.adapter.network  # type: ignore[attr-defined]
    return {
        "buffers": len(core.services.memory.buffers()),
        "buffer_bytes": int(report["buffers"] or 0),
        "model_bytes": int(report["model"] or 0),
        "graph_bytes": int(report["graphs"] or 0),
        "regions": len(stats["regions"]),
        "tables": len(denoiser.tables),
        "tensors": sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()),
        "rss": rss_bytes(),
    }


@contextmanager
def _engine(model: str, backend: str) -> Iterator[Engine]:
    small = {"checkpoint_dir": None, "config": pi_config(model, layers=1)}
    if backend == "recorded":
        with recorded_engine(model, **small) as engine:
            yield engine
        return
    with engine_of(model, cpu_config(static_shapes=backend == "static"), **small) as engine:
        yield engine


def run(model: str, backend: str, total: int) -> list[dict[str, int]]:
    stream = requests(model)
    rounds = []
    with _engine(model, backend) as engine:
        for number in range(total):
            engine.step(stream[number % DISTINCT])
            if number % DISTINCT == DISTINCT - 1:
                rounds.append(held(engine))
    return rounds


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
