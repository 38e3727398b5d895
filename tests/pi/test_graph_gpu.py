"""Real CUDA graphs of both models against eager runs on the same GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from phyai import DeviceConfig, EngineConfig
from phyai.engine_config import RuntimeConfig
from tests.pi.test_graph_backends import REQUESTS, stats_of
from tests.pi.tiny_requests import MODELS, engine_of, random_request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cuda(backend: Any, **runtime: Any) -> EngineConfig:
    return EngineConfig(
        device=DeviceConfig(target="cuda", params_dtype="float32"),
        runtime=RuntimeConfig(graph_backend=backend, static_shapes=True, **runtime),
    )


@pytest.mark.parametrize("model", MODELS)
def test_gpu_replays_equal_the_eager_twin_bit_for_bit(model: str) -> None:
    """The same kernels on the same padded shapes: a graph may change nothing."""
    with engine_of(model, cuda("eager")) as eager, engine_of(model, cuda("cuda")) as graphs:
        for masks, lens in REQUESTS.values():
            for seed in (1, 2):
                request = random_request(model, masks, lens, pad_to=24, num_steps=3, seed=seed)
                assert torch.equal(graphs.step(request), eager.step(request))
        stats = stats_of(graphs)
        report = graphs.core.memory_report()
    assert stats["fallbacks"] == 0
    assert {row["mode"] for row in stats["regions"]} == {"cuda"}
    assert report["graphs"] == stats["nbytes"]


def test_gpu_weights_that_move_are_captured_again() -> None:
    request = random_request("pi05", *REQUESTS["two ragged rows"], num_steps=2, seed=3)
    with engine_of("pi05", cuda("eager")) as eager, engine_of("pi05", cuda("cuda")) as graphs:
        graphs.step(request)
        for engine in (eager, graphs):
            modules: nn.Module = engine.adapter.modules  # type: ignore[attr-defined]
            for parameter in modules.parameters():
                parameter.mul_(1.1)
            engine.core.runner.refresh()
        assert torch.equal(graphs.step(request), eager.step(request))
        assert stats_of(graphs)["recaptures"] == 0
        for engine in (eager, graphs):
            network: Any = engine.adapter.network  # type: ignore[attr-defined]
            network.action_out.weight = nn.Parameter(1.5 * network.action_out.weight, False)
            engine.core.runner.refresh()
        assert torch.equal(graphs.step(request), eager.step(request))
        assert stats_of(graphs)["recaptures"] == 2


def test_gpu_warm_up_leaves_nothing_to_capture() -> None:
    with engine_of("pi05", cuda("cuda", warmup=True)) as engine:
        captures = stats_of(engine)["captures"]
        assert captures == 6
        config = engine.adapter.pi  # type: ignore[attr-defined]
        cameras = config.num_cameras - config.empty_cameras
        request = random_request(
            "pi05",
            [[True] * cameras],
            [config.tokenizer_max_length],
            num_steps=config.num_inference_steps,
        )
        allocated = torch.cuda.memory_allocated()
        for seed in range(3):
            engine.step(replace(request, noise=torch.randn_like(request.noise) * (seed + 1)))
        assert stats_of(engine)["captures"] == captures
        assert torch.cuda.memory_allocated() <= allocated + (1 << 20)
