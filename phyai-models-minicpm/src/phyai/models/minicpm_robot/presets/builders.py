"""The presets of MiniCPM-Robot: a tiny checkpoint made on first use, and released sizes at random.

A preset's builder returns arguments of MiniCPMRobotArgs; see ``phyai.manifest.Preset``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phyai import byte_tokenizer, hub
from phyai.built_folder import Progress, told, versioned_folder
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.presets import tiny_checkpoint, tiny_tokenizer, tiny_weights
from phyai.models.minicpm_robot.presets.sample_scene import PROMPT, sample_frame
from phyai.models.minicpm_robot.presets.tiny_checkpoint import (
    write_released_inputs,
    write_tiny_checkpoint,
)
from phyai.models.minicpm_robot.processing.contracts import RobotContract, find_contract
from phyai.models.minicpm_robot.processing.rotations import to_rotation6d
from phyai.types import Observation

MODULES = (byte_tokenizer, tiny_checkpoint, tiny_tokenizer, tiny_weights)
"""What the folders are written by."""
SEED = 0
CONTRACT = "libero"
_RAW_CAMERAS = ("front", "wrist")
_POSITION = (0.45, 0.0, 0.25)


def tiny_minicpm_robot(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of the tiny checkpoint, built below ``cache_dir`` if needed."""
    build = told(write_tiny_checkpoint, "the tiny MiniCPM-Robot checkpoint", progress)
    folder = versioned_folder(cache_dir, "tiny-minicpm-robot", build, MODULES)
    return {"checkpoint_dir": str(folder), "contract": CONTRACT}


def full_random_minicpm_robot(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of a model of the released size with random weights.

    As released, the vision-language model is bfloat16 and the action head float32.
    """
    name = "released-inputs-minicpm-robot"
    folder = versioned_folder(cache_dir, name, write_released_inputs, MODULES)
    return {
        "checkpoint_dir": None,
        "processor_dir": str(folder),
        "contract": CONTRACT,
        "precision": "bf16",
        "seed": SEED,
    }


def sample_observation(args: Mapping[str, Any]) -> Observation:
    """Return an observation with the cameras and the state that the arguments' contract needs.

    args: as for MiniCPMRobotArgs.
    Raises: ConfigError for an unknown contract, CheckpointError for a folder that cannot be read.
    """
    contract = find_contract(args.get("contract"))
    images = {name: sample_frame(name) for name in contract.cameras or _RAW_CAMERAS}
    return Observation(images, _state(contract, args), PROMPT, {"seed": SEED})


def _state(contract: RobotContract, args: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return all channels at 0 for ``raw``, else open grippers in front of the robot."""
    if contract.raw:
        return np.zeros(_config(args).head.state_dim, dtype=np.float32)
    arm = [*_POSITION, *to_rotation6d(np.eye(3), contract.rotation6d), 0.0]
    return np.asarray(arm * len(contract.arms), dtype=np.float32)


def _config(args: Mapping[str, Any]) -> MiniCPMRobotConfig:
    config, checkpoint = args.get("config"), args.get("checkpoint_dir") or args.get("checkpoint")
    if isinstance(config, MiniCPMRobotConfig):
        return config
    if checkpoint is None:
        return MiniCPMRobotConfig()
    return MiniCPMRobotConfig.from_folder(hub.resolve(checkpoint, revision=args.get("revision")))
