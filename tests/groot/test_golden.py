"""GR00T N1.7 against the official implementation, on every golden case of the set.

Both padding behaviours run, and bfloat16. Every tensor that is not an input has to be compared by
one of the runs of its case, under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from phyai.testing.golden import GoldenRunner
from tests.golden_cases import GoldenCase, outputs
from tests.golden_results import check_results, runners

GOLDEN_SETS = ("groot",)
KINDS = frozenset(
    {"groot", "groot_images", "groot_state_action", "groot_pipeline", "groot_modalities"}
)
NOT_BUILT: dict[str, str] = {}


@pytest.fixture(scope="module")
def runner_of() -> Iterator[Callable[[str], GoldenRunner]]:
    with runners() as made:
        yield made


def test_golden(golden_case: GoldenCase | None, runner_of: Callable[[str], GoldenRunner]) -> None:
    assert golden_case is not None, "the golden folder holds no case file"
    assert golden_case.kind in KINDS, f"unknown kind: {golden_case.problem}"
    root = golden_case.set_root or golden_case.path.parent
    results = runner_of("gr00t_n17").run(golden_case.path, root)
    check_results(results, outputs(golden_case))


def test_every_golden_case_is_consumed(unconsumed_golden_cases: list[str]) -> None:
    assert not unconsumed_golden_cases, "\n".join(unconsumed_golden_cases)
