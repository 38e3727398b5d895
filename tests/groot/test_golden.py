"""GR00T N1.7 against the official implementation, on every golden case of the set.

Both padding behaviours run, and bfloat16. Every tensor that is not an input has to be compared by
one of the runs of its case, under its own name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from phyai.golden import Comparison
from phyai.testing.golden import GoldenRunner, golden_runner
from tests.golden_cases import GoldenCase, outputs

GOLDEN_SETS = ("groot",)
KINDS = frozenset(
    {"groot", "groot_images", "groot_state_action", "groot_pipeline", "groot_modalities"}
)
NOT_BUILT: dict[str, str] = {}


@pytest.fixture(scope="module")
def runner() -> Iterator[GoldenRunner]:
    with golden_runner("gr00t_n17") as made:
        yield made


def test_golden(golden_case: GoldenCase | None, runner: GoldenRunner) -> None:
    assert golden_case is not None, "the golden folder holds no case file"
    assert golden_case.kind in KINDS, f"unknown kind: {golden_case.problem}"
    root = golden_case.set_root or golden_case.path.parent
    results = runner.run(golden_case.path, root)
    everything = [c for result in results for c in result.comparisons]
    for result in results:
        assert result.comparisons, f"{result.label}: nothing was compared"
    names = [name for name in outputs(golden_case) if not compared(name, everything)]
    assert not names, f"not compared: {names}"
    if not all(result.ok for result in results):
        pytest.fail("\n".join(_table(r.label, r.comparisons) for r in results), pytrace=False)


def test_every_golden_case_is_consumed(unconsumed_golden_cases: list[str]) -> None:
    assert not unconsumed_golden_cases, "\n".join(unconsumed_golden_cases)


def compared(name: str, comparisons: Sequence[Comparison]) -> bool:
    """Return whether a comparison is named after the tensor: ``actions``, ``actions [bf16]``."""
    return any(c.name == name or c.name.startswith(f"{name} ") for c in comparisons)


def _table(label: str, comparisons: Sequence[Comparison]) -> str:
    width = max(len(c.name) for c in comparisons)
    lines = [label, f"{'tensor':<{width}}  {'error':>10}  {'allowed':>10}"]
    for c in comparisons:
        mark = "" if c.ok else "  <- too far"
        lines.append(f"{c.name:<{width}}  {c.error:>10.3g}  {c.tolerance:>10.3g}{mark}")
    return "\n".join(lines)
