"""The clean-action solver against its recurrence, written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.cache import CacheInputs
from phyai.errors import ConfigError
from phyai.known import Hold, impose
from phyai.models.minicpm_robot.solver import CleanResample
from phyai.types import Key, Step


class Toy:
    """Predicts clean actions as some function of x and the step, and remembers what it saw."""

    prediction = "clean"

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.steps: list[Step] = []

    def __call__(self, x: dict[str, Tensor], step: Step, cache: Any) -> dict[str, Tensor]:
        self.seen.append(x["action"].clone())
        self.steps.append(step)
        return {"action": self.of(x["action"], step.sigma)}

    @staticmethod
    def of(x: Tensor, t: float) -> Tensor:
        return torch.sin(3 * x) + t


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 50])
def test_the_loop_is_the_recurrence(steps: int) -> None:
    noise = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(steps))
    kept, toy, solver = noise.clone(), Toy(), CleanResample()
    got = solver.solve(toy, {"action": noise}, None, solver.grid(Key(num_steps=steps)))
    clean = torch.zeros_like(noise)
    for i, k in enumerate(range(steps, 0, -1)):
        t = k / steps
        x = t * noise + (1 - t) * clean
        assert torch.equal(toy.seen[i], x)
        clean = toy.of(x, t)
    assert torch.equal(got["action"], clean)
    assert torch.equal(noise, kept), "the noise is used again"
    assert torch.equal(toy.seen[0], noise), "the first step sees pure noise"


def test_sigma_is_the_fraction_in_python_floats() -> None:
    """Not float32(1 - i/N): the integer time 570 of step 57/100 hangs on it."""
    for count in (3, 7, 100):
        grid = CleanResample().grid(Key(num_steps=count))
        assert [step.sigma for step in grid] == [k / count for k in range(count, 0, -1)]
        assert [step.index for step in grid] == list(range(count))
        assert all(step.grid is grid[0].grid for step in grid)


def test_it_accepts_clean_predictions_only() -> None:
    assert CleanResample().accepts == {"clean"}


@pytest.mark.parametrize("steps", [0, -2])
def test_no_step_is_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        CleanResample().grid(Key(num_steps=steps))


def test_every_step_is_told() -> None:
    told: list[int] = []
    solver = CleanResample()
    grid = solver.grid(Key(num_steps=3))
    x = {"action": torch.zeros(1, 1, 1)}
    solver.solve(Toy(), x, None, grid, on_step=lambda step: told.append(step.index))
    assert told == [0, 1, 2]


def test_known_elements_stay_at_their_values() -> None:
    mask = torch.zeros(1, 4, 2, dtype=torch.bool)
    mask[:, :2] = True
    value = torch.full((1, 4, 2), 0.25)
    known = {"known.action.mask": mask, "known.action.value": value}
    cache: Any = SimpleNamespace(inputs=CacheInputs(known))
    toy, solver = Toy(), CleanResample()
    x = impose({"action": torch.randn(1, 4, 2)}, cache)
    got = solver.solve(Hold(toy), x, cache, solver.grid(Key(num_steps=4)))["action"]
    assert torch.equal(got[mask], value[mask])
    for seen in toy.seen:
        torch.testing.assert_close(seen[mask], value[mask])
    assert not torch.equal(got[~mask], value[~mask])


def test_nothing_is_kept_between_solves() -> None:
    solver = CleanResample()
    grid = solver.grid(Key(num_steps=4))
    a, b = ({"action": torch.full((1, 2, 2), v)} for v in (0.3, -1.0))
    first = solver.solve(Toy(), a, None, grid)["action"]
    solver.solve(Toy(), b, None, grid)
    assert torch.equal(solver.solve(Toy(), a, None, grid)["action"], first)
    assert not vars(solver)
