"""The end-effector action space of other DROID checkpoints: ten channels instead of eight.

A row is a step of the end effector (``poses``) and the inverted gripper; the state row is an
absolute pose in the same nine numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phyai.errors import RequestError
from phyai.models.cosmos3.processing.checks import array_of, check_integer, float_rows
from phyai.models.cosmos3.processing.droid import GRIPPER, opened
from phyai.models.cosmos3.processing.normalizers import Normalizer
from phyai.models.cosmos3.processing.poses import (
    STEP_DIM,
    columns_of,
    poses_of,
    quaternions_of,
    steps_between,
    walk,
)

POSITION, QUATERNION = "eef_pos", "eef_quat"
ROW_DIM = STEP_DIM + 1
POSE_NAMES = ("x", "y", "z", "qx", "qy", "qz", "qw", "gripper")
# fmt: off
DROID_STATISTICS = {
    "q01": (-0.014200, -0.013416, -0.015206, 0.998459, -0.047659, -0.034774, -0.047609, 0.998428,
            -0.035553, 0.0),
    "q99": (0.014515, 0.011517, 0.014520, 1.0, 0.047596, 0.034660, 0.047654, 1.0, 0.038888, 1.0),
}
# fmt: on
"""Quantiles of the rows in the DROID data."""


@dataclass(frozen=True, slots=True)
class EefState:
    """What a robot reports, oldest first.

    position: [T, 3] m.  quaternion: [T, 4] xyzw.  gripper: [T, 1], 1 is closed.
    """

    position: NDArray[np.float32]
    quaternion: NDArray[np.float32]
    gripper: NDArray[np.float32]

    @classmethod
    def of(cls, position: Any, quaternion: Any, gripper: Any) -> EefState:
        """Return the checked state.  Raises: RequestError."""
        values = array_of(GRIPPER, gripper)
        values = values.reshape(1, 1) if values.ndim == 0 else values
        found = cls(
            float_rows(POSITION, position, 3),
            float_rows(QUATERNION, quaternion, 4),
            float_rows(GRIPPER, values[:, None] if values.ndim == 1 else values, 1),
        )
        counts = {len(found.position), len(found.quaternion), len(found.gripper)}
        if len(counts) > 1:
            raise RequestError(
                f"{POSITION}, {QUATERNION} and {GRIPPER} must have as many rows; got "
                f"{sorted(counts)}. Send all of the same ticks."
            )
        return found


def eef_rows(
    state: EefState, history: int = 1, normalizer: Normalizer | None = None
) -> NDArray[np.float32]:
    """Return the clean action rows, [history, 10]: past steps, then the present pose.

    normalizer: of the steps; None for a checkpoint trained on them as they are. The pose row is
        never scaled: its statistics are other ones.
    Raises: RequestError.
    """
    history = check_integer("history_length", history, 0, 64)
    if len(state.position) < history:
        raise RequestError(
            f"{POSITION} must have {history} rows, the last ticks up to now; got "
            f"{len(state.position)}. Send them oldest first."
        )
    if not history:
        return np.zeros((0, ROW_DIM), np.float32)
    poses = poses_of(state.position[-history:], state.quaternion[-history:])
    grip = state.gripper[-history:]
    past = opened(np.concatenate([steps_between(poses), grip[1:]], axis=1))
    if normalizer is not None:
        past = normalizer.normalize(past)
    now = np.concatenate([poses[-1, :3, 3], columns_of(poses[-1, :3, :3]), grip[-1]])
    return np.concatenate([past, opened(now[None])])


def eef_actions(
    rows: NDArray[np.float32],
    state: EefState,
    history: int = 1,
    normalizer: Normalizer | None = None,
) -> NDArray[np.float32]:
    """Return absolute commands: position, quaternion (x, y, z, w) and gripper, 1 is closed.

    Shapes: float32 [history + chunk, >= 10] -> float32 [chunk, 8].
    Raises: RequestError for a quaternion of length zero.
    """
    steps = rows[history:, :ROW_DIM]
    if normalizer is not None:
        steps = normalizer.denormalize(steps)
    first = poses_of(state.position[-1:], state.quaternion[-1:])[0]
    poses = walk(first, steps[:, :STEP_DIM])
    turns = quaternions_of(poses[:, :3, :3])
    return opened(np.concatenate([poses[:, :3, 3], turns, steps[:, STEP_DIM:]], axis=1))
