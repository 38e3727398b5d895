"""pi0 and pi0.5 against the official implementation, on every golden case of the sets.

Each case file goes through the GoldenRunner of its set's plugin, as in ``phyai verify``. Every
tensor or key that is not an input has to be compared, under its own name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from phyai.testing.golden import GoldenRunner
from tests.golden_cases import GoldenCase, outputs
from tests.golden_results import check_results, runners

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


@pytest.fixture(scope="module")
def runner_of() -> Iterator[Callable[[str], GoldenRunner]]:
    with runners() as made:
        yield made


def test_golden(golden_case: GoldenCase | None, runner_of: Callable[[str], GoldenRunner]) -> None:
    assert golden_case is not None, "the golden folder holds no case file"
    assert golden_case.kind in KINDS, f"unknown kind: {golden_case.problem}"
    root = golden_case.set_root
    assert root is not None, "no config.json at or above the case"
    plugin = json.loads((root / "config.json").read_text(encoding="utf-8"))["type"]
    results = runner_of(plugin).run(golden_case.path, root)
    for result in results:  # each run alone has to compare everything
        check_results([result], outputs(golden_case))


def test_every_golden_case_is_consumed(unconsumed_golden_cases: list[str]) -> None:
    assert not unconsumed_golden_cases, "\n".join(unconsumed_golden_cases)
