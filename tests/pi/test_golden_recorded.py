"""Golden model cases by replay of recorded graphs: the actions a GPU's graphs would give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import pytest
import torch

from phyai import Engine
from phyai.models.pi.golden.case import TOLERANCES, read_case
from phyai.models.pi.golden.runs import case_runs
from phyai.models.pi0.main_pi0 import PI0Adapter
from phyai.models.pi05.main_pi05 import PI05Adapter
from tests.conftest import GOLDEN
from tests.golden_cases import GoldenCase, discover
from tests.pi.recorded_engines import recorded_engine
from tests.pi.test_graph_backends import stats_of

ADAPTERS: dict[str, Any] = {"pi0": PI0Adapter, "pi05": PI05Adapter}
KINDS = ("base", "rtc_guided", "rtc_trained")
CASES = [c for name in ADAPTERS for c in discover(GOLDEN / name) if c.kind in KINDS]


@pytest.fixture(scope="module")
def engines() -> Iterator[Any]:
    """Return what opens an engine for adapter arguments, one for equal ones."""
    with ExitStack() as stack:
        opened: dict[str, Engine] = {}

        def engine_for(model: str, args: Any) -> Engine:
            given = {f.name: getattr(args, f.name) for f in fields(args)}
            key = f"{model} {given}"
            if key not in opened:
                opened[key] = stack.enter_context(recorded_engine(model, **given))
            return opened[key]

        yield engine_for


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.set_root.name}-{c.path.stem}")
def test_replayed_actions_are_the_official_ones(case: GoldenCase, engines: Any) -> None:
    assert case.set_root is not None
    model = case.set_root.name
    read = read_case(case.path, case.set_root, ADAPTERS[model])
    (run,) = case_runs(read)
    engine = engines(model, run.args)
    want = read.tensor("actions")
    for _ in range(2):  # the call that captures, and one that only replays
        got = engine.step(run.request)
        torch.testing.assert_close(got, want, atol=TOLERANCES["actions"], rtol=0)
    assert stats_of(engine)["fallbacks"] == 0
