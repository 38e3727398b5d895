"""The presets: a tiny tracker with towers made on first use, and released sizes at random.

A preset's builder returns arguments of MiniCPMRobotTrackArgs; see ``phyai.manifest.Preset``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phyai.built_folder import cached_folder
from phyai.models.minicpm_robot_track.observed import CAMERA
from phyai.models.minicpm_robot_track.presets import tiny_checkpoint, tiny_tokenizer
from phyai.models.minicpm_robot_track.presets.sample_scene import PROMPT, sample_frames
from phyai.models.minicpm_robot_track.vision import tiny as tiny_towers
from phyai.types import Observation

Progress = Callable[[int, int, str], None] | None

SEED = 0


def tiny_minicpm_robot_track(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of the tiny checkpoint and its towers, built if needed."""

    def build(folder: Path) -> None:
        if progress is not None:
            progress(0, 1, "building the tiny tracker")
        tiny_checkpoint.write_tiny_checkpoint(folder)
        tiny_towers.write_tiny_towers(folder)
        if progress is not None:
            progress(1, 1, "built the tiny tracker")

    folder = _cached(cache_dir, "tiny-minicpm-robot-track", build)
    return {
        "checkpoint_dir": str(folder),
        "dino_dir": str(folder / tiny_towers.DINO_FOLDER),
        "siglip_dir": str(folder / tiny_towers.SIGLIP_FOLDER),
    }


def full_random_minicpm_robot_track(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of a tracker and towers of the released sizes with random weights."""
    folder = _cached(
        cache_dir, "tokenizer-minicpm-robot-track", tiny_tokenizer.write_tiny_tokenizer
    )
    return {
        "checkpoint_dir": None,
        "tokenizer": str(folder),
        "towers_random": True,
        "precision": "bf16",
        "seed": SEED,
    }


def sample_observation(args: Mapping[str, Any]) -> Observation:
    """Return an observation of one frame; the window is filled with it.

    args: as for MiniCPMRobotTrackArgs; every checkpoint takes the same.
    """
    return Observation({CAMERA: sample_frames(1)[0]}, prompt=PROMPT)


def _cached(cache_dir: Path, name: str, build: Callable[[Path], None]) -> Path:
    """Return a folder named after what is written: a change of the sources is a new version."""
    modules = (tiny_checkpoint, tiny_tokenizer, tiny_towers)
    source = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    version = hashlib.sha256(source).hexdigest()[:12]
    return cached_folder(Path(cache_dir), f"{name}-{version}", build)
