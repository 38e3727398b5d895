"""pi0 and pi0.5 against the official implementation, on every golden case of the sets.

Each case file is checked by the function of its kind; tolerances are those of the sets' README.
Every tensor of a model case that is not an input has to be compared, under its own name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

import pytest

from phyai.golden import Comparison
from phyai.testing.golden import GoldenRunner
from tests.golden_cases import GoldenCase, outputs
from tests.pi import golden_preprocess

GOLDEN_SETS = ("pi0", "pi05")
# The one place where kinds are left out.
NOT_BUILT = {"rl": "reinforcement-learning rollout is not built yet"}


class Runners:
    """One GoldenRunner per plugin, made on first use."""

    def __init__(self) -> None:
        self._made: dict[str, GoldenRunner] = {}

    def of(self, plugin: str) -> GoldenRunner:
        return self._made.setdefault(plugin, GoldenRunner(plugin))

    def close(self) -> None:
        for runner in self._made.values():
            runner.close()


@pytest.fixture(scope="module")
def runners() -> Iterator[Runners]:
    made = Runners()
    yield made
    made.close()


Checker = Callable[[GoldenCase, Runners], Sequence[Comparison]]


def _model(case: GoldenCase, runners: Runners) -> Sequence[Comparison]:
    assert case.set_root is not None, "no config.json at or above the case"
    plugin = json.loads((case.set_root / "config.json").read_text(encoding="utf-8"))["type"]
    results = runners.of(plugin).run(case.path, case.set_root)
    assert all(result.comparisons for result in results), "a run compared nothing"
    comparisons = [c for result in results for c in result.comparisons]
    missing = [name for name in outputs(case) if not _compared(name, comparisons)]
    assert not missing, f"tensors that were not compared: {missing}"
    return comparisons


def _compared(name: str, comparisons: Sequence[Comparison]) -> bool:
    """Return whether a comparison is named after the tensor: ``actions``, ``actions [graph]``."""
    return any(c.name == name or c.name.startswith(f"{name} ") for c in comparisons)


def _preprocess(function: str) -> Checker:
    """Return a checker that calls a function of ``golden_preprocess``, which asserts by itself."""
    check = getattr(golden_preprocess, function)

    def run(case: GoldenCase, runners: Runners) -> Sequence[Comparison]:
        check(case.path)
        return ()

    return run


CHECKERS: dict[str, Checker] = {
    "base": _model,
    "bf16": _model,
    "policy": _model,
    "e2e": _model,
    "rtc_guided": _model,
    "rtc_trained": _model,
    "preprocess_lerobot": _preprocess("check_preprocess_lerobot"),
    "preprocess_images_openpi": _preprocess("check_preprocess_images_openpi"),
    "preprocess_norm_openpi": _preprocess("check_preprocess_norm_openpi"),
    "preprocess_robot_openpi": _preprocess("check_preprocess_robot_openpi"),
    "prompts_lerobot": _preprocess("check_prompts_lerobot"),
    "prompts_openpi": _preprocess("check_prompts_openpi"),
}


def test_golden(golden_case: GoldenCase | None, runners: Runners) -> None:
    assert golden_case is not None, "the golden folder holds no case file"
    checker = CHECKERS.get(golden_case.kind)
    assert checker is not None, f"unknown kind: {golden_case.problem}"
    comparisons = checker(golden_case, runners)
    if not all(c.ok for c in comparisons):
        pytest.fail(_table(comparisons), pytrace=False)


def test_every_golden_case_is_consumed(unconsumed_golden_cases: list[str]) -> None:
    assert not unconsumed_golden_cases, "\n".join(unconsumed_golden_cases)


def _table(comparisons: Sequence[Comparison]) -> str:
    width = max(len(c.name) for c in comparisons)
    lines = [f"{'tensor':<{width}}  {'error':>10}  {'allowed':>10}"]
    for c in comparisons:
        mark = "" if c.ok else "  <- too far"
        lines.append(f"{c.name:<{width}}  {c.error:>10.3g}  {c.tolerance:>10.3g}{mark}")
    return "\n".join(lines)
