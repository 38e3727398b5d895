"""The network runs at the planned steps and no others, and rows keep to themselves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from phyai import Engine, EngineArgs
from phyai.models.pi.presets.builders import sample_observation, tiny_pi05
from phyai.models.pi05 import PI05Args
from phyai.models.pi05.denoiser import PI05Denoiser
from phyai.types import Observation, Step

from step_cache.plugin import StepCache, is_reused


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_pi05(Path(tmp_path_factory.mktemp("cache")), None)


@pytest.fixture(scope="module")
def engine(checkpoint: dict[str, Any]) -> Iterator[Engine]:
    with Engine(EngineArgs("pi05", PI05Args(**checkpoint, max_batch_size=2))) as opened:
        yield opened


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    forward = PI05Denoiser.forward

    def counted(self: Any, x: Any, step: Any, cache: Any) -> Any:
        seen.append(step.index)
        return forward(self, x, step, cache)

    monkeypatch.setattr(PI05Denoiser, "forward", counted)
    return seen


def request(checkpoint: dict[str, Any], seed: int, steps: int) -> Observation:
    sample = sample_observation(checkpoint)
    options = {"seed": seed, "num_steps": steps}
    return Observation(sample.images, sample.state, sample.prompt, options)


@pytest.mark.parametrize(
    ("steps", "planned"),
    [(1, [0]), (2, [0, 1]), (3, [0, 2]), (10, [0, 2, 4, 6, 8, 9])],
)
def test_exactly_the_planned_calls_happen(
    engine: Engine, checkpoint: dict[str, Any], calls: list[int], steps: int, planned: list[int]
) -> None:
    engine.step(request(checkpoint, 0, steps))
    assert calls == planned


def test_rows_of_a_batch_do_not_share_their_state(
    engine: Engine, checkpoint: dict[str, Any]
) -> None:
    rows = [request(checkpoint, seed, 6) for seed in (1, 2)]
    together = engine.step(rows)
    for row, chunk in zip(rows, together, strict=True):
        np.testing.assert_allclose(chunk.actions, engine.step(row).actions, atol=1e-4)
    assert np.abs(together[0].actions - together[1].actions).max() > 1e-3


def test_nothing_is_left_from_the_request_before(
    engine: Engine, checkpoint: dict[str, Any]
) -> None:
    first = engine.step(request(checkpoint, 1, 6)).actions
    engine.step(request(checkpoint, 2, 6))
    np.testing.assert_array_equal(engine.step(request(checkpoint, 1, 6)).actions, first)


def test_reused_steps_follow_the_prediction_before(
    engine: Engine, checkpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any]] = []
    forward = PI05Denoiser.forward

    def kept(self: Any, x: Any, step: Any, cache: Any) -> Any:
        out = forward(self, x, step, cache)
        seen.append((x["action"].clone(), out["action"].clone()))
        return out

    monkeypatch.setattr(PI05Denoiser, "forward", kept)
    network = engine.core.runner.network
    assert isinstance(network, StepCache)
    assert network.approximate
    engine.step(request(checkpoint, 4, 3))
    (x0, v0), (x2, _) = seen
    expected = x0 - (v0 + v0) / 3  # step 1 took the prediction of step 0
    np.testing.assert_allclose(x2.numpy(), expected.numpy(), atol=1e-5)


def test_a_step_that_is_a_graph_input_is_computed() -> None:
    grid = (1.0, 0.75, 0.5, 0.25)
    assert is_reused(Step(1, 0.75, -0.25, grid))
    assert not is_reused(Step(1, 0.75, -0.25, grid, position=object()))  # type: ignore[arg-type]
