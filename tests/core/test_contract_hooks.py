"""Hooks around a non-flow adapter: wrappers, replacements, validators and observers."""

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

from phyai.adapter import DefaultOutput
from phyai.errors import ActionRejected, PluginContractError, RequestError
from phyai.hooks import hookimpl
from phyai.known import Hold
from phyai.solver import Direct
from phyai.types import ActionChunk, Denoiser, Output, Solver
from tests.core.sandbox import make_distribution
from tests.core.test_contract import STATES, expected, observation
from tests.core.toy_adapter import (
    ACTIONS,
    Features,
    FlowAdapter,
    ToyAdapter,
    ToyRequest,
    open_engine,
    registry,
    use_hooks,
)


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


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


def test_a_prediction_hook_must_keep_what_the_solver_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Noisy(Through):
        prediction = "noise"

    @hookimpl(wrapper=True)
    def phyai_denoiser(stage: str) -> Any:
        inner: Denoiser = yield
        return Noisy(inner) if stage == "prediction" else inner

    use_hooks(monkeypatch, noisy=SimpleNamespace(phyai_denoiser=phyai_denoiser))
    with pytest.raises(PluginContractError, match=r"Direct accepts clean.*'noise'"):
        open_engine()


def test_the_plan_of_a_wrapped_conditioning_is_still_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Planning(Features):
        def plan(self, cache: Any, batch: Any) -> None:
            cache.plan = batch.rows

        def encode(self, cache: Any) -> None:
            super().encode(cache)
            seen.append(cache.plan)

    class PlanningAdapter(ToyAdapter):
        name = "toy-planning"

        def conditioning(self) -> Features:
            return Planning()

    class Around:
        def __init__(self, inner: Any, keep: bool) -> None:
            if keep:
                self.inner = inner
            self.encode = inner.encode

    def plugin(keep: bool) -> SimpleNamespace:
        @hookimpl(wrapper=True)
        def phyai_conditioning() -> Any:
            return Around((yield), keep)

        return SimpleNamespace(phyai_conditioning=phyai_conditioning)

    seen: list[Any] = []
    use_hooks(monkeypatch, around=plugin(keep=True))
    with open_engine(PlanningAdapter) as engine:
        engine.step(ToyRequest(STATES))
        engine.step(ToyRequest(STATES[:1]))
    assert seen == [3, 1]
    use_hooks(monkeypatch, around=plugin(keep=False))
    with pytest.raises(PluginContractError, match=r"hides plan\(\)"):
        open_engine(PlanningAdapter)


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
        # not even looked up: a key that is new binds what was found at set-up
        patched.setattr(pluggy.HookCaller, "get_hookimpls", refuse)
        engine.step(observation())
        engine.step([observation(), observation(1)])
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
        assert engine.stats()["replicas"][0]["observer_failures"] == {"spy": 1 + 2 + 2}
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
