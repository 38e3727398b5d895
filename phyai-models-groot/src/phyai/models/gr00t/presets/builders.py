"""The presets of GR00T N1.7: a tiny checkpoint made on first use, and released sizes at random.

A preset's builder returns arguments of GrootArgs; see ``phyai.manifest.Preset``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phyai import byte_tokenizer, hub
from phyai.built_folder import Progress, versioned_folder
from phyai.models.gr00t.backbone_files import SUBFOLDER
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.presets import robots, tiny_checkpoint, tiny_tokenizer, tiny_weights
from phyai.models.gr00t.presets.robots import LIBERO, TAGS, mean_state
from phyai.models.gr00t.presets.sample_scene import PROMPT, sample_frames
from phyai.models.gr00t.presets.tiny_checkpoint import write_released_inputs, write_tiny_checkpoint
from phyai.models.gr00t.processing.processor import Processor
from phyai.models.gr00t.processing.robot import Robot
from phyai.types import Observation

SEED = 0


def tiny_gr00t(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of the tiny checkpoint, built below ``cache_dir`` if needed."""

    def build(folder: Path) -> None:
        if progress is not None:
            progress(0, 1, "building the tiny GR00T checkpoint")
        write_tiny_checkpoint(folder)
        if progress is not None:
            progress(1, 1, "built the tiny GR00T checkpoint")

    folder = _cached(cache_dir, "tiny-gr00t", build)
    return {
        "checkpoint_dir": str(folder),
        "backbone_dir": str(folder / SUBFOLDER),
        "embodiment": LIBERO,
    }


def full_random_gr00t(cache_dir: Path, progress: Progress = None) -> dict[str, Any]:
    """Return the arguments of a model of the released size with random bfloat16 weights."""
    folder = _cached(cache_dir, "released-inputs-gr00t", write_released_inputs)
    return {
        "checkpoint_dir": None,
        "processor_dir": str(folder),
        "backbone_dir": str(folder / SUBFOLDER),
        "embodiment": LIBERO,
        "precision": "bf16",
        "seed": SEED,
    }


def sample_observation(args: Mapping[str, Any]) -> Observation:
    """Return an observation with the cameras and the state that the arguments' embodiment needs.

    args: as for GrootArgs; without a default embodiment, the first one the checkpoint has.
    Raises: CheckpointError for a checkpoint that cannot be read.
    """
    processor = _processor(args)
    named = args.get("embodiment")
    tag = processor.robot(named or processor.tags()[0]).modalities.tag
    robot = processor.robot(tag)
    video = robot.modalities.video
    images = {}
    for camera in video.keys:
        frames = sample_frames(camera, video.steps)
        images[camera] = frames if video.steps > 1 else frames[0]
    return Observation(images, _state(robot, tag), PROMPT, {"seed": SEED, "embodiment": tag})


def _state(robot: Robot, tag: str) -> NDArray[np.float32]:
    """Return a state in the middle of a preset robot's data, zeros for others.

    [D], or [steps, D] when the embodiment looks at more than one step.
    """
    known = mean_state(tag) if tag in TAGS else {}
    row = [value for key in robot.state for value in known.get(key, [])]
    if len(row) != robot.state_dim:
        row = [0.0] * robot.state_dim
    state = np.asarray(row, dtype=np.float32)
    steps = robot.modalities.state.steps
    return state if steps == 1 else np.tile(state, (steps, 1))


def _processor(args: Mapping[str, Any]) -> Processor:
    checkpoint, backbone = args.get("checkpoint_dir"), args.get("backbone_dir")
    folder = None
    if checkpoint is not None:
        folder = hub.resolve(checkpoint, revision=args.get("revision"))
    if backbone is not None:
        backbone = hub.resolve(backbone)
    config = args.get("config")
    if not isinstance(config, GrootConfig):
        config = (
            GrootConfig.released() if folder is None else GrootConfig.from_folder(folder, backbone)
        )
    return Processor.from_checkpoint(
        folder, config, backbone_dir=backbone, processor_dir=args.get("processor_dir")
    )


def _cached(cache_dir: Path, name: str, build: Callable[[Path], None]) -> Path:
    """Return a folder named after what is written: a change of the sources is a new version."""
    modules = (byte_tokenizer, robots, tiny_checkpoint, tiny_tokenizer, tiny_weights)
    return versioned_folder(cache_dir, name, build, modules)
