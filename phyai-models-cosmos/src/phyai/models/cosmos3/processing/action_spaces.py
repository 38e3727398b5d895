"""What a robot's state becomes in front of the actions, and model rows become commands."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phyai.errors import RequestError
from phyai.models.cosmos3.processing.checks import float_rows
from phyai.models.cosmos3.processing.droid import ROW_DIM, joint_actions, state_rows
from phyai.models.cosmos3.processing.midtrain import (
    DROID_STATISTICS,
    POSE_NAMES,
    EefState,
    eef_actions,
    eef_rows,
)
from phyai.models.cosmos3.processing.midtrain import ROW_DIM as POSE_ROW_DIM
from phyai.models.cosmos3.processing.normalizers import Normalizer

Rows = NDArray[np.float32]


class ActionSpace(Protocol):
    """raw_dim: channels of a model row.  relative: commands start from the state, always needed."""

    raw_dim: int
    relative: bool

    def rows(self, state: Any, history: int) -> Rows:
        """Return the clean rows [history, raw_dim].  Raises: RequestError."""
        ...

    def actions(self, rows: Rows, state: Any, history: int) -> Rows:
        """Return commands [chunk, A] of model rows [history + chunk, >= raw_dim]."""
        ...


class JointPositions:
    """Absolute joint angles and the gripper, not scaled.

    >>> float(JointPositions().rows([0.0] * 7 + [1.0], 1)[0, -1])
    0.0
    """

    raw_dim, relative = ROW_DIM, False

    def rows(self, state: Any, history: int) -> Rows:
        return state_rows(state, history) if history else np.zeros((0, self.raw_dim), np.float32)

    def actions(self, rows: Rows, state: Any, history: int) -> Rows:
        return joint_actions(rows, history, self.raw_dim)


class PoseSteps:
    """Steps of the end effector from pose to pose, and the gripper.

    The state is [8] or [T, 8]: position in m, quaternion (x, y, z, w) and gripper, as commands are.
    normalizer: of the steps.
    """

    raw_dim, relative = POSE_ROW_DIM, True

    def __init__(self, normalizer: Normalizer | None = None) -> None:
        self.normalizer = normalizer

    def rows(self, state: Any, history: int) -> Rows:
        rows = eef_rows(_pose_state(state), max(history, 1), self.normalizer)
        return rows if history else rows[:0]  # of a state that is a pose, whatever is seen of it

    def actions(self, rows: Rows, state: Any, history: int) -> Rows:
        return eef_actions(rows, _pose_state(state), history, self.normalizer)


def _pose_state(state: Any) -> EefState:
    if state is None:
        raise RequestError(f"state must be sent; got none. Send {', '.join(POSE_NAMES)}.")
    rows = float_rows("state", state, len(POSE_NAMES))
    return EefState.of(rows[:, :3], rows[:, 3:7], rows[:, 7])


SPACES: Mapping[str, ActionSpace] = MappingProxyType(
    {
        "joint_position": JointPositions(),
        "pose_steps": PoseSteps(Normalizer.of("quantile", DROID_STATISTICS)),
    }
)
"""By the name in a robot's settings."""
