"""UniPC: schedules by value, recorded trajectories, what the steps must do, hostile grid names."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from phyai.errors import ConfigError
from phyai.types import Key, Solver, Step
from phyai.unipc import UniPC, explicit_grid, sigma_at, sigmas_of, timestep

RECORDED = Path(__file__).parents[1] / "golden/cosmos3/case_sampler.safetensors"
NAMES = {
    "nv_flow": "native:{0}",
    "df_flow": "diffusers_flow:{0}",
    "df_karras": "karras:0.147:200.0:7.0",
}
SCHEDULES = ["native:1", "native:5", "native:10", "diffusers_flow:5", "karras:0.147:200.0:7.0"]


class Field:
    """A denoiser made of a function of x and the step; keeps what it was asked."""

    prediction = "velocity"

    def __init__(self, function: Any) -> None:
        self.function = function
        self.asked: list[Tensor] = []
        self.steps: list[Step] = []

    def __call__(self, x: Any, step: Step, cache: Any) -> Any:
        self.asked.append(x["video"].clone())
        self.steps.append(step)
        return {leaf: self.function(tensor, step) for leaf, tensor in x.items()}


def run(field: Field, x: Tensor, steps: int, grid: str, **options: Any) -> Tensor:
    solver = UniPC()
    made = solver.grid(Key(num_steps=steps, grid=grid))
    out = solver.solve(field, {"video": x}, None, made, **options)  # type: ignore[arg-type]
    return out["video"]


# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("grid", "want"),
    [
        ("native:5", [999, 937, 833, 624, 0]),
        ("native:10", [999, 967, 908, 768, 0]),
        ("diffusers_flow:5", [999, 937, 833, 625, 0]),
        ("karras:0.147:200.0:7.0", [995, 973, 798, 128, 0]),
    ],
)
def test_published_timesteps(grid: str, want: list[int]) -> None:
    assert [timestep(sigma) for sigma in sigmas_of(grid, 4)] == want


@pytest.mark.parametrize("grid", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 3, 35, 100, 1000])
def test_every_schedule_falls_from_noise_to_zero(grid: str, steps: int) -> None:
    sigmas = sigmas_of(grid, steps)
    assert len(sigmas) == steps + 1
    assert sigmas[-1] == 0.0
    assert 0.99 < sigmas[0] < 1.0
    assert all(a > b for a, b in pairwise(sigmas))


def test_the_shift_is_applied_once() -> None:
    plain = sigmas_of("native:1", 4)[:-1]
    want = [5 * s / (1 + 4 * s) for s in plain]
    assert sigmas_of("native:5", 4)[:-1] == pytest.approx(want, abs=1e-15)


def test_a_grid_stores_every_step_in_double() -> None:
    grid = UniPC().grid(Key(num_steps=3, grid="diffusers_flow:1"))
    assert [timestep(step.sigma) for step in grid] == [999, 667, 333]
    # What float32 would say of the same levels:
    assert [timestep(float(torch.tensor(s.sigma))) for s in grid] == [999, 666, 333]
    assert [step.index for step in grid] == [0, 1, 2]
    assert all(step.grid is grid[0].grid for step in grid)
    assert grid[0].grid == tuple(step.sigma for step in grid)
    assert sum(step.dt for step in grid) == pytest.approx(-grid[0].sigma)


def test_levels_written_into_a_name_come_back_exactly() -> None:
    sigmas = [1.0, 1 / 3, 0.1 + 0.2, math.nextafter(0.25, 1)]
    sigmas.sort(reverse=True)
    assert sigmas_of(explicit_grid(sigmas), 4) == (*sigmas, 0.0)


@given(st.integers(0, 999))
@settings(deadline=None, max_examples=100)
def test_every_timestep_has_a_level(step: int) -> None:
    assert timestep(sigma_at(step)) == step
    assert sigma_at(step) == pytest.approx(step / 1000, abs=1e-12)


def test_a_key_without_a_schedule_takes_the_solvers_own() -> None:
    assert UniPC("native:5").grid(Key(num_steps=4)) == UniPC().grid(Key(4, grid="native:5"))
    with pytest.raises(ConfigError, match="schedule"):
        UniPC("nativ:5")


@pytest.mark.parametrize(
    ("grid", "steps", "match"),
    [
        ("euler:5", 4, "grid must name a schedule"),
        ("nativ:5", 4, "Did you mean 'native'"),
        ("", 4, "grid must name a schedule"),
        ("native", 4, "finite numbers"),
        ("native:", 4, "finite numbers"),
        ("native:x", 4, "finite numbers"),
        ("native:nan", 4, "finite numbers"),
        ("native:inf", 4, "finite numbers"),
        ("native:0", 4, r"in \(0, 1e6\]"),
        ("native:-1", 4, r"in \(0, 1e6\]"),
        ("native:5:6", 4, "must have the form native:<shift>"),
        ("karras:0.1:200", 4, "must have the form karras"),
        ("karras:200:0.1:7", 4, "must fall"),
        ("karras:1:1:7", 4, "must fall"),
        ("karras:1e-300:1e-300:1e-300", 2, "must fall"),
        ("karras:1:1e6:1e-300", 2, "keep its levels finite"),
        ("sigmas:", 1, "finite numbers"),
        ("sigmas:0.5,0.7", 2, "must fall"),
        ("sigmas:0.5,0.5", 2, "must fall"),
        ("sigmas:0.5,0.49999999999", 2, "must fall"),
        ("sigmas:1.5,0.5", 2, "must fall"),
        ("sigmas:0.5,0", 2, "must fall"),
        ("sigmas:0.5,-0.5", 2, "must fall"),
        ("sigmas:0.9,0.5", 3, "as many sigmas as num_steps"),
        ("native:1e6", 10_000, "must fall"),
        ("native:5", 0, "num_steps must be in"),
        ("native:5", 10_001, "num_steps must be in"),
        ("native:5", True, "must be an integer"),
        ("native:5", 4.0, "must be an integer"),
    ],
)
def test_bad_grids_are_refused(grid: str, steps: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        sigmas_of(grid, steps)


# ---------------------------------------------------------------- recorded runs


def recorded_names() -> list[str]:
    return sorted(key[: -len(".sigmas")] for key in load_file(RECORDED) if key.endswith(".sigmas"))


def analytic(x: Tensor, step: Step) -> Tensor:
    t = timestep(step.sigma)
    return torch.sin(1.3 * x + 0.002 * t) + 0.3 * x * math.cos(0.001 * t)


@pytest.mark.parametrize("name", recorded_names())
def test_recorded_trajectories(name: str) -> None:
    data = load_file(RECORDED)
    found = re.fullmatch(r"([a-z_]+)_n(\d+)(?:_s(\d+))?", name)
    assert found is not None
    grid, steps = NAMES[found.group(1)].format(found.group(3)), int(found.group(2))
    sigmas = sigmas_of(grid, steps)
    assert [timestep(sigma) for sigma in sigmas[:-1]] == data[f"{name}.timesteps"].tolist()
    made = torch.tensor(sigmas, dtype=torch.float32)
    torch.testing.assert_close(made, data[f"{name}.sigmas"], atol=1e-6, rtol=0)
    field = Field(analytic)
    out = run(field, data["x_init"], steps, grid)
    states = torch.stack([*field.asked[1:], out])
    torch.testing.assert_close(states, data[f"{name}.traj"], atol=1e-5, rtol=0)


# ---------------------------------------------------------------- what steps must do


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("grid", ["native:5", "karras:0.147:200.0:7.0"])
def test_a_straight_path_is_solved_exactly(steps: int, grid: str) -> None:
    noise, data = torch.linspace(-2, 2, 6), torch.linspace(0.3, -0.7, 6)
    sigma = sigmas_of(grid, steps)[0]
    start = sigma * noise + (1 - sigma) * data
    out = run(Field(lambda x, step: noise - data), start, steps, grid)
    torch.testing.assert_close(out, data, atol=2e-6, rtol=0)


@pytest.mark.parametrize("first", [1.0, 0.999])
def test_pure_noise_may_be_a_level(first: float) -> None:
    grid = explicit_grid([first, 0.8, 0.5, 0.2])
    out = run(Field(analytic), torch.linspace(-1, 1, 5), 4, grid)
    assert torch.isfinite(out).all()
    one = run(Field(lambda x, step: torch.ones_like(x)), torch.zeros(3), 1, "sigmas:1.0")
    assert one.tolist() == [-1.0, -1.0, -1.0]


def test_it_converges_with_second_order() -> None:
    # x = sigma*noise + (1 - sigma)*data(sigma) with a smooth prediction of the data.
    def field(x: Tensor, step: Step) -> Tensor:
        clean = 0.5 * torch.tanh(x.double()) + 0.1
        return ((x.double() - clean) / step.sigma).to(x.dtype)

    start = torch.linspace(-1.5, 1.5, 7, dtype=torch.float64)

    def at(steps: int) -> Tensor:
        levels = [0.9 - 0.6 * k / steps for k in range(steps)]
        kept = Field(field)
        run(kept, start, steps + 2, explicit_grid([*levels, 0.3, 0.1]))
        return kept.asked[steps]  # the predicted x at 0.3

    truth = at(1280)
    errors = [float((at(steps) - truth).abs().max()) for steps in (20, 40, 80)]
    assert errors[0] / errors[1] > 3.5
    assert errors[1] / errors[2] > 3.5


def test_elements_at_rest_do_not_move() -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)) * 3

    def still(tensor: Tensor, step: Step) -> Tensor:
        return torch.zeros_like(tensor)

    out = run(Field(still), x, 35, "native:10")
    torch.testing.assert_close(out, x, atol=1e-5, rtol=0)


def test_leaves_are_independent_of_each_other() -> None:
    solver, key = UniPC(), Key(num_steps=5, grid="native:5")
    x = {"video": torch.linspace(-1, 1, 6).view(1, 6), "action": torch.linspace(2, -2, 4)}
    both = solver.solve(Field(analytic), x, None, solver.grid(key))  # type: ignore[arg-type]
    alone = run(Field(analytic), x["video"], 5, "native:5")
    assert torch.equal(both["video"], alone)
    assert both["action"].shape == (4,)


def test_one_solver_runs_any_number_of_times_alike() -> None:
    solver = UniPC()
    grid = solver.grid(Key(num_steps=4, grid="native:5"))
    x = {"video": torch.linspace(-1, 1, 6)}
    before = x["video"].clone()
    runs = [solver.solve(Field(analytic), x, None, grid)["video"] for _ in range(2)]  # type: ignore[arg-type]
    assert torch.equal(*runs)
    assert torch.equal(x["video"], before)
    assert vars(solver) == {"default": "native:1.0"}


def test_the_network_is_asked_once_per_step_and_progress_follows_each() -> None:
    seen: list[tuple[int, int]] = []
    field = Field(analytic)

    def done(step: Step) -> None:
        seen.append((step.index, len(field.steps)))

    run(field, torch.zeros(2), 4, "native:5", on_step=done)
    assert seen == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_it_stops_when_progress_raises() -> None:
    field = Field(analytic)

    def stop(step: Step) -> None:
        if step.index == 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run(field, torch.zeros(2), 4, "native:5", on_step=stop)
    assert len(field.steps) == 2


def test_state_stays_float32_and_a_reused_output_buffer_is_harmless() -> None:
    buffer = torch.empty(5, dtype=torch.bfloat16)

    def static(x: Tensor, step: Step) -> Tensor:
        buffer.copy_(torch.sin(x) + step.sigma)
        return buffer

    def fresh(x: Tensor, step: Step) -> Tensor:
        return (torch.sin(x) + step.sigma).to(torch.bfloat16)

    x = torch.linspace(-1, 1, 5)
    out = run(Field(static), x, 4, "native:5")
    assert out.dtype == torch.float32
    assert torch.equal(out, run(Field(fresh), x, 4, "native:5"))


def test_it_is_a_solver_of_velocities() -> None:
    assert isinstance(UniPC(), Solver)
    assert UniPC.accepts == {"velocity"}
