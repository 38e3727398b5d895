"""Each part replaced by a third party, and the denoiser wrapped at both stages with own buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phyai.adapter import DefaultOutput
from phyai.errors import PluginContractError, PluginError
from phyai.hooks import hookimpl
from phyai.solver import Direct, Euler
from phyai.types import BufferSpec
from tests.core.test_contract import STATES, expected, observation
from tests.core.test_contract_hooks import Through
from tests.core.toy_adapter import (
    ACTIONS,
    HORIZON,
    STATE,
    Features,
    FlowAdapter,
    ToyRequest,
    open_engine,
    registry,
    use_hooks,
)


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


def replacing(hook: str, part: Any) -> SimpleNamespace:
    @hookimpl(specname=hook)
    def replace() -> Any:
        return part

    return SimpleNamespace(replace=replace)


class Constant:
    """A network of its own that predicts the data."""

    prediction = "clean"

    def __call__(self, x: Any, step: Any, cache: Any) -> Any:
        return {"action": torch.full_like(x["action"], 0.5)}


# ---------------------------------------------------------------- replacing


def test_a_replaced_conditioning_writes_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Features):
        def encode(self, cache: Any) -> None:
            cache["features"].zero_()

    use_hooks(monkeypatch, mine=replacing("phyai_conditioning", Silent()))
    with open_engine() as engine:
        out = engine.step(ToyRequest(STATES))
    np.testing.assert_allclose(out.numpy(), 0.25, atol=1e-6)  # the bias alone


def test_a_replaced_cache_declares_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(key: Any) -> Mapping[str, BufferSpec]:
        return {
            "features": BufferSpec((STATE,), torch.float32),
            "more": BufferSpec((7,), torch.float32),
        }

    use_hooks(monkeypatch, mine=replacing("phyai_cache", spec))
    with open_engine() as engine:
        out = engine.step(ToyRequest(STATES))
        (bound,) = engine.core.runner._bound.values()
        assert bound.cache["more"].shape[1:] == (7,)
    np.testing.assert_allclose(out.numpy(), expected(STATES), atol=1e-6)


def test_a_replaced_output_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zero(DefaultOutput):
        def decode(self, x: Any, cache: Any, prepared: Any) -> Any:
            return super().decode({"action": torch.zeros_like(x["action"])}, cache, prepared)

    use_hooks(monkeypatch, mine=replacing("phyai_output", Zero()))
    with open_engine() as engine:
        assert not engine.step(observation()).actions.any()


def test_a_replaced_network_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    @hookimpl
    def phyai_denoiser(stage: str) -> Any:
        return Constant() if stage == "network" else None

    use_hooks(monkeypatch, mine=SimpleNamespace(phyai_denoiser=phyai_denoiser))
    with open_engine(known=1) as engine:
        out = engine.step(ToyRequest(STATES))
    assert torch.equal(out[:, 1:], torch.full((3, HORIZON - 1, ACTIONS), 0.5))
    assert torch.equal(out[:, :1], torch.full((3, 1, ACTIONS), 0.1))


def test_a_rollout_solver_is_bound_at_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    use_hooks(monkeypatch, mine=replacing("phyai_rollout_solver", Euler()))
    with open_engine() as engine:
        assert isinstance(engine.core.runner.rollout_solver, Euler)
    use_hooks(monkeypatch, mine=replacing("phyai_rollout_solver", 3))
    with pytest.raises(PluginContractError, match="'mine' must return a rollout_solver part"):
        open_engine()


def test_a_wrapped_solver_sees_the_grid_and_the_composed_denoiser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    class Watching(Through):
        def solve(self, denoiser: Any, x: Any, cache: Any, grid: Any, *more: Any) -> Any:
            seen.append((type(denoiser).__name__, len(grid)))
            return self.inner.solve(denoiser, x, cache, grid, *more)

    @hookimpl(wrapper=True)
    def phyai_solver() -> Any:
        return Watching((yield))

    use_hooks(monkeypatch, mine=SimpleNamespace(phyai_solver=phyai_solver))
    with open_engine(FlowAdapter) as engine:
        engine.step(ToyRequest(STATES, 4))
    assert seen == [("Hold", 4)]


def test_two_replacements_stop_the_start_and_are_both_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_hooks(
        monkeypatch,
        one=replacing("phyai_solver", Direct()),
        two=replacing("phyai_solver", Direct()),
    )
    with pytest.raises(PluginContractError, match="'one' and 'two'"):
        open_engine()


# ---------------------------------------------------------------- the denoiser at both stages


class Skipping:
    """Calls ``inner`` at every other step and repeats its answer; the answer is a buffer."""

    approximate = True

    def __init__(self, inner: Any, buffer: str) -> None:
        self.inner, self.buffer = inner, buffer
        self.prediction = inner.prediction

    def __call__(self, x: Any, step: Any, cache: Any) -> Any:
        held = cache[self.buffer]
        if step.index % 2 == 0:
            held.copy_(self.inner(x, step, cache)["action"])
        return {"action": held.clone()}


def step_cache(wanted: str) -> SimpleNamespace:
    buffer = f"skipping.{wanted}"

    @hookimpl(wrapper=True)
    def phyai_cache() -> Any:
        inner = yield
        held = BufferSpec((HORIZON, ACTIONS), torch.float32, scratch=True)
        return lambda key: {**inner(key), buffer: held}

    @hookimpl(wrapper=True)
    def phyai_denoiser(stage: str) -> Any:
        inner = yield
        return Skipping(inner, buffer) if stage == wanted else inner

    return SimpleNamespace(phyai_cache=phyai_cache, phyai_denoiser=phyai_denoiser)


def skipped(steps: int) -> Any:
    """The flow of the toy by hand, its velocity taken at every other step only."""
    data = torch.from_numpy(np.asarray(expected(STATES), np.float32))
    with open_engine(FlowAdapter) as engine:
        noise = engine.adapter.prepare(ToyRequest(STATES, steps)).tensors["noise.action"]
    x, velocity = noise.clone(), torch.zeros_like(noise)
    for index in range(steps):
        if index % 2 == 0:
            velocity = (x - data) / (1 - index / steps)
        x = x - velocity / steps
    return x


@pytest.mark.parametrize("stage", ["network", "prediction"])
def test_a_step_cache_keeps_its_answers_in_buffers_of_its_own(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = skipped(5)
    use_hooks(monkeypatch, skipping=step_cache(stage))
    with open_engine(FlowAdapter) as engine:
        together = engine.step(ToyRequest(STATES, 5))
        (bound,) = engine.core.runner._bound.values()
        assert bound.cache[f"skipping.{stage}"].shape == (3, HORIZON, ACTIONS)
        again = engine.step(ToyRequest(STATES, 5))
    np.testing.assert_allclose(together.numpy(), want.numpy(), atol=1e-5)
    assert torch.equal(together, again)


def test_step_caches_at_both_stages_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    use_hooks(monkeypatch, a=step_cache("network"), b=step_cache("prediction"))
    with open_engine(FlowAdapter) as engine:
        engine.step(ToyRequest(STATES, 4))
        (bound,) = engine.core.runner._bound.values()
        pointers = {bound.cache[f"skipping.{s}"].data_ptr() for s in ("network", "prediction")}
    assert len(pointers) == 2


def test_a_broken_prediction_hook_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    @hookimpl(wrapper=True)
    def phyai_denoiser(stage: str) -> Any:
        inner = yield
        return inner if stage == "network" else 1 / 0

    use_hooks(monkeypatch, broken=SimpleNamespace(phyai_denoiser=phyai_denoiser))
    with pytest.raises(PluginError, match="'broken' failed in phyai_denoiser: ZeroDivisionError"):
        open_engine()


def test_a_missing_buffer_names_what_the_cache_has(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = step_cache("network")
    del plugin.phyai_cache
    use_hooks(monkeypatch, skipping=plugin)
    with (
        open_engine(FlowAdapter) as engine,
        pytest.raises(PluginContractError, match=r"must be declared.*'skipping\.network'"),
    ):
        engine.step(ToyRequest(STATES, 2))
