"""pi0 and pi0.5 keep the whole adapter contract, as the shipped conformance kit checks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phyai.testing import AdapterConformance
from tests.conftest import GOLDEN
from tests.pi.tiny_engines import CAMERAS, PROMPTS

CASES = ("case_b2_c2_s1", "case_policy_0", "case_rtc_exp_1")
"""Golden cases the kit runs here; tests/pi/test_golden.py runs all of them."""


def golden_args(model: str) -> dict[str, Any]:
    root = GOLDEN / model
    return {
        "checkpoint_dir": str(root),
        "tokenizer": str(root / "tokenizer"),
        "processor_dir": str(root / "processors_abs"),
    }


def golden_subset(model: str, folder: Path) -> Path:
    """Link the golden set of a model with a few of its cases."""
    for path in (GOLDEN / model).iterdir():
        if path.stem in CASES or not path.name.startswith(("case_", "preprocess_")):
            (folder / path.name).symlink_to(path)
    return folder


def observations(state_dim: int) -> list[Any]:
    """Return two observations of unlike cameras and prompts, and both as one request."""
    import numpy as np

    from phyai.types import Observation

    rows = []
    for seed, cameras in ((0, 2), (1, 1)):
        random = np.random.default_rng(seed)
        images = {
            name: random.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in CAMERAS[:cameras]
        }
        state = random.uniform(-1, 1, state_dim).astype(np.float32)
        options = {"seed": seed, "num_steps": 2}
        rows.append(Observation(images, state, PROMPTS[seed], options))
    return [*rows, list(rows)]


class TestPi05(AdapterConformance):
    manifest = "pi05"
    level = 2
    tiny_checkpoint = golden_args("pi05")
    sample_requests = observations(5)

    @pytest.fixture
    def golden_dir(self, tmp_path: Path) -> Path:
        return golden_subset("pi05", tmp_path)


class TestPi0(AdapterConformance):
    manifest = "pi0"
    level = 2
    tiny_checkpoint = golden_args("pi0")
    sample_requests = observations(5)

    @pytest.fixture
    def golden_dir(self, tmp_path: Path) -> Path:
        return golden_subset("pi0", tmp_path)


@pytest.mark.slow
class TestPi05Served(TestPi05):
    level = 3


@pytest.mark.slow
class TestPi0Served(TestPi0):
    level = 3
