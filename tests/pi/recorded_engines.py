"""Engines whose graphs are recorded and replayed on the CPU, by `phyai.testing.capture`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from phyai import DeviceConfig, Engine, EngineArgs, EngineConfig, engine_core
from phyai.addresses import tensors_of
from phyai.engine_config import KernelConfig, RuntimeConfig
from phyai.graph import GraphService
from phyai.kernels import KernelTable
from phyai.testing.capture import RecordingCapturer
from phyai.testing.parity import reference_policy
from tests.pi.tiny_requests import pi_args


def reference_config(**runtime: Any) -> EngineConfig:
    """Return a float32 CPU config of reference kernels: a tape cannot follow kernels of our own."""
    return EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype="float32"),
        runtime=RuntimeConfig(**runtime),
        kernel=KernelConfig(policy_config=reference_policy(KernelTable())),
    )


@contextmanager
def recorded_engine(
    model: str, *, limit: int = 64, runtime: Any = None, **changes: Any
) -> Iterator[Engine]:
    """Open an engine over the golden checkpoint of ``model`` that replays recorded graphs.

    Regions may use their cache's buffers and the model's tensors, and nothing else.
    """
    capturer = RecordingCapturer(num_warmup_iters=1)

    def service(backend: Any, device: torch.device, **options: Any) -> GraphService:
        return GraphService("cuda", device, limit, capturer=capturer)

    with mock.patch.object(engine_core, "GraphService", service):
        engine = Engine(
            EngineArgs(model, pi_args(model, **changes), reference_config(**(runtime or {})))
        )

    def static() -> Iterable[Tensor]:
        runner = engine.core.runner
        yield from engine.core.services.memory.buffers().values()
        yield from tensors_of(runner.model_objects(runner.network)).values()

    capturer.static = static
    with engine:
        yield engine
