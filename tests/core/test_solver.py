"""Solvers against closed forms, and the exact values of the time grid."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phyai.errors import ConfigError
from phyai.solver import Direct, Euler, ToVelocity, float32, to_velocity, uniform_grid
from phyai.types import Denoiser, Key, Solver, Step


class Field:
    """A denoiser made of a function of x and sigma."""

    def __init__(self, function: Callable[[Tensor, float], Tensor], prediction: Any) -> None:
        self.function, self.prediction = function, prediction
        self.grids: list[Any] = []
        self.sigmas: list[float] = []

    def prepare_grid(self, grid: Any) -> None:
        self.grids.append(grid)

    def __call__(self, x: Any, step: Step, cache: Any) -> Any:
        self.sigmas.append(step.sigma)
        return {leaf: self.function(tensor, step.sigma) for leaf, tensor in x.items()}


def solve(field: Any, x: Tensor, steps: int) -> Tensor:
    solver = Euler()
    grid = solver.grid(Key(num_steps=steps))
    return solver.solve(field, {"action": x}, None, grid)["action"]  # type: ignore[arg-type]


NOISE = torch.linspace(-2.0, 2.0, 12, dtype=torch.float64).view(1, 3, 4)


# ---------------------------------------------------------------- grid


def test_the_grid_of_ten_steps_has_these_float32_values() -> None:
    # 1 + k*(-1/10) in double, rounded once; the accumulated float32 grid ends at 0.1000000387
    bits = [struct.pack("<f", step.sigma).hex() for step in uniform_grid(10)]
    want = [
        1.0,
        0.899999976158142,
        0.800000011920929,
        0.699999988079071,
        0.600000023841858,
        0.5,
        0.400000005960464,
        0.300000011920929,
        0.200000002980232,
        0.100000001490116,
    ]
    assert [step.sigma for step in uniform_grid(10)] == pytest.approx(want, abs=1e-15)
    assert bits[:3] == ["0000803f", "6666663f", "cdcc4c3f"]


@given(st.integers(1, 300))
@settings(deadline=None, max_examples=60)
def test_every_grid_runs_from_noise_down_with_one_stored_step_size(steps: int) -> None:
    grid = uniform_grid(steps)
    assert len(grid) == steps
    assert grid[0].sigma == 1.0
    assert all(step.dt == -1.0 / steps for step in grid)
    assert [step.index for step in grid] == list(range(steps))
    sigmas = [step.sigma for step in grid]
    assert sigmas == sorted(sigmas, reverse=True)
    assert all(step.grid is grid[0].grid for step in grid)
    assert grid[0].grid == tuple(sigmas)
    assert sigmas == [float32(s) for s in sigmas]
    for k, sigma in enumerate(sigmas):
        assert sigma == float(torch.tensor(1.0 + k * (-1.0 / steps), dtype=torch.float64).float())


@pytest.mark.parametrize("steps", [0, -3])
def test_a_grid_has_at_least_one_step(steps: int) -> None:
    with pytest.raises(ConfigError, match="num_steps must be at least 1"):
        uniform_grid(steps)


def test_a_step_looks_its_row_up_by_constant_or_by_position() -> None:
    table = torch.arange(12.0).view(4, 3)
    assert torch.equal(Step(2, 0.5, -0.25).row(table), table[2])
    at = torch.tensor([3])
    assert torch.equal(Step(2, 0.5, -0.25, position=at).row(table), table[3])


# ---------------------------------------------------------------- Euler


def test_the_update_is_bit_exact_with_the_stored_step_size() -> None:
    noise = NOISE.float()
    want, dt = noise, -1.0 / 10
    for k in range(10):
        want = want + dt * (torch.sin(3 * want) + float32(1.0 + k * dt))
    got = solve(Field(lambda x, sigma: torch.sin(3 * x) + sigma, "velocity"), noise, 10)
    assert torch.equal(got, want)


def test_a_straight_path_is_solved_exactly_in_one_step() -> None:
    data = torch.full_like(NOISE, 0.3)
    # x = sigma*noise + (1-sigma)*data has the constant velocity noise - data
    for steps in (1, 4, 10):
        got = solve(Field(lambda x, sigma: NOISE - data, "velocity"), NOISE, steps)
        torch.testing.assert_close(got, data, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        # dx/dsigma = x: x(0) = x(1) e^-1
        (lambda x, sigma: x, lambda x: x * math.exp(-1.0)),
        # dx/dsigma = -2x: x(0) = x(1) e^2
        (lambda x, sigma: -2.0 * x, lambda x: x * math.exp(2.0)),
        # dx/dsigma = cos(sigma): x(0) = x(1) - sin(1)
        (lambda x, sigma: torch.full_like(x, math.cos(sigma)), lambda x: x - math.sin(1.0)),
        # dx/dsigma = sigma x: x(0) = x(1) e^-1/2
        (lambda x, sigma: sigma * x, lambda x: x * math.exp(-0.5)),
    ],
)
def test_euler_converges_with_order_one(function: Any, exact: Any) -> None:
    errors = [
        float((solve(Field(function, "velocity"), NOISE, n) - exact(NOISE)).abs().max())
        for n in (40, 80, 160)
    ]
    orders = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert orders == pytest.approx([1.0, 1.0], abs=0.06)


def test_leaves_are_integrated_independently_and_inputs_stay() -> None:
    x = {"action": torch.ones(1, 2), "video": torch.full((1, 3), 5.0)}
    field = Field(lambda t, sigma: t, "velocity")
    out = Euler().solve(field, x, None, uniform_grid(3))  # type: ignore[arg-type]
    assert list(out) == ["action", "video"]
    assert torch.equal(x["action"], torch.ones(1, 2))
    torch.testing.assert_close(out["video"], torch.full((1, 3), 5.0 * (2 / 3) ** 3))


def test_on_step_hears_every_step_after_its_update() -> None:
    field, heard = Field(lambda t, sigma: t, "velocity"), []
    grid = uniform_grid(4)
    for solver in (Euler(), Direct()):
        steps = solver.grid(Key(num_steps=4))
        heard.clear()
        solver.solve(field, {"action": torch.ones(1, 1)}, None, steps, on_step=heard.append)  # type: ignore[arg-type]
        assert heard == list(steps)
    assert grid == Euler().grid(Key(num_steps=4))


# ---------------------------------------------------------------- Direct


def test_direct_asks_once_at_sigma_one_and_returns_the_prediction() -> None:
    field = Field(lambda x, sigma: x * 0 + 7.0, "clean")
    solver = Direct()
    grid = solver.grid(Key(num_steps=50))
    out = solver.solve(field, {"action": NOISE}, None, grid)  # type: ignore[arg-type]
    assert field.sigmas == [1.0]
    assert torch.equal(out["action"], torch.full_like(NOISE, 7.0))
    assert solver.accepts == {"clean"}


def test_both_keep_the_solver_protocol_and_no_state() -> None:
    for solver in (Euler(), Direct()):
        assert isinstance(solver, Solver)
        assert vars(solver) == {}


# ---------------------------------------------------------------- to_velocity


def test_a_velocity_is_left_alone() -> None:
    field = Field(lambda x, sigma: x, "velocity")
    assert to_velocity(field) is field


def test_clean_and_noise_predictions_give_the_same_velocity() -> None:
    data = torch.full_like(NOISE, -0.4)
    sigma = 0.3
    x = {"action": sigma * NOISE + (1 - sigma) * data}
    step = Step(0, sigma, -0.1, (sigma,))
    for prediction, function in (
        ("clean", lambda x, s: data),
        ("noise", lambda x, s: NOISE),
    ):
        wrapped: Denoiser = to_velocity(Field(function, prediction))
        assert wrapped.prediction == "velocity"
        got = wrapped(x, step, None)["action"]  # type: ignore[arg-type]
        torch.testing.assert_close(got, NOISE - data, atol=1e-12, rtol=0)


def test_a_noise_prediction_refuses_a_grid_that_starts_at_one() -> None:
    field = Field(lambda x, s: x, "noise")
    wrapped = ToVelocity(field)
    with pytest.raises(ConfigError, match="no velocity at sigma 1"):
        wrapped.prepare_grid(uniform_grid(3))
    below = uniform_grid(3)[1:]
    wrapped.prepare_grid(below)
    assert field.grids == [below]
    ToVelocity(Field(lambda x, s: x, "clean")).prepare_grid(uniform_grid(3))


def test_the_wrapper_tells_what_is_inside() -> None:
    field = Field(lambda x, s: x, "clean")
    field.approximate, field.capture_safe = True, False  # type: ignore[attr-defined]
    wrapped = ToVelocity(field)
    assert (wrapped.inner, wrapped.approximate, wrapped.capture_safe) == (field, True, False)
    assert (ToVelocity(Field(lambda x, s: x, "clean")).capture_safe) is True
