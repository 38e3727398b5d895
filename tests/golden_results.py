"""What golden tests of all model packages ask of a case's runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from phyai.golden import Comparison
from phyai.testing.golden import GoldenRunner, golden_runner


@contextmanager
def runners() -> Iterator[Callable[[str], GoldenRunner]]:
    """Give what opens a plugin's runner, one for all cases."""
    with ExitStack() as stack:
        made: dict[str, GoldenRunner] = {}

        def open_one(plugin: str) -> GoldenRunner:
            if plugin not in made:
                made[plugin] = stack.enter_context(golden_runner(plugin))
            return made[plugin]

        yield open_one


def check_results(results: Sequence[Any], names: Sequence[str]) -> None:
    """Fail unless every run compared something, all names were compared, and all is near."""
    everything = [c for result in results for c in result.comparisons]
    for result in results:
        assert result.comparisons, f"{result.label}: nothing was compared"
    left = [name for name in names if not compared(name, everything)]
    assert not left, f"not compared: {left}"
    if not all(result.ok for result in results):
        pytest.fail("\n".join(_table(r.label, r.comparisons) for r in results), pytrace=False)


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
