"""MiniCPM-Robot keeps the whole adapter contract, as the shipped conformance kit checks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phyai.models.minicpm_robot.presets.builders import sample_observation, tiny_minicpm_robot
from phyai.testing import AdapterConformance
from tests.minicpm.minicpm_engines import ROOT

CASES = ("case_e2e", "case_action_b3")
"""Golden cases the kit runs here; tests/minicpm/test_golden.py runs all of them."""


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_minicpm_robot(tmp_path_factory.mktemp("presets"))


def requests_of(robot: dict[str, Any], contracts: tuple[str, ...]) -> list[Any]:
    """Return an observation per contract, each of an embodiment of its own, and all as one."""
    rows = []
    for number, contract in enumerate(contracts):
        made = sample_observation({**robot, "contract": contract})
        options = {"seed": number, "num_steps": 2, "contract": contract, "embodiment_id": number}
        rows.append(replace(made, options=options))
    return [*rows, list(rows)]


@pytest.mark.slow
class TestMiniCPMRobot(AdapterConformance):
    manifest = "minicpm_robot"
    level = 2
    # Recorded graphs run the reference token by token: half a minute, and so with the slow tests.
    # Here test_golden_static.py replays golden cases.
    backends = ("cuda",)

    @pytest.fixture
    def tiny_checkpoint(self, robot: dict[str, Any]) -> dict[str, Any]:
        return robot

    @pytest.fixture
    def sample_requests(self, robot: dict[str, Any]) -> list[Any]:
        """Return observations of two embodiments, and both as one request."""
        return requests_of(robot, ("raw", "raw"))

    @pytest.fixture
    def golden_dir(self, tmp_path: Path) -> Path:
        """Link the golden set with a few of its cases."""
        for path in ROOT.iterdir():
            if path.stem in CASES or not path.name.startswith(("case_", "track_")):
                (tmp_path / path.name).symlink_to(path)
        return tmp_path


@pytest.mark.slow
class TestMiniCPMRobotServed(TestMiniCPMRobot):
    """Robots whose prompts are long, and whose rows differ in cameras and channels."""

    level = 3
    backends = ("recorded", "cuda")

    @pytest.fixture
    def sample_requests(self, robot: dict[str, Any]) -> list[Any]:
        return requests_of(robot, ("libero", "robotwin"))
