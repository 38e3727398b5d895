"""What each robot sends and gets: cameras, wording of the prompt, channels, units, rate.

The model sees and predicts 80 channels in metric units; a contract says which of them a robot has
and how its own numbers map to them. ``raw`` leaves all of that to the caller.

Source: the evaluation clients in OpenBMB/MiniCPM-Robot, MiniCPM-RobotManip/evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phyai.errors import ConfigError, did_you_mean
from phyai.models.minicpm_robot.processing.rotations import Rotation6D

CHANNELS = 80
RAW = "raw"
INSTRUCTION = "{instruction}"
_FULL_PROMPT = ("unified 80D layout", "Task:")

Side = Literal["left", "right"]
Turn = Literal["axis_angle", "euler_xyz", "quaternion_wxyz"]


@dataclass(frozen=True, slots=True)
class RobotContract:
    """One robot's side of the model.

    cameras: names in the model's order; () = any, in the order they are sent.
    arms: "left" for a single arm; () = all channels, as they are.
    prompt: wording around the instruction, with ``{instruction}``; None = the bare instruction.
    rotation6d: order of the six rotation numbers in this robot's data.
    joints: joint angles per arm that a state may hold.
    action_rotation: how commands give rotations.
    gripper_command: the values of (open, closed) in a command.
    open_threshold: a measured opening above it is open, below it closed; None = the robot sends
        none and the gripper channel of its state stays 0 unless given.
    open_inclusive: an opening of exactly the threshold is open.
    control_hz: commands per second; None = not known.

    >>> find_contract("libero").cameras
    ('agentview', 'wrist')
    """

    name: str
    cameras: tuple[str, ...] = ()
    arms: tuple[Side, ...] = ()
    prompt: str | None = None
    embodiment_id: int = 0
    control_hz: float | None = None
    rotation6d: Rotation6D = "interleaved"
    joints: int = 0
    action_rotation: Turn = "axis_angle"
    gripper_command: tuple[float, float] = (0.0, 1.0)
    open_threshold: float | None = None
    open_inclusive: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt is not None and INSTRUCTION not in self.prompt:
            raise ConfigError(
                f"prompt of contract {self.name!r} must hold {INSTRUCTION}; got {self.prompt!r}. "
                "Add it."
            )
        if self.arms not in ((), ("left",), ("left", "right")):
            raise ConfigError(
                f"arms of contract {self.name!r} must be (), ('left',) or ('left', 'right'); got "
                f"{self.arms!r}."
            )

    @property
    def raw(self) -> bool:
        """Return whether states and actions are all channels as they are."""
        return not self.arms

    def instruction(self, text: str) -> str:
        """Return the text the model sees; a whole prompt is left as it is.

        >>> find_contract("libero").instruction("open {it}")[-15:]
        'Task: open {it}'
        """
        if self.prompt is None or all(part in text for part in _FULL_PROMPT):
            return text
        return self.prompt.replace(INSTRUCTION, text)


def _prompt(robot: str, arms: str, grippers: str, rate: int) -> str:
    return (
        f"The robot is {robot}. Its action control method is absolute {arms} end-effector pose in "
        f"the unified 80D layout with gripper closed {grippers}, and its action FPS is {rate} Hz. "
        f"Task: {INSTRUCTION}"
    )


CONTRACTS = {
    contract.name: contract
    for contract in (
        RobotContract(RAW),
        RobotContract(
            "libero",
            cameras=("agentview", "wrist"),
            arms=("left",),
            prompt=_prompt(
                "LIBERO Franka, a simulated single-arm Franka manipulator",
                "single-arm",
                "command",
                20,
            ),
            embodiment_id=0,
            control_hz=20.0,
            rotation6d="columns",
            action_rotation="axis_angle",
            gripper_command=(-1.0, 1.0),
            notes=(
                "rotate180: send agentview turned by 180 degrees (both axes flipped), as the "
                "training data is; send wrist as rendered",
                "poses are absolute: switch the controller's delta mode off",
                "gripper: +1 closes, -1 opens",
            ),
        ),
        RobotContract(
            "calvin",
            cameras=("static", "gripper"),
            arms=("left",),
            prompt=_prompt(
                "CALVIN Franka, a simulated single-arm Franka/Panda manipulator",
                "single-arm",
                "command",
                10,
            ),
            embodiment_id=1,
            control_hz=10.0,
            action_rotation="euler_xyz",
            gripper_command=(1.0, -1.0),
            open_threshold=0.0,
            open_inclusive=True,
            notes=(
                "prompt: the published client sends the subtask's name before the instruction, "
                "as in 'open_drawer: open the drawer'",
                "gripper_open is the last gripper command: -1 closed, +1 open",
                "gripper: +1 opens, -1 closes",
            ),
        ),
        RobotContract(
            "robotwin",
            cameras=("head", "left_wrist", "right_wrist"),
            arms=("left", "right"),
            prompt=_prompt(
                "RoboTwin2 ALOHA-AgileX, a simulated dual-arm ALOHA-style manipulator",
                "dual-arm",
                "commands",
                15,
            ),
            embodiment_id=4,
            control_hz=15.0,
            joints=6,
            action_rotation="quaternion_wxyz",
            gripper_command=(1.0, 0.0),
            open_threshold=0.4,
            notes=(
                "joint channels are 0 unless joints are sent; the published client sends none",
                "gripper: 1 opens, 0 closes",
            ),
        ),
    )
}


def find_contract(name: str | None) -> RobotContract:
    """Return a contract by name; None = ``raw``.

    Raises: ConfigError listing the known ones.
    """
    found = CONTRACTS.get(RAW if name is None else name) if _is_name(name) else None
    if found is None:
        raise ConfigError(
            f"contract must be one of {', '.join(CONTRACTS)}; got {name!r}."
            f"{did_you_mean(str(name), CONTRACTS)}"
        )
    return found


def _is_name(name: object) -> bool:
    return name is None or isinstance(name, str)
