"""The tracker keeps the whole adapter contract, as the shipped conformance kit checks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phyai.models.minicpm_robot_track.presets.builders import (
    sample_observation,
    tiny_minicpm_robot_track,
)
from phyai.models.minicpm_robot_track.presets.sample_scene import sample_frames
from phyai.testing import AdapterConformance
from tests.conftest import GOLDEN
from tests.minicpm.track_engines import Stream


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_minicpm_robot_track(tmp_path_factory.mktemp("presets"))


@pytest.mark.slow
class TestTrack(AdapterConformance):
    manifest = "minicpm_robot_track"
    level = 2

    @pytest.fixture
    def tiny_checkpoint(self, tiny: dict[str, Any]) -> dict[str, Any]:
        return tiny

    @pytest.fixture
    def sample_requests(self, tiny: dict[str, Any]) -> list[Any]:
        """Return one frame, it beside a stack of frames, and features."""
        one = sample_observation(tiny)
        several = replace(one, images={"front": sample_frames(5)}, prompt="Follow the man")
        return [one, [one, several], Stream(3).window(2)]

    @pytest.fixture
    def golden_dir(self, tmp_path: Path) -> Path:
        """Link the golden set with the cases of this plugin."""
        for path in (GOLDEN / "minicpm").iterdir():
            if path.name.startswith("track_") or path.name == "config.json":
                (tmp_path / path.name).symlink_to(path)
        return tmp_path


@pytest.mark.slow
class TestTrackServed(TestTrack):
    level = 3
