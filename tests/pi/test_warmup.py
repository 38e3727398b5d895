"""`runtime.warmup`: what an engine builds at start is there for its first requests."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from phyai import Engine, EngineArgs
from phyai.cli.run import compiled_lines
from phyai.engine_config import EngineConfig
from phyai.errors import CapacityError
from phyai.graph import RegionReport
from tests.core.toy_adapter import ToyAdapter, open_engine, registry
from tests.pi.recorded_engines import recorded_engine
from tests.pi.tiny_requests import cpu_config, engine_of, pi_args, pi_config, random_request


def small(model: str = "pi05") -> dict[str, Any]:
    return {"checkpoint_dir": None, "config": pi_config(model, layers=1)}


def full(model: str, rows: int, seed: int) -> Any:
    """Return a request of the checkpoint's cameras, tokens and steps."""
    config = pi_config(model)
    cameras = config.num_cameras - config.empty_cameras
    return random_request(
        model,
        [[True] * cameras] * rows,
        [config.tokenizer_max_length] * rows,
        num_steps=config.num_inference_steps,
        seed=seed,
    )


def buffers(engine: Engine) -> dict[str, int]:
    return {n: t.data_ptr() for n, t in engine.core.services.memory.buffers().items()}


@pytest.mark.parametrize("model", ["pi0", "pi05"])
def test_full_requests_of_every_bucket_find_their_buffers(model: str) -> None:
    with engine_of(model, cpu_config(static_shapes=True, warmup=True), **small(model)) as engine:
        before = buffers(engine)
        assert len({name.partition("/")[0] for name in before}) == 3  # 1, 2 and 4 rows
        for rows in (1, 2, 3, 4):
            engine.step(full(model, rows, rows))
        assert buffers(engine) == before
    with engine_of(model, cpu_config(static_shapes=True), **small(model)) as engine:
        assert buffers(engine) == {}


def test_full_requests_of_every_bucket_find_their_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "phyai"),
        recorded_engine("pi05", runtime={"warmup": True}, max_batch_size=2, **small()) as engine,
    ):
        graphs = engine.core.services.graphs
        assert graphs.captures == 4
        for rows in (2, 1):
            engine.step(full("pi05", rows, rows))
        assert (graphs.captures, graphs.fallbacks) == (4, 0)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("warm-up of")]
    assert [line.partition(",")[0] for line in said] == [
        f"warm-up of {rows} row{'s' * (rows > 1)}" for rows in (1, 2)
    ]
    assert all(line.endswith("2 regions captured") for line in said)


def test_exact_shapes_warm_up_the_smallest_and_the_largest() -> None:
    shown: list[tuple[int, int, str]] = []
    args = EngineArgs("pi05", pi_args("pi05", **small()), cpu_config(warmup=True))
    with Engine(args, progress=lambda *told: shown.append(told)) as engine:
        caches = {name.partition("/")[0] for name in buffers(engine)}
        assert engine.stats()["replicas"][0]["done"] == 0
    assert len(caches) == 2
    texts = [text.partition(",")[0] for _, _, text in shown if "warm" in text]
    assert texts == ["warming up: 1 row", "warming up: 4 rows", "warmed up"]


def test_a_budget_that_is_too_small_is_told_at_start() -> None:
    settings: EngineConfig = cpu_config(static_shapes=True, warmup=True, memory_budget_bytes=10_000)
    with (
        pytest.raises(CapacityError, match=r"budget of 10,000 bytes; got [\d,]+ bytes needed"),
        engine_of("pi05", settings, **small()),
    ):
        pass


def test_results_do_not_depend_on_it() -> None:
    request = full("pi05", 2, 5)
    results = []
    for warm in (False, True):
        with engine_of("pi05", cpu_config(warmup=warm), **small()) as engine:
            results.append(engine.step(request))
    assert torch.equal(*results)


def test_an_adapter_without_a_cost_model_starts_cold(caplog: pytest.LogCaptureFixture) -> None:
    with registry(), open_engine(ToyAdapter, runtime={"warmup": True}) as engine:
        assert buffers(engine) == {}
    assert "plugin toy says no request to warm up with" in caplog.text


def test_the_command_says_what_was_compiled() -> None:
    rows = [
        RegionReport("a/encode", "k", "inductor", 1, 2.5, 0, "", 1),
        RegionReport("a/solve", "k", "inductor", 1, 1.5, 0, "", 1),
        RegionReport("b/solve", "k", "cuda", 1, 0.5, 3 << 20, "", 1),
        RegionReport("c/solve", "k", "cuda", 0, 0.0, 0, ""),
        RegionReport("d/solve", "k", "eager", 1, 0.0, 0, "cuda failed: RuntimeError: x"),
        RegionReport("e/solve", "k", "eager", 1, 0.0, 0, ""),
    ]
    assert compiled_lines(rows) == [
        "graphs: 2 regions compiled in 4.0 s",
        "graphs: 1 regions captured in 0.5 s, 3 MiB",
        "graphs: d/solve runs eagerly: cuda failed: RuntimeError: x",
    ]
