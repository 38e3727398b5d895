"""The contract is not shaped like one model: a regression adapter runs on the same core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pluggy
import pytest
import torch
from pluggy import _hooks, _manager

from phyai import Engine, EngineArgs, Observation
from phyai.adapter import Adapter, AdapterArgs, DefaultOutput
from phyai.errors import ActionRejected, PluginContractError, RequestError
from phyai.hooks import hookimpl
from phyai.known import Hold
from phyai.solver import Direct
from phyai.types import ActionChunk, Denoiser, Output, Solver
from tests.core.sandbox import make_distribution
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
    use_hooks,
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


# ---------------------------------------------------------------- hooks


class Through:
    """Passes everything on to ``inner``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any) -> Any:
        return self.inner(*args)


def wrapping_everything() -> SimpleNamespace:
    def around(hook: str) -> Any:
        @hookimpl(wrapper=True, specname=hook)
        def wrap() -> Any:
            return Through((yield))

        return wrap

    hooks = ("solver", "output", "conditioning", "cache", "denoiser")
    return SimpleNamespace(**{name: around(f"phyai_{name}") for name in hooks})


@pytest.mark.parametrize("cls", [ToyAdapter, FlowAdapter])
def test_identity_wrappers_change_no_bit(
    cls: type[ToyAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(cls, known=1) as engine:
        plain = engine.step(ToyRequest(STATES, 3)), engine.step(observation())
    use_hooks(monkeypatch, spy=wrapping_everything())
    with open_engine(cls, known=1) as engine:
        runner = engine.core.runner
        assert isinstance(runner.solver, Through)
        assert isinstance(runner.output, Through)
        assert isinstance(runner.network, Through)
        wrapped = engine.step(ToyRequest(STATES, 3)), engine.step(observation())
    assert torch.equal(plain[0], wrapped[0])
    assert np.array_equal(plain[1].actions, wrapped[1].actions)


def test_a_network_hook_is_inside_hold_and_a_prediction_hook_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Plus(Through):
        def __call__(self, x: Any, step: Any, cache: Any) -> Any:
            return {leaf: t + 1.0 for leaf, t in self.inner(x, step, cache).items()}

    def plugin(stage_wanted: str) -> SimpleNamespace:
        @hookimpl(wrapper=True)
        def phyai_denoiser(stage: str) -> Any:
            inner: Denoiser = yield
            return Plus(inner) if stage == stage_wanted else inner

        return SimpleNamespace(phyai_denoiser=phyai_denoiser)

    for stage in ("network", "prediction"):
        use_hooks(monkeypatch, plus=plugin(stage))
        with open_engine(known=1) as engine:
            out = engine.step(ToyRequest(STATES))
            (bound,) = engine.core.runner._bound.values()
        assert isinstance(bound.predict, Hold if stage == "network" else Plus)
        # known elements are imposed at the end in either case
        assert torch.equal(out[:, :1], torch.full((3, 1, ACTIONS), 0.1))
        np.testing.assert_allclose(out[:, 1:].numpy(), expected(STATES)[:, 1:] + 1.0, atol=1e-6)


def test_a_replaced_solver_is_used_and_checked_against_the_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Half(Direct):
        def solve(self, *args: Any, **options: Any) -> Any:
            return {leaf: 0.5 * t for leaf, t in super().solve(*args, **options).items()}

    @hookimpl
    def phyai_solver() -> Solver:
        return Half()

    use_hooks(monkeypatch, half=SimpleNamespace(phyai_solver=phyai_solver))
    with open_engine() as engine:
        out = engine.step(ToyRequest(STATES))
    np.testing.assert_allclose(out.numpy(), 0.5 * expected(STATES), atol=1e-6)
    with pytest.raises(PluginContractError, match="Half accepts clean"):
        open_engine(FlowAdapter)


def test_a_wrapper_may_clamp_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clamp(Through):
        def decode(self, x: Any, cache: Any, prepared: Any) -> Any:
            chunks = self.inner.decode(x, cache, prepared)
            return [replace(c, actions=np.clip(c.actions, -0.1, 0.1)) for c in chunks]

    @hookimpl(wrapper=True)
    def phyai_output() -> Any:
        return Clamp((yield))

    use_hooks(monkeypatch, clamp=SimpleNamespace(phyai_output=phyai_output))
    with open_engine() as engine:
        chunk = engine.step(observation(1))
    assert np.array_equal(chunk.actions, np.clip(expected(STATES[1:2])[0], -0.1, 0.1))


def test_nothing_passes_through_the_plugin_manager_during_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("the plugin manager was asked during a request")

    @hookimpl
    def phyai_validate_action(chunk: ActionChunk) -> None:
        seen.append("validated")

    @hookimpl
    def phyai_request_finished(info: Any) -> None:
        seen.append("finished")

    seen: list[str] = []
    guard = SimpleNamespace(
        phyai_validate_action=phyai_validate_action, phyai_request_finished=phyai_request_finished
    )
    use_hooks(monkeypatch, spy=wrapping_everything(), guard=guard)
    with open_engine() as engine, monkeypatch.context() as patched:
        patched.setattr(_hooks.HookCaller, "__call__", refuse)
        patched.setattr(_manager.PluginManager, "_hookexec", refuse)
        engine.step(observation())
        engine.step([observation(), observation(1)])
        # denoiser hooks are looked up when a key is new; once it is bound, not even that
        patched.setattr(pluggy.HookCaller, "get_hookimpls", refuse)
        engine.step([observation(1), observation()])
        engine.submit(ToyRequest(STATES[:2])).result(30)
        with pytest.raises(RequestError):
            engine.step([])
        with pytest.raises(AssertionError):
            engine.core.binder._managers[0].hook.phyai_kernels()
    assert (
        seen
        == ["validated", "finished"] + ["validated", "validated", "finished"] * 2 + ["finished"] * 2
    )


# ---------------------------------------------------------------- validators and observers


def validator(answer: Any) -> SimpleNamespace:
    @hookimpl
    def phyai_validate_action(chunk: ActionChunk) -> Any:
        return answer(chunk)

    return SimpleNamespace(phyai_validate_action=phyai_validate_action)


def too_far(chunk: ActionChunk) -> str | None:
    return "too far" if np.abs(chunk.actions).max() > 2.0 else None


def test_a_validator_blocks_its_chunk_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_hooks(monkeypatch, limits=validator(too_far))
    with open_engine() as engine:
        good = engine.step(observation(0))
        with pytest.raises(ActionRejected, match="validator 'limits' blocked the chunk: too far"):
            engine.step(observation(1))
        with pytest.raises(ActionRejected, match="too far"):
            engine.step([observation(0), observation(1)])  # one bad row blocks its request
        assert np.array_equal(engine.step(observation(0)).actions, good.actions)
        # a model request is model space: validators speak about robot units
        assert isinstance(engine.step(ToyRequest(STATES)), torch.Tensor)
        assert engine.stats()["replicas"][0]["failed"] == 2


@pytest.mark.parametrize("answer", [lambda c: 1 / 0, lambda c: True, lambda c: ""])
def test_a_broken_validator_fails_closed(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hooks(monkeypatch, broken=validator(answer))
    with open_engine() as engine, pytest.raises(ActionRejected, match="'broken'") as caught:
        engine.step(observation())
    assert (caught.value.__cause__ is not None) == ("ZeroDivisionError" in str(caught.value))


def test_non_finite_robot_units_are_rejected_even_without_a_validator() -> None:
    class Broken(DefaultOutput):
        def decode(self, x: Any, cache: Any, prepared: Any) -> Any:
            chunks = super().decode(x, cache, prepared)
            return [replace(c, actions=np.full_like(c.actions, np.inf)) for c in chunks]

    class BrokenAdapter(ToyAdapter):
        name = "toy-inf"

        def output(self) -> Output:
            return Broken()

    with open_engine(BrokenAdapter) as engine, pytest.raises(ActionRejected, match="finite"):
        engine.step(observation())


def test_observers_are_told_and_cannot_harm_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, Any]] = []

    def observer(hook: str) -> Any:
        @hookimpl(specname=hook)
        def observe(info: Any) -> None:
            told.append((hook.removeprefix("phyai_"), info))
            raise RuntimeError("observers are not the engine's problem")

        return observe

    names = ("engine_ready", "request_started", "request_finished", "engine_closing")
    use_hooks(monkeypatch, spy=SimpleNamespace(**{n: observer(f"phyai_{n}") for n in names}))
    with open_engine() as engine:
        engine.step([observation(), observation(1)])
        with pytest.raises(RequestError):
            engine.step([])
        assert engine.core._notify["phyai_request_started"].failures == {"spy": 2}
    assert [name for name, _ in told] == [
        "engine_ready",
        *["request_started", "request_finished"] * 2,
        "engine_closing",
    ]
    good, bad = told[2][1], told[4][1]
    assert (good.plugin, good.rows, good.error) == ("toy", 2, None)
    assert good.milliseconds > 0
    assert (bad.rows, bad.error is not None) == (None, True)


def test_an_installed_hook_plugin_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from phyai.hooks import hookimpl\n"
        "@hookimpl\n"
        "def phyai_validate_action(chunk):\n    return 'blocked by a real distribution'\n"
    )
    make_distribution(
        tmp_path, "toy-guard", "1.0", {"toy_guard": code}, {"phyai.hooks": {"guard": "toy_guard"}}
    )
    monkeypatch.syspath_prepend(tmp_path)
    with open_engine() as engine, pytest.raises(ActionRejected, match="a real distribution"):
        engine.step(observation())
    monkeypatch.setenv("PHYAI_PLUGINS_BLOCK", "guard")
    with open_engine() as engine:
        assert isinstance(engine.step(observation()), ActionChunk)


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
