"""Steps of requests that run in the workers of a local pool."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, RuntimeConfig
from phyai.testing.sandbox import Sandbox

pytestmark = pytest.mark.slow

MODEL = """
from dataclasses import dataclass

from phyai.adapter import Adapter, AdapterArgs
from phyai.types import Key, Prepared


class Falling:
    prediction = "velocity"

    def __call__(self, x, step, cache):
        return {"action": x["action"] * 0 + 1}


@dataclass
class Args(AdapterArgs):
    max_batch_size: int = 4


class Model(Adapter):
    name = "steps"
    args_cls = Args
    graph_unit = "step"

    def prepare(self, request):
        return Prepared({"noise.action": request}, len(request), Key(num_steps=5))

    def denoiser(self):
        return Falling()
"""


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    sandbox = Sandbox(tmp_path_factory.mktemp("steps") / "site")
    sandbox.adapter("steps", model=MODEL)
    with sandbox.visible():
        yield importlib.import_module("steps_dist.model").Args()


@pytest.mark.parametrize("wait_ms", [0.0, 1.0])
def test_a_worker_tells_its_steps_before_its_answer(args: Any, wait_ms: float) -> None:
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        runtime=RuntimeConfig(num_threads=1, batch_wait_ms=wait_ms),
    )
    deployment = DeploymentConfig.local(devices=("cpu", "cpu"), replica_count=2)
    with Engine(EngineArgs("steps", args, config), deployment=deployment) as engine:
        for _ in range(3):
            heard: list[tuple[int, int]] = []
            future = engine.submit(torch.zeros(1, 2, 1), lambda *told: heard.append(told))  # noqa: B023
            assert future.result(60).flatten().tolist() == pytest.approx([-1.0, -1.0])
            assert heard == [(n, 5) for n in range(1, 6)]
        assert engine.step(torch.zeros(1, 2, 1)).shape == (1, 2, 1)
