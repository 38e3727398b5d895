"""Golden model cases in the static buckets graphs use, and by replay of recorded graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import pytest
import torch

from phyai import Engine
from phyai.models.minicpm_robot.golden.cases import read_case
from phyai.models.minicpm_robot.golden.runs import ACTIONS, TOLERANCE, model_runs
from phyai.testing.golden import GoldenRunner
from tests.golden_cases import GoldenCase, discover
from tests.minicpm.minicpm_engines import ROOT, cpu_config, recorded_engine

MODEL = ("minicpm_vision", "minicpm_vlm", "minicpm_action", "minicpm_e2e")
CASES = [case for case in discover(ROOT) if case.kind in MODEL]
REPLAYED = [case for case in CASES if ACTIONS in case.names]


@pytest.fixture(scope="module")
def runner() -> Iterator[GoldenRunner]:
    made = GoldenRunner("minicpm_robot", cpu_config(static_shapes=True))
    yield made
    made.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[Any]:
    """Return what opens a recorded engine for adapter arguments, one for equal ones."""
    with ExitStack() as stack:
        opened: dict[str, Engine] = {}

        def engine_for(args: Any) -> Engine:
            given = {f.name: getattr(args, f.name) for f in fields(args)}
            if str(given) not in opened:
                opened[str(given)] = stack.enter_context(recorded_engine(**given))
            return opened[str(given)]

        yield engine_for


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.path.stem)
def test_static_buckets_keep_every_golden_tensor(case: GoldenCase, runner: GoldenRunner) -> None:
    for result in runner.run(case.path, ROOT):
        assert result.comparisons
        assert [c for c in result.comparisons if not c.ok] == [], result.label


@pytest.mark.parametrize("case", REPLAYED, ids=lambda c: c.path.stem)
def test_replayed_actions_are_the_official_ones(case: GoldenCase, engines: Any) -> None:
    read = read_case(case.path, ROOT)
    run = model_runs(read)[0]
    engine = engines(run.args)
    for _ in range(2):  # the call that captures, and one that only replays
        got = engine.step(run.request)
        torch.testing.assert_close(got, read.tensors[ACTIONS], atol=TOLERANCE[read.kind], rtol=0)
    assert engine.stats()["replicas"][0]["graphs"]["fallbacks"] == 0
