"""The presets: a tiny tracker with towers made on first use, and released sizes at random.

A preset's builder returns arguments of MiniCPMRobotTrackArgs; see ``phyai.manifest.Preset``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phyai import byte_tokenizer
from phyai.built_folder import Progress, told, versioned_folder
from phyai.models.minicpm_robot_track.observed import CAMERA
from phyai.models.minicpm_robot_track.presets import tiny_checkpoint, tiny_tokenizer
from phyai.models.minicpm_robot_track.presets.sample_scene import PROMPT, sample_frames
from phyai.models.minicpm_robot_track.vision import tiny as tiny_towers
from phyai.types import Observation

MODULES = (byte_tokenizer, tiny_checkpoint, tiny_tokenizer, tiny_towers)
"""What the folders are written by."""
SEED = 0


def tiny_minicpm_robot_track(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of the tiny checkpoint and its towers, built if needed."""

    def write(folder: Path) -> None:
        tiny_checkpoint.write_tiny_checkpoint(folder)
        tiny_towers.write_tiny_towers(folder)

    build = told(write, "the tiny tracker", progress)
    folder = versioned_folder(cache_dir, "tiny-minicpm-robot-track", build, MODULES)
    return {
        "checkpoint_dir": str(folder),
        "dino_dir": str(folder / tiny_towers.DINO_FOLDER),
        "siglip_dir": str(folder / tiny_towers.SIGLIP_FOLDER),
    }


def full_random_minicpm_robot_track(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of a tracker and towers of the released sizes with random weights."""
    name, write = "tokenizer-minicpm-robot-track", tiny_tokenizer.write_tiny_tokenizer
    folder = versioned_folder(cache_dir, name, write, MODULES)
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
