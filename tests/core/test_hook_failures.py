"""An exception (or sys.exit) in each hook: who is blamed, what stops, what goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phyai.errors import ActionRejected, PluginContractError, PluginError
from phyai.hooks import hookimpl
from phyai.plugin_rules import OBSERVER_HOOKS, PART_HOOKS
from phyai.testing.sandbox import Sandbox
from tests.core.test_contract import observation
from tests.core.toy_adapter import ToyAdapter, open_engine, registry, use_hooks


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path / "site")


def raising(hook: str, error: BaseException, *, wrapper: bool = False) -> SimpleNamespace:
    """Return a plugin whose one hook raises ``error``."""

    @hookimpl(specname=hook)
    def plain() -> Any:
        raise error

    @hookimpl(specname=hook, wrapper=True)
    def around() -> Any:
        yield
        raise error

    return SimpleNamespace(implementation=around if wrapper else plain)


@pytest.mark.parametrize("wrapper", [False, True], ids=["replacing", "wrapping"])
@pytest.mark.parametrize("error", [ValueError("oh"), SystemExit(4)], ids=["raises", "exits"])
@pytest.mark.parametrize("hook", PART_HOOKS)
def test_a_part_hook_that_fails_stops_the_start_and_is_named(
    hook: str, error: BaseException, wrapper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hooks(monkeypatch, bad=raising(hook, error, wrapper=wrapper))
    words = f"Plugin 'bad' failed in {hook}: {type(error).__name__}: {error}"
    with pytest.raises(PluginError, match=words) as caught:
        open_engine()
    assert caught.value.__cause__ is error


GUILTY = """
from phyai.hooks import hookimpl

class Part:
    def __init__(self, inner):
        self.inner = inner
        self.prediction = inner.prediction
    def __call__(self, x, step, cache):
        {body}

@hookimpl(wrapper=True)
def phyai_denoiser(stage):
    inner = yield
    return Part(inner) if stage == {stage!r} else inner
"""


@pytest.mark.parametrize("stage", ["network", "prediction"])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("return 1 / 0", ZeroDivisionError),
        ("return cache['mine']", PluginContractError),
        ("raise SystemExit(3)", PluginError),
    ],
)
def test_an_error_of_a_wrapper_during_a_request_names_its_plugin(
    body: str, kind: type[Exception], stage: str, sandbox: Sandbox
) -> None:
    sandbox.hooks("guilty", GUILTY.format(body=body, stage=stage))
    with sandbox.visible(), open_engine() as engine:
        for _ in range(2):
            with pytest.raises(kind) as caught:
                engine.step(observation())
            cause = caught.value.__cause__ if "SystemExit" in str(caught.value) else caught.value
            assert cause is not None
            assert cause.__notes__ == ["Raised by code of hook plugin 'guilty'."]


def test_an_error_inside_a_wrapper_is_not_the_wrappers(sandbox: Sandbox) -> None:
    sandbox.hooks(
        "innocent", GUILTY.format(body="return self.inner(x, step, cache)", stage="network")
    )
    with (
        sandbox.visible(),
        open_engine(Failing) as engine,
        pytest.raises(ZeroDivisionError) as caught,
    ):
        engine.step(observation())
    assert not hasattr(caught.value, "__notes__")


class Failing(ToyAdapter):
    """Its network fails."""

    name = "toy-failing"

    def denoiser(self) -> Any:
        class Network:
            prediction = "clean"

            def __call__(self, x: Any, step: Any, cache: Any) -> Any:
                return 1 / 0

        return Network()


def test_an_adapter_that_exits_is_an_error_of_the_engine() -> None:
    class Leaving(ToyAdapter):
        name = "toy-leaving"

        def load(self) -> None:
            raise SystemExit(7)

    with pytest.raises(PluginError, match=r"'toy-leaving'.*SystemExit\(7\) while the engine"):
        open_engine(Leaving)


@pytest.mark.parametrize("error", [ValueError("oh"), SystemExit(4)], ids=["raises", "exits"])
def test_a_kernel_hook_that_fails_stops_the_start_and_is_named(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hooks(monkeypatch, bad=raising("phyai_kernels", error))
    with pytest.raises(PluginError, match=f"'bad' failed in phyai_kernels: .*{error}"):
        open_engine()


def test_what_is_no_kernel_row_names_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    @hookimpl
    def phyai_kernels() -> Any:
        return [3]

    use_hooks(monkeypatch, bad=SimpleNamespace(phyai_kernels=phyai_kernels))
    with pytest.raises(PluginContractError, match="'bad' must return KernelRows; got int"):
        open_engine()


@pytest.mark.parametrize("error", [ValueError("oh"), SystemExit(4)], ids=["raises", "exits"])
def test_a_validator_that_fails_blocks_the_chunk(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hooks(monkeypatch, bad=raising("phyai_validate_action", error))
    with open_engine() as engine:
        for _ in range(2):
            with pytest.raises(ActionRejected, match=f"'bad' raised {type(error).__name__}"):
                engine.step(observation())


def test_a_validator_cannot_change_what_it_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(change: Any) -> None:
        @hookimpl
        def phyai_validate_action(chunk: Any) -> None:
            change(chunk)

        use_hooks(monkeypatch, bad=SimpleNamespace(phyai_validate_action=phyai_validate_action))

    for name in ("actions", "mask", "model_actions"):
        use(lambda chunk, name=name: getattr(chunk, name).fill(0))
        with open_engine() as engine, pytest.raises(ActionRejected, match="read-only"):
            engine.step(observation())
    use(lambda chunk: np.abs(chunk.actions).max())
    with open_engine() as engine:
        engine.step(observation()).actions[0] = 0.0  # the result is its owner's


@pytest.mark.parametrize("error", [ValueError("oh"), SystemExit(4)], ids=["raises", "exits"])
@pytest.mark.parametrize("hook", OBSERVER_HOOKS)
def test_an_observer_that_fails_is_counted_and_harms_nothing(
    hook: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hooks(monkeypatch, bad=raising(hook, error))
    with open_engine() as engine:
        engine.step(observation())
    assert engine.stats()["replicas"][0]["observer_failures"] == {"bad": 1}
