"""pi0 and pi0.5 against the official implementation, on every golden case of the sets.

Each case file is checked by the function of its kind; tolerances are those of the sets' README.
Every tensor of a model case that is not an input has to be compared, under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Protocol

import pytest

from tests.golden_cases import GoldenCase, outputs

GOLDEN_SETS = ("pi0", "pi05")
# The one place where kinds are left out.
NOT_BUILT = {"rl": "reinforcement-learning rollout is not built yet"}


class Comparison(Protocol):
    """One compared tensor: its name, the largest error and what is allowed."""

    @property
    def name(self) -> str: ...
    @property
    def error(self) -> float: ...
    @property
    def tolerance(self) -> float: ...


def _model(case: GoldenCase) -> Iterable[Comparison]:
    assert case.set_root is not None, "no config.json at or above the case"
    comparisons = list(import_module("phyai.models.pi.golden").check_case(case.path, case.set_root))
    missing = [name for name in outputs(case) if not _compared(name, comparisons)]
    assert not missing, f"tensors that were not compared: {missing}"
    return comparisons


def _compared(name: str, comparisons: Iterable[Comparison]) -> bool:
    """Return whether a comparison is named after the tensor: ``actions``, ``actions [graph]``."""
    return any(c.name == name or c.name.startswith(f"{name} ") for c in comparisons)


def _preprocess(function: str) -> Callable[[GoldenCase], Iterable[Comparison]]:
    def check(case: GoldenCase) -> Iterable[Comparison]:
        result = getattr(import_module("tests.pi.golden_preprocess"), function)(case.path)
        return result or ()

    return check


CHECKERS: dict[str, Callable[[GoldenCase], Iterable[Comparison]]] = {
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


def test_golden(golden_case: GoldenCase | None) -> None:
    assert golden_case is not None, "the golden folder holds no case file"
    checker = CHECKERS.get(golden_case.kind)
    assert checker is not None, f"unknown kind: {golden_case.problem}"
    comparisons = list(checker(golden_case))
    # `not <=` so that NaN fails.
    if any(not c.error <= c.tolerance for c in comparisons):
        pytest.fail(_table(comparisons), pytrace=False)


def test_every_golden_case_is_consumed(unconsumed_golden_cases: list[str]) -> None:
    assert not unconsumed_golden_cases, "\n".join(unconsumed_golden_cases)


def _table(comparisons: list[Comparison]) -> str:
    width = max(len(c.name) for c in comparisons)
    lines = [f"{'tensor':<{width}}  {'error':>10}  {'allowed':>10}"]
    for c in comparisons:
        mark = "" if c.error <= c.tolerance else "  <- too far"
        lines.append(f"{c.name:<{width}}  {c.error:>10.3g}  {c.tolerance:>10.3g}{mark}")
    return "\n".join(lines)
