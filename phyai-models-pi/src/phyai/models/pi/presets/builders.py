"""The presets of pi0 and pi0.5: a tiny checkpoint made on first use, and released sizes at random.

A preset's builder returns arguments of PI0Args or PI05Args; see ``phyai.manifest.Preset``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from phyai import byte_tokenizer, hub
from phyai.built_folder import Progress, told, versioned_folder
from phyai.errors import ConfigError
from phyai.json_files import read_json_object
from phyai.models.pi.config import MODELS, Model, PiConfig, short_camera_name
from phyai.models.pi.presets import tiny_checkpoint, tiny_tokenizer, tiny_weights
from phyai.models.pi.presets.sample_scene import PROMPT, sample_view
from phyai.models.pi.presets.tiny_checkpoint import write_tiny_checkpoint
from phyai.models.pi.presets.tiny_tokenizer import write_tiny_tokenizer
from phyai.models.pi.processing.robots import get_robot
from phyai.types import Observation

SEED = 0
CONTROL_HZ = 20.0
ACTION_UNITS = ("m", "m", "m", "rad", "rad", "rad", "open < 0 < closed")
"""The tiny presets act like LIBERO's arm: end-effector deltas and a gripper command."""
# What an arm with end-effector control reports; longer states continue with zeros.
_STATE = (-0.06, 0.02, 0.94, 3.02, -0.18, -0.08, 0.031, -0.031)


def tiny_pi05(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of the tiny pi0.5 checkpoint, built below ``cache_dir`` if needed."""
    return _tiny("pi05", cache_dir, progress)


def tiny_pi0(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of the tiny pi0 checkpoint, built below ``cache_dir`` if needed."""
    return _tiny("pi0", cache_dir, progress)


def full_random_pi05(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of a pi0.5 of the released size with random bfloat16 weights."""
    return _full_random(cache_dir)


def full_random_pi0(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of a pi0 of the released size with random bfloat16 weights."""
    return _full_random(cache_dir)


def sample_observation(args: Mapping[str, Any]) -> Observation:
    """Return an observation with the cameras and the state length the arguments' model expects.

    args: as for PI0Args or PI05Args; ``checkpoint_dir``, ``config`` and ``robot`` are looked at.
    Raises: CheckpointError for a checkpoint whose config cannot be read.
    """
    cameras, state_dim = _expected_inputs(args)
    state = np.zeros(state_dim, dtype=np.float32)
    known = min(state_dim, len(_STATE))
    state[:known] = _STATE[:known]
    images = {name: _image(name) for name in cameras}
    return Observation(images=images, state=state, prompt=PROMPT, options={"seed": SEED})


def _tiny(model: Model, cache_dir: Path, progress: Progress) -> dict[str, Any]:
    write = partial(write_tiny_checkpoint, model=model)
    build = told(write, f"the tiny {model} checkpoint", progress)
    modules = (byte_tokenizer, tiny_checkpoint, tiny_weights, tiny_tokenizer)
    return {
        "checkpoint_dir": str(versioned_folder(cache_dir, f"tiny-{model}", build, modules)),
        "control_hz": CONTROL_HZ,
        "action_units": ACTION_UNITS,
    }


def _full_random(cache_dir: Path) -> dict[str, Any]:
    def build(folder: Path) -> None:
        write_tiny_tokenizer(folder)

    modules = (byte_tokenizer, tiny_tokenizer)
    folder = versioned_folder(cache_dir, "tiny-tokenizer", build, modules)
    return {
        "checkpoint_dir": None,
        "precision": "bf16_openpi",
        "tokenizer": str(folder / "tokenizer.json"),
        "seed": SEED,
    }


def _expected_inputs(args: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Return the cameras to send, in order, and the length of the state."""
    config = _config(args)
    if args.get("robot"):
        robot = get_robot(args["robot"])
        return tuple(robot.cameras), robot.state_dim
    real = config.cameras[: len(config.cameras) - config.empty_cameras]
    names = tuple(short_camera_name(camera) for camera in real)
    return names, config.state_dim or config.max_state_dim


def _config(args: Mapping[str, Any]) -> PiConfig:
    config = args.get("config")
    if isinstance(config, PiConfig):
        return config
    checkpoint = args.get("checkpoint_dir")
    if checkpoint is None:
        return PiConfig.default("pi05")  # both models have these cameras and this state
    folder = hub.resolve(checkpoint, revision=args.get("revision"))
    model = read_json_object(folder / "config.json").get("type", "pi05")
    if model not in MODELS:
        raise ConfigError(
            f"checkpoint must be one of {', '.join(MODELS)}; got {model!r}. Use its own plugin."
        )
    return PiConfig.from_folder(folder, cast(Model, model))


def _image(camera: str) -> NDArray[np.uint8]:
    return sample_view("wrist" if "wrist" in camera else "base")
