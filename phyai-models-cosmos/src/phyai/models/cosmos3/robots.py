"""Robots whose observations are known by name: what a policy checkpoint of theirs expects.

Torch-free: the plugin module lists the values in its manifest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from phyai.errors import ConfigError, did_you_mean

DROID_CAMERAS = ("wrist_image_left", "exterior_image_1_left", "exterior_image_2_left")
COMPOSED = "image"
"""Name of the one image in which the views are already composed."""


@dataclass(frozen=True, slots=True)
class RobotSettings:
    """How observations of one robot become requests, and actions become commands.

    names: of the action dims; the last one is the gripper, which the model sees inverted.
    cameras: views that are composed into one image.  image_size: height and width the composed
        image is brought to.  resolution: tier of the canvas.
    domain: name or id of the embodiment; the id chooses the action projections.
    chunk_size: action rows after the state row.  fps: of actions and of video frames.
    prompt_format: ``plain`` or ``json``.
    action_space: what a row of the model means, see processing.action_spaces.  raw_dim: channels of
        one.

    >>> DROID.horizon, DROID.fps, len(DROID.names)
    (32, 15.0, 8)
    """

    name: str
    names: tuple[str, ...]
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    resolution: str
    domain: str | int
    chunk_size: int
    fps: float
    num_steps: int
    guidance_scale: float
    flow_shift: float
    prompt_format: str
    units: tuple[str, ...] = ()
    action_space: str = "joint_position"
    raw_dim: int = 8

    @property
    def horizon(self) -> int:
        return self.chunk_size

    def to_json(self) -> dict[str, Any]:
        """Return the values as plain data, for the manifest."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


DROID = RobotSettings(
    name="droid",
    names=(*(f"joint_{i}" for i in range(7)), "gripper"),
    cameras=DROID_CAMERAS,
    image_size=(540, 640),
    resolution="480",
    domain="droid_lerobot",
    chunk_size=32,
    fps=15.0,
    num_steps=4,
    guidance_scale=3.0,
    flow_shift=5.0,
    prompt_format="plain",
    units=(*["rad"] * 7, "1"),
)
"""NVIDIA's server of Cosmos3-Nano-Policy-DROID: absolute joint positions, not normalised."""

DROID_MIDTRAIN = replace(
    DROID,
    name="droid_midtrain",
    names=("x", "y", "z", "qx", "qy", "qz", "qw", "gripper"),
    units=(*["m"] * 3, *["1"] * 5),
    action_space="pose_steps",
    raw_dim=10,
)
"""The server's other action space, of checkpoints trained on end-effector steps of DROID."""

ROBOTS = {robot.name: robot for robot in (DROID, DROID_MIDTRAIN)}


def robot_settings(name: str) -> RobotSettings:
    """Return a robot's settings; ConfigError for an unknown name."""
    if name not in ROBOTS:
        raise ConfigError(
            f"robot must be one of {', '.join(sorted(ROBOTS))}; got {name!r}."
            f"{did_you_mean(str(name), ROBOTS)} Pick one of them."
        )
    return ROBOTS[name]
