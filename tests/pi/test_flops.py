"""The FLOP model of pi0 and pi0.5: published numbers, and the counter's on the tiny checkpoints."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from phyai.cost import CostModel, Workload, flop_shares, total_flops
from phyai.errors import ConfigError
from phyai.kernels import catalogue
from phyai.models.pi0.main_pi0 import cost as pi0_cost
from phyai.models.pi05.main_pi05 import PI05Args
from phyai.models.pi05.main_pi05 import cost as pi05_cost
from phyai.profile.flops import count_flops
from phyai.profile.roofline import Machine
from tests.pi.tiny_requests import CHUNK, PATCHES, engine_of, pi_args

COSTS: dict[str, Any] = {"pi0": pi0_cost, "pi05": pi05_cost}
AMX = Machine("two AMX cores", "bfloat16", flops_per_s=7e12, bytes_per_s=29e9)


def tflop(stages: Any) -> dict[str, float]:
    return {stage.stage: stage.flops / 1e12 for stage in stages}


@pytest.fixture(autouse=True)
def reference_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on torch's own operators: the counter knows their formulas, whatever rows are added."""
    rows = tuple(row for row in catalogue.CATALOGUE if row.reference)
    monkeypatch.setattr(catalogue, "CATALOGUE", rows)


@pytest.fixture(scope="module")
def released() -> CostModel:
    return pi05_cost(PI05Args())


def test_published_geometry(released: CostModel) -> None:
    stages = released.stages(Workload(cameras=3, tokens=16, steps=10), published=True)
    assert tflop(stages) == pytest.approx(
        {"vision": 0.6605, "prefix": 3.1981, "loop": 0.3729}, abs=1e-3
    )
    assert total_flops(stages) / 1e12 == pytest.approx(4.2316, abs=1e-3)
    assert flop_shares(stages)["loop"] == pytest.approx(0.0881, abs=1e-4)


def test_computed_account_leaves_the_last_layer_out(released: CostModel) -> None:
    work = Workload(cameras=3, tokens=16, steps=10)
    full, ours = released.stages(work, published=True), released.stages(work)
    by_stage = {stage.stage: stage for stage in ours}
    assert tflop(ours)["vision"] == tflop(full)["vision"]
    layer = 2 * 784 * (2048 * 4608 + 3 * 2048 * 16384) + 4 * 784**2 * 2048
    only_kv = 2 * 784 * 2048 * 512
    assert full[1].flops - by_stage["prefix"].flops == layer - only_kv
    assert by_stage["loop"].flops == full[-1].flops


@pytest.mark.parametrize(("cameras", "tokens", "seconds"), [(3, 200, 0.85), (2, 20, 0.57)])
def test_machine_bound(released: CostModel, cameras: int, tokens: int, seconds: float) -> None:
    stages = released.stages(Workload(cameras=cameras, tokens=tokens, steps=10))
    assert AMX.least_ms(stages) / 1e3 == pytest.approx(seconds, abs=0.02)


def test_work_grows_with_rows_and_weights_do_not(released: CostModel) -> None:
    one = released.stages(Workload(cameras=2, tokens=20, steps=10))
    four = released.stages(Workload(rows=4, cameras=2, tokens=20, steps=10))
    for alone, together in zip(one, four, strict=True):
        assert together.flops == 4 * alone.flops
        assert together.weight_bytes == alone.weight_bytes
        assert alone.other_bytes < together.other_bytes <= 4 * alone.other_bytes


@pytest.mark.parametrize("model", sorted(COSTS))
def test_counter_agrees_on_the_tiny_checkpoint(model: str) -> None:
    model_cost: CostModel = COSTS[model](pi_args(model))
    work = Workload(rows=2, cameras=2, tokens=7, steps=3)
    request = model_cost.request(work)
    with engine_of(model) as engine:
        engine.step(request)  # builds the tables, which belong to no request
        counter = count_flops(engine.core.services.profile.timers, lambda: engine.step(request))
    assert not counter.opaque
    for stage in model_cost.stages(work, itemsize=4):
        assert counter.flops[stage.timer] == stage.flops, stage.stage
    assert counter.total == total_flops(model_cost.stages(work))


def test_tables_are_counted_nowhere_but_in_the_first_request() -> None:
    """The counter sees the modulation that the cost model amortises: it is not blind to it."""
    model_cost: CostModel = pi05_cost(cast(PI05Args, pi_args("pi05")))
    work = Workload(cameras=1, tokens=3, steps=2)
    with engine_of("pi05") as engine:
        timers = engine.core.services.profile.timers
        first = count_flops(timers, lambda: engine.step(model_cost.request(work)))
        second = count_flops(timers, lambda: engine.step(model_cost.request(work)))
    assert first.total > second.total == total_flops(model_cost.stages(work))
    assert first.flops["solve"] == second.flops["solve"]


@pytest.mark.parametrize("model", sorted(COSTS))
def test_request_has_exactly_the_sizes(model: str) -> None:
    model_cost: CostModel = COSTS[model](pi_args(model))
    request = model_cost.request(Workload(rows=3, cameras=2, tokens=5, steps=2), seed=4)
    with engine_of(model) as engine:
        counts = engine.core.services.profile.counters
        out = engine.step(request)
    assert out.shape[:2] == (3, CHUNK)
    assert counts["vision_images"] == 6
    assert counts["prefix_tokens"] == 3 * (2 * PATCHES + 5)
    again = model_cost.request(Workload(rows=3, cameras=2, tokens=5, steps=2), seed=4)
    assert torch.equal(again.pixel_values, request.pixel_values)


def test_whole_workload_of_a_checkpoint(released: CostModel) -> None:
    assert released.workload() == Workload(cameras=3, tokens=200, steps=10)
    assert isinstance(released, CostModel)


def test_sizes_beyond_the_checkpoint_are_refused(released: CostModel) -> None:
    for sizes in ({"cameras": 4, "tokens": 5}, {"cameras": 1, "tokens": 201}, {"tokens": 5}):
        with pytest.raises(ConfigError, match="must be in"):
            released.stages(Workload(**sizes))


@pytest.mark.parametrize("model", sorted(COSTS))
def test_published_figures_name_their_source(model: str) -> None:
    published = COSTS[model](pi_args(model)).published()
    assert "not measured here" in published.note
    assert len(published.figures) >= 8
    assert all(f.source and f.hardware and f.ms and f.model == model for f in published.figures)
