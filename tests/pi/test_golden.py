"""pi0 and pi0.5 against the official implementation, on every golden case of the sets.

Each case file goes through the GoldenRunner of its set's plugin, as in ``phyai verify``. Every
tensor or key that is not an input has to be compared, under its own name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from phyai.golden import Comparison
from phyai.testing.golden import GoldenRunner
from tests.golden_cases import GoldenCase, outputs

GOLDEN_SETS = ("pi0", "pi05")
KINDS = frozenset(
    {
        "base",
        "bf16",
        "policy",
        "e2e",
        "rtc_guided",
        "rtc_trained",
        "preprocess_lerobot",
        "preprocess_images_openpi",
        "preprocess_norm_openpi",
        "preprocess_robot_openpi",
        "prompts_lerobot",
        "prompts_openpi",
    }
)
# The one place where kinds are left out.
NOT_BUILT = {"rl": "reinforcement-learning rollout is not built yet"}


class Runners:
    """One GoldenRunner per plugin, made on first use."""

    def __init__(self) -> None:
        self._made: dict[str, GoldenRunner] = {}

    def of(self, plugin: str) -> GoldenRunner:
        if plugin not in self._made:
            self._made[plugin] = GoldenRunner(plugin)
        return self._made[plugin]

    def close(self) -> None:
        for runner in self._made.values():
            runner.close()


@pytest.fixture(scope="module")
def runners() -> Iterator[Runners]:
    made = Runners()
    yield made
    made.close()


def test_golden(golden_case: GoldenCase | None, runners: Runners) -> None:
    assert golden_case is not None, "the golden folder holds no case file"
    assert golden_case.kind in KINDS, f"unknown kind: {golden_case.problem}"
    root = golden_case.set_root
    assert root is not None, "no config.json at or above the case"
    plugin = json.loads((root / "config.json").read_text(encoding="utf-8"))["type"]
    results = runners.of(plugin).run(golden_case.path, root)
    for result in results:
        assert result.comparisons, f"{result.label}: nothing was compared"
        names = [name for name in outputs(golden_case) if not compared(name, result.comparisons)]
        assert not names, f"{result.label}: not compared: {names}"
    if not all(result.ok for result in results):
        pytest.fail("\n".join(_table(r.comparisons) for r in results), pytrace=False)


def test_every_golden_case_is_consumed(unconsumed_golden_cases: list[str]) -> None:
    assert not unconsumed_golden_cases, "\n".join(unconsumed_golden_cases)


def compared(name: str, comparisons: Sequence[Comparison]) -> bool:
    """Return whether a comparison is named after the tensor: ``actions``, ``actions [graph]``."""
    return any(c.name == name or c.name.startswith(f"{name} ") for c in comparisons)


def _table(comparisons: Sequence[Comparison]) -> str:
    width = max(len(c.name) for c in comparisons)
    lines = [f"{'tensor':<{width}}  {'error':>10}  {'allowed':>10}"]
    for c in comparisons:
        mark = "" if c.ok else "  <- too far"
        lines.append(f"{c.name:<{width}}  {c.error:>10.3g}  {c.tolerance:>10.3g}{mark}")
    return "\n".join(lines)
