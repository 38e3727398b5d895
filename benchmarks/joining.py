"""Throughput of concurrent robots with and without joining, in turns, on a tiny pi0.5.

python benchmarks/joining.py                          8 robots, batches of up to 8
python benchmarks/joining.py --robots 4 --wait-ms 2 --threads 2

Each robot sends one observation, waits for its chunk and sends the next one. The two engines take
turns; a ratio is that of one round. A tiny model shows the cost per call rather than that of its
weights: what joining brings on a large one is measured there.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from phyai import Engine, EngineArgs, EngineConfig, Observation
from phyai.engine_config import DeviceConfig, RuntimeConfig
from phyai.models.pi05.main_pi05 import PI05Args

TINY = Path(__file__).parents[1] / "tests" / "golden" / "pi05"


def engine_of(options: argparse.Namespace, wait_ms: float) -> Engine:
    folder = Path(options.checkpoint)
    args = PI05Args(
        checkpoint_dir=str(folder),
        max_batch_size=options.robots,
        precision="fp32",
        tokenizer=str(folder / "tokenizer"),
        processor_dir=str(folder / "processors_abs"),
    )
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype="float32"),
        runtime=RuntimeConfig(batch_wait_ms=wait_ms, num_threads=options.threads),
    )
    return Engine(EngineArgs("pi05", args, config))


def observation(engine: Engine, seed: int) -> Observation:
    random = np.random.default_rng(seed)
    dim = engine.adapter.processor.state_dim  # type: ignore[attr-defined]
    names = ("base_0_rgb", "left_wrist_0_rgb")
    images = {name: random.integers(0, 256, (56, 56, 3), dtype=np.uint8) for name in names}
    state = random.uniform(-1, 1, dim).astype(np.float32)
    return Observation(images, state, "pick up the cup", {"seed": seed})


def requests_per_s(engine: Engine, robots: int, calls: int) -> float:
    """Return the requests per second of robots that ask again as soon as they are answered."""
    requests = [observation(engine, robot) for robot in range(robots)]
    start = threading.Barrier(robots + 1)

    def robot(request: Observation) -> None:
        start.wait()
        for _ in range(calls):
            engine.step(request)

    threads = [threading.Thread(target=robot, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return robots * calls / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default=str(TINY))
    parser.add_argument("--robots", type=int, default=8)
    parser.add_argument("--calls", type=int, default=10, help="requests of each robot per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wait-ms", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"alone": [], "joined": []}
    with engine_of(options, 0.0) as alone, engine_of(options, options.wait_ms) as joins:
        sides = [("alone", alone), ("joined", joins)]
        for engine in (alone, joins):
            requests_per_s(engine, options.robots, 2)  # first runs build tables and caches
        for round_number in range(options.rounds):
            for name, engine in sides[:: 1 if round_number % 2 else -1]:
                found[name].append(requests_per_s(engine, options.robots, options.calls))
        rows = joins.stats()["replicas"][0]["batches"]["rows"]
    ratios = [j / a for a, j in zip(found["alone"], found["joined"], strict=True)]
    print(f"{options.robots} robots, {options.threads} threads, batch_wait_ms {options.wait_ms}")
    for name, values in found.items():
        print(f"{name:7} {statistics.median(values):8.1f} requests/s   ({spread(values)})")
    print(f"ratio   {statistics.median(ratios):8.2f}              ({spread(ratios)})")
    print("rows per batch when joining:", ", ".join(f"{n}: {count}" for n, count in rows.items()))


def spread(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f} of {len(values)}"


if __name__ == "__main__":
    main()
