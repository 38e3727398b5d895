"""What a pool costs and brings: the way to a worker and back, sleeping steps side by side.

python benchmarks/pool.py                     450 kB requests, 12 rounds
python benchmarks/pool.py --rounds 40 --json

Overhead. The same observation (3 images of 224 x 224 x 3, 452 kB) goes to an engine in this process
and to a pool of one replica, in turns of 25 calls so that drift meets both; the plugin does next to
nothing, and answers with 50 x 32 numbers. A round's figure is the difference of its two medians.
Scaling. 2 * 20 steps that sleep, on one replica and on two, in turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from phyai import DeploymentConfig, Engine, EngineArgs, EngineConfig, Observation
from phyai.engine_config import DeviceConfig, RuntimeConfig
from phyai.testing.sandbox import Sandbox

MODEL = """
import time
from dataclasses import dataclass
import torch
from phyai.adapter import Adapter, AdapterArgs
from phyai.solver import Direct
from phyai.types import Key, Prepared

@dataclass
class Args(AdapterArgs):
    max_batch_size: int = 1

class Model(Adapter):
    name = "idle"
    args_cls = Args
    def prepare(self, request):
        sleep = torch.tensor([[float(request.state[0])]])
        tensors = {"noise.action": torch.zeros(1, 50, 32), "sleep": sleep}
        return Prepared(tensors, 1, Key(), (None,))
    def solver(self):
        return Direct()
    def denoiser(self):
        return Idle()

class Idle:
    prediction = "clean"
    def __call__(self, x, step, cache):
        if (seconds := float(cache.inputs["sleep"][0, 0])) > 0:
            time.sleep(seconds)
        return x
"""
CALLS, SLEEPS, SLEEP_S = 25, 20, 0.05


@contextmanager
def idle_plugin() -> Iterator[Any]:
    """Install the plugin for this process and its workers; give the class of its arguments."""
    with tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(Path(folder) / "site")
        sandbox.adapter("idle", model=MODEL)
        with sandbox.visible():
            yield importlib.import_module("idle_dist.model").Args


def engine_of(args: Any, replicas: int) -> Engine:
    """Return an engine in this process (0 replicas) or in workers."""
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype="float32"),
        runtime=RuntimeConfig(num_threads=1),
    )
    deployment = (
        DeploymentConfig.local(("cpu",) * replicas, replicas)
        if replicas
        else DeploymentConfig.inline()
    )
    return Engine(EngineArgs("idle", args(), config), deployment=deployment)


def observation(sleep_s: float = 0.0) -> Observation:
    random = np.random.default_rng(0)
    images = {
        name: random.integers(0, 255, (224, 224, 3), dtype=np.uint8)
        for name in ("base", "left", "right")
    }
    return Observation(images, [sleep_s], "pick up the cup")


def median_ms(engine: Engine, request: Observation) -> float:
    """Return the median of some calls, one in flight, each waited for through its Future."""
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        engine.submit(request).result()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def sleeping_s(engine: Engine, request: Observation) -> float:
    started = time.perf_counter()
    wait([engine.submit(request) for _ in range(SLEEPS)])
    return time.perf_counter() - started


def spread(values: Sequence[float]) -> str:
    low, mid, high = (float(v) for v in np.percentile(values, (10, 50, 90)))
    return f"{mid:.3f} (10-90 %: {low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with idle_plugin() as args, ExitStack() as stack:
        inline, one, two = (
            stack.enter_context(engine_of(args, replicas)) for replicas in (0, 1, 2)
        )
        request, sleeping = observation(), observation(SLEEP_S)
        for engine in (inline, one, two):
            median_ms(engine, request)
        inside, outside, scaling = [], [], []
        for number in range(options.rounds):
            sides = [(inline, inside), (one, outside)]
            for engine, times in sides if number % 2 else sides[::-1]:
                times.append(median_ms(engine, request))
            if number < 4:
                scaling.append(sleeping_s(one, sleeping) / sleeping_s(two, sleeping))
    added = [there - here for here, there in zip(inside, outside, strict=True)]
    if options.json:
        found = {"inline_ms": inside, "pool_ms": outside, "added_ms": added, "scaling": scaling}
        print(json.dumps(found))
        return
    print(f"inline p50, ms       {spread(inside)}")
    print(f"one replica p50, ms  {spread(outside)}")
    print(f"added, ms            {spread(added)}   target 0.5")
    print(f"sleeping, 1 -> 2     {spread(scaling)}   target 1.9")


if __name__ == "__main__":
    main()
