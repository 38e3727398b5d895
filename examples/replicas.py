"""Splits a prepared batch of 8 over two replicas, and compares with one engine that ran it whole.

    python examples/replicas.py

Each replica is a process of its own; on a CPU they share one copy of the weights. Workers import
this file again, so what it does is under ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from phyai import DeploymentConfig, DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from phyai.env import cache_dir
from phyai.models.pi.config import PiConfig
from phyai.models.pi.presets import builders as presets
from phyai.models.pi05 import PI05Args, PI05Request

ROWS, REPLICAS = 8, 2


def made_up(config: PiConfig, rows: int) -> PI05Request:
    """Return a request as a training pipeline prepares it: pixels, token ids and noise."""
    random = torch.Generator().manual_seed(0)
    size, cameras = config.vision.image_size, len(config.cameras)
    return PI05Request(
        pixel_values=torch.rand(rows, cameras, 3, size, size, generator=random) * 2 - 1,
        input_ids=torch.randint(1, 64, (rows, 16), generator=random),
        lang_lens=torch.randint(4, 17, (rows,), generator=random),
        noise=torch.randn(rows, config.chunk_size, config.max_action_dim, generator=random),
    )


def split(request: PI05Request, parts: int) -> list[PI05Request]:
    """Return the request's rows in so many requests, in order."""
    names = ("pixel_values", "input_ids", "lang_lens", "noise")
    pieces = {name: getattr(request, name).tensor_split(parts) for name in names}
    return [replace(request, **{n: pieces[n][i] for n in names}) for i in range(parts)]


def infer_many(engine: Engine, requests: list[PI05Request]) -> Tensor:
    """Return the actions of all requests, in order; each goes whole to one replica."""
    futures = [engine.submit(request) for request in requests]
    return torch.cat([future.result().cpu() for future in futures])


def main() -> None:
    preset = presets.tiny_pi05(cache_dir())
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        runtime=RuntimeConfig(num_threads=1),
    )
    args = EngineArgs("pi05", PI05Args(**preset, max_batch_size=ROWS), config)
    batch = made_up(PiConfig.from_folder(preset["checkpoint_dir"], "pi05"), ROWS)

    with Engine(args) as inline:
        whole = inline.step(batch)

    deployment = DeploymentConfig.local(devices=("cpu",) * REPLICAS, replica_count=REPLICAS)
    with Engine(args, deployment=deployment) as engine:
        started = time.perf_counter()
        actions = infer_many(engine, split(batch, REPLICAS))
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        done = [replica["done"] for replica in engine.stats()["replicas"]]

    print(f"{len(actions)} rows in {elapsed_ms:.0f} ms; requests per replica: {done}")
    print(f"largest difference to one engine: {float((actions - whole).abs().max()):.1e}")


if __name__ == "__main__":
    main()
