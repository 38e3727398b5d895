"""The presets: tiny checkpoints made on first use, and an example input for each plugin.

A preset's builder returns arguments of the plugin; see ``phyai.manifest.Preset``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from phyai import byte_tokenizer
from phyai.built_folder import Progress, told, versioned_folder
from phyai.models.cosmos3.presets import (
    drawing,
    tiny_checkpoint,
    tiny_sound,
    tiny_tokenizer,
    tiny_transformer,
    tiny_vae,
)
from phyai.models.cosmos3.presets.sample_scene import sample_frame
from phyai.models.cosmos3.presets.tiny_checkpoint import write_tiny_checkpoint
from phyai.models.cosmos3.robots import DROID, DROID_CAMERAS
from phyai.types import Observation

MODULES = (
    byte_tokenizer,
    drawing,
    tiny_checkpoint,
    tiny_sound,
    tiny_tokenizer,
    tiny_transformer,
    tiny_vae,
)
"""What the folders are written by."""
SEED = 0
INSTRUCTION = "Put the red cube on the green cube."
PROMPT = "A robot arm puts a red cube on a green one."
JOINTS = (0.02, -0.61, 0.05, -2.35, 0.03, 1.76, 0.74)
"""Joint angles in rad of a Franka arm above a table, for the sample observation."""
GRIPPER = 0.1
SMALL_VIDEO = {"num_frames": 9, "height": 64, "width": 96, "num_steps": 4}
"""What prompts become that name no size: the released sizes take minutes without an accelerator."""


def tiny_cosmos3(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of the tiny world model, built below ``cache_dir`` if needed."""
    folder = _built(cache_dir, "tiny-cosmos3", progress, sound=True)
    return {"checkpoint_dir": folder, "weight_strict": True, **SMALL_VIDEO}


def tiny_cosmos3_policy(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of the tiny policy with NVIDIA's DROID values."""
    folder = _built(cache_dir, "tiny-cosmos3-policy", progress, sound=False)
    return {"checkpoint_dir": folder, "weight_strict": True, "robot": DROID.name}


def sample_observation(args: Mapping[str, Any]) -> Observation:
    """Return an observation of the DROID robot: three cameras, joints and gripper."""
    images = {camera: sample_frame(camera) for camera in DROID_CAMERAS}
    state = np.asarray([*JOINTS, GRIPPER], dtype=np.float32)
    return Observation(images, state, INSTRUCTION, {"seed": SEED})


def sample_prompt(args: Mapping[str, Any]) -> Observation:
    """Return a prompt for a video with sound."""
    return Observation(prompt=PROMPT, options={"sound": "auto", "seed": SEED})


def _built(cache_dir: Path, name: str, progress: Progress, *, sound: bool) -> str:
    write = partial(write_tiny_checkpoint, sound=sound)
    build = told(write, "the tiny Cosmos3 checkpoint", progress)
    return str(versioned_folder(cache_dir, name, build, MODULES))
