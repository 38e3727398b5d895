"""A bad hook plugin fails when it should and by name; denied by name, nothing of it is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine, EngineArgs, plugins
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.errors import ActionRejected
from phyai.plugin_rules import hook_arguments
from phyai.testing.conformance.report import run_checks
from phyai.testing.conformance.subject import Given, Subject
from phyai.testing.sandbox import Sandbox
from tests.testing import policies
from tests.zoo.hooks import WILD, raising

CONFIG = EngineConfig(device=DeviceConfig(target="cpu", params_dtype=torch.float32))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return policies.checkpoint(tmp_path_factory.mktemp("weights"))


@contextmanager
def opened(weights: dict[str, Any]) -> Iterator[Engine]:
    args = plugins.find(policies.PLUGIN).load_args()(**weights, max_batch_size=2)
    with Engine(EngineArgs(policies.PLUGIN, args, CONFIG)) as engine:
        yield engine


def step(engine: Engine) -> Any:
    return engine.step(policies.requests()[0]).actions


@pytest.mark.parametrize("name", WILD)
def test_it_fails_when_it_should_and_by_name(
    name: str,
    weights: dict[str, Any],
    phyai_sandbox: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wild = WILD[name]
    policies.install(phyai_sandbox)
    with phyai_sandbox.visible(), opened(weights) as engine:
        want = step(engine)
    phyai_sandbox.hooks(name, wild.code)
    with phyai_sandbox.visible():
        (listed,) = [r for r in plugins.inspect_hooks() if r["id"] == name]
        assert (listed["status"] != "ok") == (wild.when == "load")
        assert bool(listed["traceback"]) == (wild.when == "load")
        if wild.when == "never":
            harmless(wild.words, weights, want)
        else:
            if wild.when == "request":
                with opened(weights):
                    pass
            with pytest.raises(Exception) as caught:  # noqa: PT011
                run(weights)
            told = f"{caught.value} {' '.join(getattr(caught.value, '__notes__', ()))}"
            assert wild.words in told
            assert wild.kind in {kind.__name__ for kind in type(caught.value).__mro__}
            the_kit_catches(wild.check, wild.words, weights)
        monkeypatch.setenv("PHYAI_PLUGINS_BLOCK", name)
        with opened(weights) as engine:
            assert np.array_equal(step(engine), want)


def run(weights: dict[str, Any]) -> None:
    with opened(weights) as engine:
        step(engine)


def harmless(name: str, weights: dict[str, Any], want: Any) -> None:
    with opened(weights) as engine:
        assert np.array_equal(step(engine), want)
    assert engine.stats()["replicas"][0]["observer_failures"] == {name: 1}


def the_kit_catches(check: str, words: str, weights: dict[str, Any]) -> None:
    given = Given(policies.PLUGIN, tiny_checkpoint=weights, sample_requests=policies.requests()[:1])
    subject = Subject(given)
    try:
        outcomes = run_checks(subject, only=(check,))
    finally:
        subject.close()
    assert [outcome.status for outcome in outcomes] == ["failed"]
    assert words in outcomes[0].message + outcomes[0].traceback


def test_every_hook_is_in_the_zoo() -> None:
    raised = {
        name for name in hook_arguments() if any(w.code == raising(name) for w in WILD.values())
    }
    assert raised == set(hook_arguments()) - {"phyai_adapter", "phyai_commands"}  # test_cli


HOOKS_OF_AN_ADAPTER = """
@hookimpl
def phyai_validate_action(chunk, adapter):
    return f"{adapter.name} says no"
"""


def test_hooks_of_an_adapter_are_active_only_while_it_is_selected(
    weights: dict[str, Any], phyai_sandbox: Sandbox
) -> None:
    """The second policy's module also blocks every chunk; the first one's never hear of it."""
    policies.install(phyai_sandbox)
    model = "from correct_policy.model import ToyArgs as Args, ToyPolicy\nclass Model(ToyPolicy):\n"
    source = policies.SOURCES / policies.PACKAGE / "plugin.py"
    code = source.read_text(encoding="utf-8").replace("toy_policy", "strict_policy")
    code = code.replace("correct_policy.model:ToyPolicy", "strict_dist.model:Model")
    phyai_sandbox.adapter(
        "strict_policy", code + HOOKS_OF_AN_ADAPTER, dist="strict-dist",
        model=f"{model}    name = 'strict_policy'\n",
    )  # fmt: skip
    with phyai_sandbox.visible():
        args = plugins.find(policies.PLUGIN).load_args()(**weights)
        for _ in range(2):
            with Engine(EngineArgs(policies.PLUGIN, args, CONFIG)) as engine:
                assert np.isfinite(step(engine)).all()
            strict = EngineArgs("strict-dist:strict_policy", args, CONFIG)
            with Engine(strict) as engine, pytest.raises(ActionRejected, match="policy says no"):
                step(engine)
