"""The solver is pi0.5's alone, and comes closer to the many-step result than Euler."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from phyai import Engine, EngineArgs
from phyai.models.pi.config import PiConfig
from phyai.models.pi.presets.builders import sample_observation, tiny_pi05
from phyai.models.pi05 import PI05Args
from phyai.solver import Euler
from phyai.types import Key, Observation

from pi05_multistep import plugin
from pi05_multistep.solver import AdamsBashforth2


def exponential(solver: Euler | AdamsBashforth2, steps: int) -> float:
    """Return the error at sigma 0 of dx/dsigma = x from x(1) = e, whose solution is 1."""

    class Field:
        prediction = "velocity"

        def __call__(self, x, step, cache):  # type: ignore[no-untyped-def]
            return dict(x)

    grid = solver.grid(Key(num_steps=steps))
    out = solver.solve(Field(), {"action": np.e}, None, grid)  # type: ignore[arg-type, dict-item]
    return abs(float(out["action"]) - 1.0)


def test_error_falls_with_the_square_of_the_steps() -> None:
    ratio = exponential(AdamsBashforth2(), 20) / exponential(AdamsBashforth2(), 40)
    assert ratio == pytest.approx(4.0, rel=0.1)
    assert exponential(Euler(), 20) / exponential(Euler(), 40) == pytest.approx(2.0, rel=0.1)


def test_other_adapters_keep_their_solver() -> None:
    assert plugin.phyai_solver(SimpleNamespace(name="pi0"), None) is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return the tiny pi0.5 with a smooth dependence on the noise level.

    Time features of period 0.004 go through random weights here; trained ones have learnt a field
    that solvers can follow.
    """
    args = tiny_pi05(Path(tmp_path_factory.mktemp("cache")), None)
    config = PiConfig.from_folder(Path(args["checkpoint_dir"]), "pi05")
    return {**args, "config": replace(config, min_period=2.0)}


@pytest.fixture(scope="module")
def engine(checkpoint: dict[str, object]) -> Iterator[Engine]:
    with Engine(EngineArgs("pi05", PI05Args(**checkpoint))) as opened:
        yield opened


def actions(engine: Engine, checkpoint: dict[str, object], steps: int) -> np.ndarray:
    sample = sample_observation(checkpoint)
    noise = {"seed": 3, "num_steps": steps}
    request = Observation(sample.images, sample.state, sample.prompt, noise)
    return np.asarray(engine.step(request).model_actions)


def test_pi05_runs_it_and_comes_closer_at_equal_cost(
    engine: Engine, checkpoint: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(engine.core.runner.solver, AdamsBashforth2)
    want = actions(engine, checkpoint, 200)
    error = {n: float(np.abs(actions(engine, checkpoint, n) - want).mean()) for n in (5, 10, 20)}
    assert error[10] < 0.4 * error[5]
    assert error[20] < 0.4 * error[10]
    monkeypatch.setattr(AdamsBashforth2, "solve", Euler.solve)
    engine.core.runner.close()  # forget what was captured
    for steps, ours in error.items():
        eulers = float(np.abs(actions(engine, checkpoint, steps) - want).mean())
        assert ours < 0.3 * eulers, steps
