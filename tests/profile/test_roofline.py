"""Both rooflines: published cases, limits, ridge, refusals."""

from __future__ import annotations

import json
import math

import pytest

from phyai.cost import StageCost
from phyai.errors import ConfigError
from phyai.profile.report import control_lines
from phyai.profile.roofline import ControlTime, Machine

LIBERO = ControlTime(inference_ms=3.79, environment_ms=23.42)
COSMOS = ControlTime(inference_ms=254.0, environment_ms=20.0)


def test_libero_spatial_as_published() -> None:
    assert LIBERO.synchronous_hz == pytest.approx(36.7, abs=0.1)
    assert LIBERO.verdict == "environment-bound"
    assert LIBERO.largest_gain == pytest.approx(0.16, abs=0.005)
    assert LIBERO.largest_overlapped_gain == 0
    assert LIBERO.overlapped_hz == LIBERO.environment_hz


def test_slow_policy_as_published() -> None:
    assert COSMOS.verdict == "inference-bound"
    assert COSMOS.overlapped_hz == COSMOS.supply_hz == pytest.approx(1e3 / 254)
    assert COSMOS.synchronous_hz == pytest.approx(1e3 / 274)
    assert COSMOS.largest_gain == pytest.approx(274 / 20 - 1)
    assert COSMOS.largest_overlapped_gain == pytest.approx(254 / 20 - 1)


def test_per_call_and_per_action_are_the_same_case() -> None:
    chunk = ControlTime(inference_ms=37.9, environment_ms=23.42, horizon=10)
    for name in ("synchronous_hz", "overlapped_hz", "supply_hz", "largest_gain", "verdict"):
        one, many = getattr(LIBERO, name), getattr(chunk, name)
        assert many == (one if isinstance(one, str) else pytest.approx(one))
    assert chunk.ridge_ms == pytest.approx(10 * LIBERO.ridge_ms)


def test_synchronous_inverse_is_the_sum_and_overlapped_the_least() -> None:
    c = ControlTime(inference_ms=120, environment_ms=50, horizon=4, other_ms=30)
    assert 1 / c.synchronous_hz == pytest.approx(1 / c.supply_hz + 1 / c.environment_hz)
    assert c.overlapped_hz == min(c.supply_hz, c.environment_hz)
    assert c.supply_hz == pytest.approx(4e3 / 150)


def test_ridge_is_where_both_supply_equally() -> None:
    c = ControlTime(inference_ms=150, environment_ms=50, horizon=4, other_ms=50)
    assert c.call_ms == c.ridge_ms == 200
    assert c.supply_hz == c.environment_hz == c.overlapped_hz
    assert c.ridge_horizon == 4
    assert c.verdict == "environment-bound"
    slower = ControlTime(inference_ms=151, environment_ms=50, horizon=4, other_ms=50)
    assert slower.verdict == "inference-bound"


def test_largest_gain_keeps_the_other_time() -> None:
    c = ControlTime(inference_ms=60, environment_ms=20, horizon=2, other_ms=40)
    gone = ControlTime(inference_ms=1e-9, environment_ms=20, horizon=2, other_ms=40)
    assert 1 + c.largest_gain == pytest.approx(gone.synchronous_hz / c.synchronous_hz)
    assert 1 + c.largest_overlapped_gain == pytest.approx(gone.overlapped_hz / c.overlapped_hz)


@pytest.mark.parametrize(
    "fields",
    [
        {"inference_ms": 0.0},
        {"inference_ms": math.nan},
        {"environment_ms": -1.0},
        {"environment_ms": math.inf},
        {"horizon": 0},
        {"horizon": True},
        {"other_ms": -1.0},
    ],
)
def test_impossible_times_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        ControlTime(**{"inference_ms": 1.0, "environment_ms": 1.0, **fields})  # type: ignore[arg-type]


def test_words_and_json_hold_the_verdict() -> None:
    text = "\n".join(control_lines(LIBERO))
    assert "36.75 Hz one after the other" in text
    assert "environment-bound; faster inference can bring at most 16%" in text
    assert "inference-bound; faster inference can bring at most 13.7x" in "\n".join(
        control_lines(COSMOS)
    )
    assert json.loads(json.dumps(LIBERO.as_dict()))["verdict"] == "environment-bound"


# ---------------------------------------------------------------- kernels


def test_kernel_roof_and_ridge() -> None:
    machine = Machine("m", "bfloat16", flops_per_s=8e12, bytes_per_s=2e10)
    assert machine.ridge == 400
    assert machine.attainable(100) == 2e12
    assert machine.attainable(4000) == 8e12
    assert machine.bound_of(flops=399, bytes_=1) == "memory"
    assert machine.bound_of(flops=400, bytes_=1) == "compute"


def test_least_time_takes_the_slower_of_the_two_per_stage() -> None:
    machine = Machine("m", "bfloat16", flops_per_s=1e12, bytes_per_s=1e10)
    stages = [StageCost("a", "", 2e12, 1e9), StageCost("b", "", 1e9, 1e9, 1e9)]
    assert machine.least_ms(stages) == pytest.approx(2000 + 200)


def test_a_machine_without_speed_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes_per_s"):
        Machine("m", "float32", flops_per_s=1.0, bytes_per_s=0.0)
