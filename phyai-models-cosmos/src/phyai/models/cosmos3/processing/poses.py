"""End-effector poses: 4 x 4 matrices, quaternions (x, y, z, w), and steps from pose to pose.

A step is nine numbers: the translation in the frame of the pose before, then the first two columns
of the rotation one after the other. All of it float64.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phyai.errors import RequestError

Array: TypeAlias = NDArray[Any]
STEP_DIM = 9
_TINY = 1e-8


def poses_of(position: Array, quaternion: Array) -> Array:
    """Return poses; positions [T, 3] in m, quaternions [T, 4] xyzw of any length -> [T, 4, 4].

    Raises: RequestError for a quaternion of length zero.
    """
    turn = np.asarray(quaternion, dtype=np.float64)
    length = np.linalg.norm(turn, axis=-1, keepdims=True)
    if (length < _TINY).any():
        raise RequestError(
            "eef_quat must have a length above zero; got zeros. Send (x, y, z, w) of a rotation."
        )
    x, y, z, w = np.moveaxis(turn / length, -1, 0)
    out = np.zeros((len(turn), 4, 4))
    out[:, 3, 3] = 1.0
    out[:, :3, 3] = position
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)),
        (2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)),
        (2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)),
    )
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            out[:, i, j] = value
    return out


def quaternions_of(rotation: Array) -> Array:
    """Return unit quaternions (x, y, z, w) of rotations [..., 3, 3], w >= 0 -> [..., 4]."""
    m = np.moveaxis(rotation, (-2, -1), (0, 1))
    trace = m[0, 0] + m[1, 1] + m[2, 2]
    squares = [*(1 + 2 * m[i, i] - trace for i in range(3)), 1 + trace]
    sums = [[m[i, j] + m[j, i] for j in range(3)] for i in range(3)]
    turns = [m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1]]
    # Four times the outer product of the quaternion with itself: every row is a multiple of it.
    rows = [[squares[i] if i == j else sums[i][j] for j in range(3)] + [turns[i]] for i in range(3)]
    table = np.stack([np.stack(row, axis=-1) for row in (*rows, [*turns, squares[3]])], axis=-2)
    # The row of the largest part loses the least.
    best = np.stack(squares, axis=-1).argmax(axis=-1)
    quaternion = np.take_along_axis(table, best[..., None, None], axis=-2)[..., 0, :]
    quaternion = quaternion / np.linalg.norm(quaternion, axis=-1, keepdims=True)
    out: Array = np.where(quaternion[..., 3:] < 0, -quaternion, quaternion)
    return out


def columns_of(rotation: Array) -> Array:
    """Return the first two columns, one after the other; [..., 3, 3] -> [..., 6]."""
    return np.concatenate([rotation[..., :, 0], rotation[..., :, 1]], axis=-1)


def steps_between(poses: Array) -> Array:
    """Return the step into every pose but the first; [T, 4, 4] -> [T - 1, 9]."""
    before, after = poses[:-1], poses[1:]
    back = np.swapaxes(before[:, :3, :3], -1, -2)
    moved = (back @ (after[:, :3, 3] - before[:, :3, 3])[..., None])[..., 0]
    return np.concatenate([moved, columns_of(back @ after[:, :3, :3])], axis=-1)


def walk(first: Array, steps: Array) -> Array:
    """Return the poses that steps lead through from ``first``; [T, 9] -> [T, 4, 4].

    Predicted columns need not be orthogonal: the nearest rotation counts, so that errors do not
    grow from pose to pose.
    """
    out, pose = np.empty((len(steps), 4, 4)), np.asarray(first, dtype=np.float64)
    for k, step in enumerate(np.asarray(steps, dtype=np.float64)):
        move = np.eye(4)
        move[:3, 3] = step[:3]
        move[:3, :3] = _rotation(step[3:6], step[6:9])
        pose = pose @ move
        out[k] = pose
    return out


def _rotation(first: Array, second: Array) -> Array:
    """Return the rotation nearest to (first, second, first x second)."""
    left, _, right = np.linalg.svd(np.stack([first, second, np.cross(first, second)], axis=-1))
    if np.linalg.det(left @ right) < 0:
        left[:, -1] *= -1
    rotation: Array = left @ right
    return rotation
