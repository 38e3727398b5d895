"""The three robot contracts of openpi: LIBERO, DROID and ALOHA.

A contract says which of the robot's cameras fills which slot, how its state and actions differ
from the model's, and at which rate the actions run. Source: openpi policies and clients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phyai.errors import ConfigError, RequestError, did_you_mean
from phyai.models.pi.config import BASE_CAMERAS
from phyai.models.pi.processing.images import check_image, float_to_uint8

Array = NDArray[Any]
_BASE, _LEFT, _RIGHT = BASE_CAMERAS


# ---------------------------------------------------------------- ALOHA maths

ALOHA_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2, dtype=np.float64)
ALOHA_GRIPPERS = (6, 13)
_FINGER_OPEN, _FINGER_CLOSED = 0.05800, 0.01844  # metres between the fingers
_HORN_RADIUS, _ARM_LENGTH = 0.022, 0.036  # metres, gripper linkage
_ANGLE_MIN, _ANGLE_MAX = 0.5476, 1.6296  # radians, the model's gripper range
_ROBOT_MIN, _ROBOT_MAX = -0.6213, 1.4910  # radians, the robot's gripper command range


def aloha_gripper_to_model(gripper: Array) -> Array:
    """Return the model's gripper value of the robot's linear gripper reading."""
    position = gripper * (_FINGER_OPEN - _FINGER_CLOSED) + _FINGER_CLOSED
    ratio = (_HORN_RADIUS**2 + position**2 - _ARM_LENGTH**2) / (2 * _HORN_RADIUS * position)
    angle = np.arcsin(np.clip(ratio, -1.0, 1.0))
    return np.asarray((angle - _ANGLE_MIN) / (_ANGLE_MAX - _ANGLE_MIN))


def aloha_gripper_from_model(gripper: Array) -> Array:
    """Return the robot's gripper command of the model's gripper action."""
    # The original maps only the lower end into radians; kept, as checkpoints depend on it.
    return np.asarray((gripper + _ANGLE_MIN - _ROBOT_MIN) / (_ROBOT_MAX - _ROBOT_MIN))


def aloha_gripper_from_model_inverse(command: Array) -> Array:
    """Return the model's gripper action of a robot command."""
    return np.asarray(command * (_ROBOT_MAX - _ROBOT_MIN) + _ROBOT_MIN - _ANGLE_MIN)


def _with_grippers(values: Array, convert: Any) -> Array:
    out = np.array(values, dtype=np.float64)
    for index in ALOHA_GRIPPERS:
        out[..., index] = convert(out[..., index])
    return out


# ---------------------------------------------------------------- LIBERO helpers


def rotate_180(image: Array) -> Array:
    """Return a rendered LIBERO image [height, width, C] turned by 180 degrees."""
    return np.ascontiguousarray(image[::-1, ::-1])


def axis_angle(quaternion_xyzw: Array) -> NDArray[np.float64]:
    """Return the axis-angle vector [3] of a unit quaternion [4] in x, y, z, w order.

    w is clipped to [-1, 1]; near the identity the result is zero.
    """
    quaternion = np.asarray(quaternion_xyzw, dtype=np.float64)
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    length = float(np.sqrt(1.0 - w * w))
    if np.isclose(length, 0.0):
        return np.zeros(3)
    return np.asarray(quaternion[:3] * 2.0 * np.arccos(w) / length)


def libero_state(position: Array, quaternion_xyzw: Array, gripper: Array) -> NDArray[np.float64]:
    """Return LIBERO's state [8]: end-effector position 3, axis-angle 3, gripper joints 2."""
    parts = [np.asarray(position), axis_angle(quaternion_xyzw), np.asarray(gripper)]
    return np.asarray(np.concatenate(parts), dtype=np.float64)


# ---------------------------------------------------------------- contracts


@dataclass(frozen=True)
class RobotInputs:
    """One robot observation in the model's terms; images uint8 [height, width, 3] by slot."""

    images: Mapping[str, Array]
    state: NDArray[Any]
    prompt: str | None


@dataclass(frozen=True, slots=True)
class RobotContract:
    """How one robot talks to an openpi checkpoint.

    cameras: the robot's camera key -> the model's slot. ignored_cameras: accepted, not used.
    state_keys: entries of a raw observation that make up the state, in order.
    image_group: the observation entry that holds the cameras, "" when they lie at the top.

    >>> from phyai.models.pi.processing.robots import get_robot
    >>> get_robot("droid").control_hz, get_robot("droid").action_dim
    (15.0, 8)
    """

    name: str
    cameras: Mapping[str, str] = field(hash=False)
    state_keys: tuple[str, ...]
    state_dim: int
    action_names: tuple[str, ...]
    units: tuple[str, ...]
    control_hz: float
    required_cameras: tuple[str, ...]
    ignored_cameras: tuple[str, ...] = ()
    image_group: str = ""
    uint8_chw: bool = False
    adapt_to_pi: bool = False
    execution_horizon: int | None = None

    @property
    def action_dim(self) -> int:
        return len(self.action_names)

    def slot(self, camera: str) -> str | None:
        """Return the model slot of one of the robot's camera names (full key or last part)."""
        for key, slot in self.cameras.items():
            if camera in (key, key.rpartition("/")[2]):
                return slot
        return None

    def encode_state(self, state: Array) -> Array:
        """Return the robot's state [D] as the model was trained on it."""
        if not self.adapt_to_pi:
            return np.asarray(state)
        return _with_grippers(ALOHA_SIGNS * np.asarray(state), aloha_gripper_to_model)

    def encode_actions(self, actions: Array) -> Array:
        """Return robot actions [..., A] in the model's space; inverse of ``from_model``."""
        if not self.adapt_to_pi:
            return np.asarray(actions)
        signed = ALOHA_SIGNS * np.asarray(actions)
        return _with_grippers(signed, aloha_gripper_from_model_inverse)

    def from_model(self, actions: Array) -> Array:
        """Return model actions [..., >= A] as robot commands [..., A]."""
        actions = np.asarray(actions)
        if actions.shape[-1] < self.action_dim:
            raise ConfigError(
                f"robot {self.name!r} needs {self.action_dim} action dims; the checkpoint gives "
                f"{actions.shape[-1]}. Choose the robot the checkpoint was trained for."
            )
        actions = actions[..., : self.action_dim]
        if not self.adapt_to_pi:
            return actions
        return _with_grippers(ALOHA_SIGNS * actions, aloha_gripper_from_model)

    def to_model(self, observation: Mapping[str, Any]) -> RobotInputs:
        """Return a raw robot observation in the model's terms.

        Raises: RequestError naming a missing entry, an unknown camera or a wrong state length.
        """
        images = {}
        for camera, image in self._cameras_of(observation).items():
            if camera in self.ignored_cameras:
                continue
            slot = self.slot(camera)
            if slot is None:
                raise RequestError(
                    f"camera of robot {self.name!r} must be one of {', '.join(self.cameras)}; "
                    f"got {camera!r}. Rename it."
                )
            pixels = check_image(image, camera, allow_uint8_chw=True)
            images[slot] = pixels if pixels.dtype == np.uint8 else float_to_uint8(pixels)
        for camera in self.required_cameras:
            if self.cameras[camera] not in images:
                raise RequestError(
                    f"observation of robot {self.name!r} must hold the camera {camera!r}; got "
                    f"{', '.join(sorted(images)) or 'none'}. Send it."
                )
        return RobotInputs(
            images=images,
            state=self.encode_state(self._state_of(observation)),
            prompt=_prompt_of(observation),
        )

    def _cameras_of(self, observation: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self.image_group:
            return {key: observation[key] for key in self.cameras if key in observation}
        group = observation.get(self.image_group)
        if not isinstance(group, Mapping):
            raise RequestError(
                f"observation of robot {self.name!r} must hold {self.image_group!r} with images "
                f"by camera; got {type(group).__name__}. Send it."
            )
        return group

    def _state_of(self, observation: Mapping[str, Any]) -> Array:
        missing = [key for key in self.state_keys if key not in observation]
        if missing:
            raise RequestError(
                f"observation of robot {self.name!r} must hold {missing[0]!r}; got "
                f"{', '.join(sorted(map(str, observation)))}. Send it."
            )
        parts = [np.atleast_1d(np.asarray(observation[key])) for key in self.state_keys]
        state = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if state.shape != (self.state_dim,):
            raise RequestError(
                f"state of robot {self.name!r} must have {self.state_dim} values; got shape "
                f"{list(state.shape)}. Correct it."
            )
        return state


def _prompt_of(observation: Mapping[str, Any]) -> str | None:
    prompt = observation.get("prompt")
    if isinstance(prompt, np.ndarray) and prompt.ndim == 0:
        prompt = prompt.item()
    if isinstance(prompt, bytes):
        return prompt.decode("utf-8")
    return None if prompt is None else str(prompt)


def droid_client_action(action: Array) -> Array:
    """Return DROID commands [..., 8] as its client sends them: gripper 0 or 1, all in [-1, 1]."""
    out = np.array(action, copy=True)
    out[..., -1] = np.where(out[..., -1] > 0.5, 1.0, 0.0)
    return np.asarray(np.clip(out, -1.0, 1.0))


LIBERO = RobotContract(
    name="libero",
    cameras={"observation/image": _BASE, "observation/wrist_image": _LEFT},
    state_keys=("observation/state",),
    state_dim=8,
    action_names=("x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z", "gripper"),
    # Operational-space controller deltas, scaled to [-1, 1]; gripper -1 open, 1 closed.
    units=("normalised",) * 7,
    control_hz=20.0,
    required_cameras=("observation/image", "observation/wrist_image"),
    execution_horizon=5,
)
DROID = RobotContract(
    name="droid",
    cameras={
        "observation/exterior_image_1_left": _BASE,
        "observation/wrist_image_left": _LEFT,
    },
    state_keys=("observation/joint_position", "observation/gripper_position"),
    state_dim=8,
    action_names=(*(f"joint_velocity_{i}" for i in range(7)), "gripper_position"),
    units=("normalised velocity",) * 7 + ("0 open, 1 closed",),
    control_hz=15.0,
    required_cameras=("observation/exterior_image_1_left", "observation/wrist_image_left"),
    execution_horizon=8,
)
DROID_JOINT_POSITION = dataclasses.replace(
    DROID,
    name="droid_joint_position",
    action_names=(*(f"joint_position_{i}" for i in range(7)), "gripper_position"),
    units=("rad",) * 7 + ("0 open, 1 closed",),
)
_ARM = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
ALOHA = RobotContract(
    name="aloha",
    cameras={"cam_high": _BASE, "cam_left_wrist": _LEFT, "cam_right_wrist": _RIGHT},
    state_keys=("state",),
    state_dim=14,
    action_names=tuple(f"{side}_{joint}" for side in ("left", "right") for joint in _ARM),
    units=(("rad",) * 6 + ("0 closed, 1 open",)) * 2,
    control_hz=50.0,
    required_cameras=("cam_high",),
    ignored_cameras=("cam_low",),
    image_group="images",
    uint8_chw=True,
    adapt_to_pi=True,
)
ALOHA_SIM = dataclasses.replace(ALOHA, name="aloha_sim", adapt_to_pi=False)

ROBOTS: dict[str, RobotContract] = {
    robot.name: robot for robot in (LIBERO, DROID, DROID_JOINT_POSITION, ALOHA, ALOHA_SIM)
}


def get_robot(name: str) -> RobotContract:
    """Return the contract called ``name``.

    Raises: ConfigError listing the known robots.
    """
    if name not in ROBOTS:
        raise ConfigError(
            f"robot must be one of {', '.join(sorted(ROBOTS))}; got {name!r}."
            f"{did_you_mean(name, ROBOTS)} Choose one of them, or none."
        )
    return ROBOTS[name]
