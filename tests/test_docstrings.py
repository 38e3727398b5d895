"""Every example in a docstring runs, and the classes people program against have one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator
from typing import Protocol

import pytest

from tests.core.toy_adapter import registry
from tests.source_rules import ALL_TREES, modules

WITH_EXAMPLES = [m.name for tree in ALL_TREES for m in modules(tree) if ">>> " in m.text]
PUBLIC = (
    "phyai.action_queue",
    "phyai.adapter",
    "phyai.cache",
    "phyai.cuda_graph",
    "phyai.engine",
    "phyai.engine_config",
    "phyai.kernels.registry",
    "phyai.known",
    "phyai.layers.linear",
    "phyai.layers.norm",
    "phyai.layers.parallel",
    "phyai.layers.placement",
    "phyai.layers.vision",
    "phyai.manifest",
    "phyai.memory",
    "phyai.models.gr00t.main_gr00t",
    "phyai.models.minicpm.weights",
    "phyai.models.minicpm_robot.args",
    "phyai.models.minicpm_robot.main_minicpm_robot",
    "phyai.models.minicpm_robot.request",
    "phyai.models.minicpm_robot_track.args",
    "phyai.models.minicpm_robot_track.config",
    "phyai.models.minicpm_robot_track.request",
    "phyai.models.pi0.main_pi0",
    "phyai.models.pi05.main_pi05",
    "phyai.parallel.groups",
    "phyai.parallel.heads",
    "phyai.parallel.mesh",
    "phyai.parallel.service",
    "phyai.rtc",
    "phyai.scheduler",
    "phyai.session_turn",
    "phyai.sessions",
    "phyai.solver",
    "phyai.timers",
    "phyai.types",
    "phyai.unipc",
    "phyai_gateway.client.asyncio",
    "phyai_gateway.client.blocking",
    "phyai_gateway.contract",
)
ELSEWHERE = {
    "BufferRow",  # what the examples of other classes return
    "Choice",
    "GrootAdapter",  # need a checkpoint: examples/ and the README run them
    "PI05Adapter",
    "PI0Adapter",
}


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), report=False)
    assert result.failed == 0, "see the captured output"


@pytest.mark.parametrize("name", PUBLIC)
def test_public_classes_show_an_example(name: str) -> None:
    module = importlib.import_module(name)
    without = [
        cls.__name__
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and cls.__module__ == name
        and not cls.__name__.startswith("_")
        and Protocol not in cls.__bases__
        and cls.__name__ not in ELSEWHERE
        and ">>> " not in (cls.__doc__ or "")
    ]
    assert without == []
