"""Both plugins keep the whole adapter contract, as the shipped conformance kit checks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phyai.testing import AdapterConformance
from tests.cosmos.cosmos_engines import ROOT, observation, policy_args, prompt

CASES = {
    "cosmos3": ("case_tr_t2v_sound",),
    "cosmos3_policy": ("case_tr_policy_state",),
}
"""Golden cases the kit runs here; tests/cosmos/test_golden.py runs all of them."""


def _golden(folder: Path, plugin: str) -> Path:
    """Link the golden set with a few of its cases."""
    for path in ROOT.iterdir():
        if path.stem in CASES[plugin] or not path.name.startswith("case_"):
            (folder / path.name).symlink_to(path)
    return folder


class TestCosmos3(AdapterConformance):
    manifest = "cosmos3"
    level = 0  # the rest in the slow tests

    @pytest.fixture
    def tiny_checkpoint(self) -> dict[str, Any]:
        return {"checkpoint_dir": str(ROOT), "max_batch_size": 4, "weight_strict": True}

    @pytest.fixture
    def sample_requests(self) -> list[Any]:
        """Return two prompts, and both as one request."""
        two = [prompt(0), replace(prompt(1), prompt="a blue ball rolls")]
        return [*two, two]

    @pytest.fixture
    def golden_dir(self, tmp_path: Path) -> Path:
        return _golden(tmp_path, "cosmos3")


class TestCosmos3Policy(AdapterConformance):
    manifest = "cosmos3_policy"
    level = 0

    @pytest.fixture
    def tiny_checkpoint(self) -> dict[str, Any]:
        args = policy_args()
        names = ("checkpoint_dir", "max_batch_size", "chunk_size", "resolution", "resize_image")
        given = {name: getattr(args, name) for name in names}
        return {**given, "weight_strict": True}

    @pytest.fixture
    def sample_requests(self) -> list[Any]:
        """Return two observations, and both as one request."""
        two = [observation(0), replace(observation(1), prompt="open the drawer")]
        return [*two, two]

    @pytest.fixture
    def golden_dir(self, tmp_path: Path) -> Path:
        return _golden(tmp_path, "cosmos3_policy")


@pytest.mark.slow
class TestCosmos3Served(TestCosmos3):
    level = 3


@pytest.mark.slow
class TestCosmos3PolicyServed(TestCosmos3Policy):
    level = 3
