"""CPU settings, and engines whose graphs are recorded and replayed on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from phyai import DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig, engine_core
from phyai.addresses import tensors_of
from phyai.engine_config import KernelConfig
from phyai.graph import GraphService
from phyai.kernels import KernelRow, KernelTable
from phyai.testing.capture import RecordingCapturer
from phyai.testing.parity import reference_policy


def cpu_config(dtype: torch.dtype = torch.float32, **runtime: Any) -> EngineConfig:
    return EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=dtype), runtime=RuntimeConfig(**runtime)
    )


def reference_config(rows: Sequence[KernelRow] = (), **runtime: Any) -> EngineConfig:
    """Return a float32 CPU config of reference kernels: a tape cannot follow kernels of our own.

    rows: those that a plugin adds to the catalogue.
    """
    table = KernelTable()
    table.add(rows)
    policy = KernelConfig(policy_config=reference_policy(table))
    return cpu_config(**runtime).replace(kernel=policy)


@contextmanager
def recording_engine(
    plugin: str, args: Any, config: EngineConfig, *, limit: int = 64
) -> Iterator[Engine]:
    """Open an engine that replays recorded graphs.

    Regions may use their cache's buffers and the model's tensors, and nothing else.
    """
    capturer = RecordingCapturer(num_warmup_iters=1)

    def service(backend: Any, device: torch.device, **options: Any) -> GraphService:
        return GraphService("cuda", device, limit, capturer=capturer)

    with mock.patch.object(engine_core, "GraphService", service):
        engine = Engine(EngineArgs(plugin, args, config))

    def static() -> Iterable[Tensor]:
        runner = engine.core.runner
        yield from engine.core.services.memory.buffers().values()
        yield from tensors_of(runner.model_objects(runner.network)).values()

    capturer.static = static
    with engine:
        yield engine
