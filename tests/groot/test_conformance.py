"""GR00T keeps the whole adapter contract, as the shipped conformance kit checks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phyai.models.gr00t.presets.builders import sample_observation, tiny_gr00t
from phyai.models.gr00t.presets.robots import DROID, LIBERO
from phyai.testing import AdapterConformance
from tests.groot.groot_engines import ROOT

CASES = ("case_b1_rtc_4steps",)
"""Golden cases the kit runs here; tests/groot/test_golden.py runs all of them."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_gr00t(tmp_path_factory.mktemp("presets"))


class TestGroot(AdapterConformance):
    manifest = "gr00t_n17"
    level = 2

    @pytest.fixture
    def tiny_checkpoint(self, tiny: dict[str, Any]) -> dict[str, Any]:
        return tiny

    @pytest.fixture
    def sample_requests(self, tiny: dict[str, Any]) -> list[Any]:
        """Return observations of two embodiments, and both as one request."""
        rows = []
        for seed, tag in enumerate((LIBERO, DROID)):
            made = sample_observation({**tiny, "embodiment": tag})
            options = {"seed": seed, "num_steps": 2, "embodiment": tag}
            rows.append(replace(made, options=options))
        return [*rows, list(rows)]

    @pytest.fixture
    def golden_dir(self, tmp_path: Path) -> Path:
        """Link the golden set with a few of its cases."""
        for path in ROOT.iterdir():
            if path.stem in CASES or not path.name.startswith(("case_", "preprocess_")):
                (tmp_path / path.name).symlink_to(path)
        return tmp_path


@pytest.mark.slow
class TestGrootServed(TestGroot):
    level = 3
