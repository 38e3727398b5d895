"""RTC: prefix weights of every schedule, the guidance weight, the guided velocity."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai.cache import CacheInputs
from phyai.errors import PluginContractError, RequestError
from phyai.rtc import SCHEDULES, GuidedRTC, guidance_weight, prefix_weights
from phyai.solver import Euler, uniform_grid
from phyai.timers import Recorder
from phyai.types import Step

CHUNK = 8


# ---------------------------------------------------------------- weights


def test_weights_of_every_schedule() -> None:
    # delay 2, horizon 5: the ramp is linspace(1, 0, 5) without its ends
    ramp = [0.75, 0.5, 0.25]
    bent = [u * (math.exp(u) - 1) / (math.e - 1) for u in ramp]
    want = {
        "ZEROS": [1, 1, 0, 0, 0, 0, 0, 0],
        "ONES": [1, 1, 1, 1, 1, 0, 0, 0],
        "LINEAR": [1, 1, *ramp, 0, 0, 0],
        "EXP": [1, 1, *bent, 0, 0, 0],
    }
    assert set(want) == set(SCHEDULES)
    for schedule, values in want.items():
        got = prefix_weights(schedule, 2, 5, CHUNK)
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.numpy(), values, atol=1e-6, err_msg=schedule)


@pytest.mark.parametrize(
    ("delay", "horizon", "ones"),
    [
        (0, 1, 0),  # nothing is committed
        (5, 5, 5),  # no row left for a ramp
        (7, 5, 5),  # the delay is cut to the horizon
        (99, 99, CHUNK),  # both are cut to the chunk
        (CHUNK, CHUNK, CHUNK),
        (0, 0, 0),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_edges(schedule: str, delay: int, horizon: int, ones: int) -> None:
    weights = prefix_weights(schedule, delay, horizon, CHUNK).tolist()
    assert weights[:ones] == [1.0] * ones
    end = min(horizon, CHUNK)
    assert weights[end:] == [0.0] * (CHUNK - end)
    middle = weights[ones:end]
    if schedule == "ONES":
        assert middle == [1.0] * len(middle)
    elif schedule == "ZEROS":
        assert middle == [0.0] * len(middle)
    else:
        assert all(0.0 < w < 1.0 for w in middle)


@given(st.sampled_from(SCHEDULES), st.integers(0, 20), st.integers(0, 20), st.integers(1, 16))
@settings(deadline=None, max_examples=150)
def test_weights_fall_from_one_to_zero(schedule: str, delay: int, horizon: int, size: int) -> None:
    weights = prefix_weights(schedule, delay, horizon, size)
    assert weights.shape == (size,)
    assert bool(((weights >= 0) & (weights <= 1)).all())
    assert bool((weights.diff() <= 0).all())


@pytest.mark.parametrize("schedule", ["exp", "COSINE", "", None, 3])
def test_an_unknown_schedule_lists_the_known_ones(schedule: Any) -> None:
    with pytest.raises(RequestError, match="EXP, LINEAR, ONES, ZEROS"):
        prefix_weights(schedule, 0, 1, 4)


# ---------------------------------------------------------------- guidance weight


@pytest.mark.parametrize("sigma", [0.9, 0.75, 0.5, 0.25, 0.1])
def test_the_guidance_weight_in_its_published_form(sigma: float) -> None:
    # with t = 1 - sigma: r^2 = (1-t)^2 / (t^2 + (1-t)^2), weight = (1-t) / (t r^2)
    t = 1.0 - sigma
    r2 = (1 - t) ** 2 / (t**2 + (1 - t) ** 2)
    assert guidance_weight(sigma) == pytest.approx((1 - t) / (t * r2), rel=1e-12)


def test_it_is_infinite_at_both_ends() -> None:
    assert guidance_weight(1.0) == guidance_weight(0.0) == math.inf


# ---------------------------------------------------------------- guided velocity


class Network:
    prediction = "velocity"

    def __call__(self, x: Any, step: Any, cache: Any) -> Any:
        return {leaf: torch.sin(t) + step.sigma for leaf, t in x.items()}


def guided(rows: int = 2, limit: float = 5.0, **more: Any) -> tuple[GuidedRTC, Any, Any]:
    generator = torch.Generator().manual_seed(1)
    prev = torch.randn(rows, CHUNK, 3, generator=generator)
    weights = torch.stack([prefix_weights("EXP", 1 + i, 5, CHUNK) for i in range(rows)])
    inputs = {"rtc.w": weights, "rtc.prev": prev, "rtc.max": torch.full((rows,), limit), **more}
    cache: Any = SimpleNamespace(inputs=CacheInputs(inputs), rows=rows)
    x = {"action": torch.randn(rows, CHUNK, 3, generator=generator), "other": torch.ones(rows, 2)}
    return GuidedRTC(Network(), Recorder()), cache, x  # type: ignore[arg-type]


def reference(x: torch.Tensor, sigma: float, cache: Any) -> torch.Tensor:
    """Pseudo-inverse guidance in its own time (0 noise, 1 data), row by row, entry by entry."""
    t = 1.0 - sigma
    out = torch.empty_like(x, dtype=torch.float64)
    for b, row in enumerate(x.double()):
        limit = float(cache.inputs["rtc.max"][b])
        r2 = (1 - t) ** 2 / (t**2 + (1 - t) ** 2) if t < 1 else 0.0
        gain = limit if t == 0 or r2 == 0 else min(limit, (1 - t) / (t * r2))
        for i in range(CHUNK):
            toward_data = -(torch.sin(row[i]) + sigma)  # velocity in their direction of time
            final = row[i] + (1 - t) * toward_data
            pull = (cache.inputs["rtc.prev"][b, i].double() - final) * float(
                cache.inputs["rtc.w"][b, i]
            )
            out[b, i] = -(toward_data + gain * pull)
    return out


@pytest.mark.parametrize("sigma", [1.0, 0.9, 0.5, 0.1])
def test_the_guided_velocity_against_an_independent_formulation(sigma: float) -> None:
    predict, cache, x = guided()
    step = Step(0, sigma, -0.1, (sigma,))
    got = predict(x, step, cache)
    np.testing.assert_allclose(
        got["action"].numpy(), reference(x["action"], sigma, cache).numpy(), atol=2e-5
    )
    assert torch.equal(got["other"], Network()(x, step, cache)["other"])


def test_rows_of_zeros_are_off_and_rows_do_not_mix() -> None:
    predict, cache, x = guided(rows=3)
    cache.inputs["rtc.w"][1] = 0.0
    step = Step(0, 1.0, -0.1, (1.0,))  # where the gain is the row's maximum
    got = predict(x, step, cache)["action"]
    assert torch.equal(got[1], Network()(x, step, cache)["action"][1])
    cache.inputs["rtc.prev"][2] += 1.0
    changed = predict(x, step, cache)["action"]
    assert torch.equal(changed[:2], got[:2])
    assert not torch.equal(changed[2], got[2])


def test_the_maximum_is_per_row() -> None:
    predict, cache, x = guided()
    cache.inputs["rtc.max"][:] = torch.tensor([0.5, 2.0])
    recorder = predict.recorder
    with recorder.recording() as tensors:
        predict(x, Step(0, 1.0, -0.1, (1.0,)), cache)
        predict(x, Step(1, 0.5, -0.1, (0.5,)), cache)
    gains = [t.tolist() for t in tensors["rtc.gain"]]
    assert gains == [[0.5, 2.0], [0.5, pytest.approx(guidance_weight(0.5))]]


def test_known_elements_are_left_alone() -> None:
    mask = torch.zeros(2, CHUNK, 3, dtype=torch.bool)
    mask[:, :2] = True
    predict, cache, x = guided(**{"known.action.mask": mask})
    step = Step(0, 0.5, -0.1, (0.5,))
    got, bare = predict(x, step, cache)["action"], Network()(x, step, cache)["action"]
    assert torch.equal(got[:, :2], bare[:, :2])
    assert not torch.equal(got[:, 2:3], bare[:, 2:3])


def test_full_weight_pulls_the_first_rows_to_the_left_over() -> None:
    predict, cache, x = guided(limit=10.0)
    out = Euler().solve(predict, {"action": x["action"]}, cache, uniform_grid(50))["action"]
    free = Euler().solve(Network(), {"action": x["action"]}, cache, uniform_grid(50))["action"]  # type: ignore[arg-type]
    prev = cache.inputs["rtc.prev"]
    near, far = (out - prev)[:, 0].abs().mean(), (free - prev)[:, 0].abs().mean()
    assert near < 0.3 * far
    assert torch.equal(out[:, 5:], free[:, 5:])


def test_only_a_velocity_can_be_guided() -> None:
    class Clean(Network):
        prediction = "clean"

    with pytest.raises(PluginContractError, match=r"predicts 'clean'.*to_velocity"):
        GuidedRTC(Clean(), Recorder())  # type: ignore[arg-type]
