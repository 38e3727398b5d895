"""The contract is not shaped like one model: a regression adapter runs on the same core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine, EngineArgs, Observation
from phyai.adapter import Adapter, AdapterArgs, DefaultOutput
from phyai.errors import PluginContractError, RequestError
from phyai.types import ActionChunk, Output
from tests.core.toy_adapter import (
    ACTIONS,
    HORIZON,
    STATE,
    FlowAdapter,
    MismatchedAdapter,
    ToyAdapter,
    ToyArgs,
    ToyRequest,
    config,
    open_engine,
    registry,
)


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


def expected(state: Any, factor: float = 1.0) -> np.ndarray:
    policy = ToyAdapter.__new__(ToyAdapter)
    policy.args = ToyArgs(factor=factor)
    policy.load()
    with torch.no_grad():
        out = policy.policy.linear(2.0 * torch.as_tensor(state, dtype=torch.float32))
    return out.view(-1, HORIZON, ACTIONS).numpy()


STATES = torch.tensor([[0.1, -0.2, 0.3, 0.0], [1.0, 2.0, -3.0, 0.5], [0.0, 0.0, 0.0, 1.0]])


def observation(row: int = 0, **options: Any) -> Observation:
    return Observation(state=STATES[row].numpy(), options=options)


# ---------------------------------------------------------------- requests


def test_an_observation_gives_an_action_chunk() -> None:
    with open_engine() as engine:
        chunk = engine.step(observation())
    assert isinstance(chunk, ActionChunk)
    np.testing.assert_allclose(chunk.actions, expected(STATES[:1])[0], atol=1e-6)
    assert chunk.names == ("action_0", "action_1")
    assert chunk.mask.tolist() == [True] * HORIZON
    assert chunk.horizon == HORIZON


def test_a_list_gives_a_list_and_a_list_of_one_stays_a_list() -> None:
    with open_engine() as engine:
        chunks = engine.step([observation(i) for i in range(3)])
        alone = engine.step([observation(1)])
    assert isinstance(alone, list)
    np.testing.assert_allclose(np.stack([c.actions for c in chunks]), expected(STATES), atol=1e-6)
    np.testing.assert_allclose(alone[0].actions, chunks[1].actions, atol=1e-6)


def test_a_model_request_gives_the_model_space_tensor() -> None:
    with open_engine() as engine:
        out = engine.step(ToyRequest(STATES))
        again = engine.step(ToyRequest(STATES + 1.0))
    assert isinstance(out, torch.Tensor)
    np.testing.assert_allclose(out.numpy(), expected(STATES), atol=1e-6)  # no buffer is shared
    assert not torch.equal(out, again)


def test_a_bad_request_leaves_the_engine_working() -> None:
    with open_engine() as engine:
        before = engine.step(observation()).actions
        with pytest.raises(RequestError, match="state must have 4"):
            engine.step(Observation(state=[1.0]))
        with pytest.raises(RequestError, match="at most 4 rows"):
            engine.step([observation()] * 5)
        with pytest.raises(RequestError, match="at least one row"):
            engine.step([])
        with pytest.raises(RequestError, match="speed"):
            engine.step(observation(speed=1))
        assert np.array_equal(engine.step(observation()).actions, before)


def test_an_unfinished_adapter_is_a_contract_error_naming_the_method() -> None:
    class Empty(Adapter):
        name = "toy-empty"

    with pytest.raises(PluginContractError, match=r"lacks prepare\(\), denoiser\(\)"):
        open_engine(Empty)
    with pytest.raises(PluginContractError, match=r"Empty must implement prepare\(\)"):
        Empty(AdapterArgs(), config(), None).prepare(observation())  # type: ignore[arg-type]

    class NoNoise(ToyAdapter):
        name = "toy-silent"

        def _prepared(self, *args: Any) -> Any:
            whole = super()._prepared(*args)
            return replace(whole, tensors={"state": whole.tensors["state"]})

    with open_engine(NoNoise) as engine, pytest.raises(PluginContractError, match="noise"):
        engine.step(observation())


def test_decode_must_return_one_result_per_row() -> None:
    class Short(DefaultOutput):
        def decode(self, x: Any, cache: Any, prepared: Any) -> Any:
            return super().decode(x, cache, prepared)[:1]

    class ShortAdapter(ToyAdapter):
        name = "toy-short"

        def output(self) -> Output:
            return Short()

    with open_engine(ShortAdapter) as engine:
        engine.step(observation())
        with pytest.raises(PluginContractError, match="1 for 2 rows"):
            engine.step([observation(), observation(1)])


# ---------------------------------------------------------------- solver and prediction type


def test_a_solver_that_cannot_use_the_prediction_fails_at_set_up() -> None:
    with pytest.raises(PluginContractError, match=r"Euler accepts velocity.*'clean'.*to_velocity"):
        open_engine(MismatchedAdapter)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_to_velocity_lets_euler_integrate_a_clean_prediction(steps: int) -> None:
    with open_engine(FlowAdapter) as engine:
        out = engine.step(ToyRequest(STATES, steps))
    # the prediction does not depend on x, so every Euler step stays on the straight line to it
    np.testing.assert_allclose(out.numpy(), expected(STATES), atol=1e-5)


@pytest.mark.parametrize("cls", [ToyAdapter, FlowAdapter])
def test_known_elements_keep_their_value_exactly(cls: type[ToyAdapter]) -> None:
    with open_engine(cls, known=2) as engine:
        out = engine.step(ToyRequest(STATES, 3))
    assert torch.equal(out[:, :2], torch.full((3, 2, ACTIONS), 0.1))
    np.testing.assert_allclose(out[:, 2].numpy(), expected(STATES)[:, 2], atol=1e-5)


# ---------------------------------------------------------------- registering


def test_register_works_as_a_decorator_and_by_name() -> None:
    @Engine.register
    class Mine(ToyAdapter):
        """Mine."""

        name = "toy-mine"

    assert "toy-mine" in Engine.registered()
    with Engine(EngineArgs("toy-mine", ToyArgs(), config())) as engine:
        assert isinstance(engine.adapter, Mine)
        assert engine.step(Observation(state=np.zeros(STATE))).actions.shape == (HORIZON, ACTIONS)
