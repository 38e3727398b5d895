"""A stream of mixed requests through one engine from several threads, in a process of its own.

``python -m tests.pi.mixed_requests MODEL ORDER_SEED`` prints one JSON object: a digest of every
result, and the resident memory after request 50 and after request 200.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from phyai import Engine
from phyai.types import RTCOptions
from tests.pi.tiny_engines import model_request, observation, open_engine

TOTAL, DISTINCT, THREADS = 200, 50, 4


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mixed(engine: Engine, number: int) -> Any:
    """Return request ``number`` of the stream: a model request, an Observation or a list."""
    draw = random.Random(number)
    rows, cameras, steps = draw.randint(1, 3), draw.randint(1, 3), draw.choice((1, 1, 2, 3, 4))
    if draw.random() < 0.5:
        request = model_request(engine, number, rows, cameras, num_steps=steps)
        if draw.random() < 0.3:
            masks = torch.ones(rows, cameras, dtype=torch.bool)
            masks[0, 0] = cameras == 1
            request = replace(request, image_masks=masks)
        if draw.random() < 0.3:
            left_over = np.full((draw.randint(1, 9), 7), 0.1, np.float32)
            request = replace(request, rtc=RTCOptions(left_over, draw.randint(0, 3)))
        return request
    few = [
        observation(engine, 10 * number + row, 1 + (cameras + row) % 3, num_steps=steps)
        for row in range(rows)
    ]
    return few[0] if rows == 1 else few


def digest(result: Any) -> str:
    """Return a digest of every bit of a result."""
    if isinstance(result, torch.Tensor):
        arrays = [result.numpy()]
    else:
        chunks = result if isinstance(result, list) else [result]
        arrays = [a for chunk in chunks for a in (chunk.actions, chunk.model_actions)]
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(str((array.shape, array.dtype)).encode())
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()


def run(model: str, order_seed: int) -> dict[str, Any]:
    """Send the stream from four threads, half by ``step`` and half by ``submit``."""
    numbers = [i % DISTINCT for i in range(TOTAL)]
    random.Random(order_seed).shuffle(numbers)
    stream = iter(enumerate(numbers))
    lock = threading.Lock()
    results: list[tuple[int, str]] = []
    resident: dict[int, int] = {}
    problems: list[str] = []

    with open_engine(model) as engine:

        def finished(number: int, result: Any) -> None:
            value = digest(result)
            with lock:
                results.append((number, value))
                if len(results) in (50, TOTAL):
                    resident[len(results)] = rss_bytes()

        def work() -> None:
            while True:
                with lock:
                    at, number = next(stream, (-1, -1))
                if at < 0:
                    return
                try:
                    request = mixed(engine, number)
                    if at % 2:
                        finished(number, engine.step(request))
                    else:
                        finished(number, engine.submit(request).result(120))
                except BaseException as error:
                    problems.append(f"{number}: {error!r}")

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = engine.stats()["replicas"][0]
    return {
        "results": results,
        "resident": resident,
        "problems": problems,
        "done": stats["done"],
        "live_caches": len({region["key"] for region in stats["graphs"]["regions"]}),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(int(sys.argv[2]))  # nothing may depend on the global generator
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]))))
