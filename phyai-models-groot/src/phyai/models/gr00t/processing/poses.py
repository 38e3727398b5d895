"""End-effector poses as rows of numbers, and the homogeneous matrices they stand for, float64.

Formats: ``XYZ_ROT6D`` (9: position, then the first two rows of the rotation), ``XYZ_ROTVEC``
(6: position, then axis times angle in rad), ``DEFAULT`` (16: the 4 x 4 matrix by rows).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

WIDTHS = {"XYZ_ROT6D": 9, "XYZ_ROTVEC": 6, "DEFAULT": 16}
_TINY = 1e-12


def to_matrix(poses: Array, form: str) -> Array:
    """Return homogeneous matrices; poses [..., width of the format] -> [..., 4, 4]."""
    poses = np.asarray(poses, dtype=np.float64)
    if form == "DEFAULT":
        return poses.reshape(*poses.shape[:-1], 4, 4)
    out = np.zeros((*poses.shape[:-1], 4, 4))
    out[..., 3, 3] = 1.0
    out[..., :3, 3] = poses[..., :3]
    turn = _from_rows if form == "XYZ_ROT6D" else _from_rotvec
    out[..., :3, :3] = turn(poses[..., 3:])
    return out


def from_matrix(matrices: Array, form: str) -> Array:
    """Return poses of a format; matrices [..., 4, 4] -> [..., width of the format]."""
    if form == "DEFAULT":
        return matrices.reshape(*matrices.shape[:-2], 16)
    position, rotation = matrices[..., :3, 3], matrices[..., :3, :3]
    if form == "XYZ_ROT6D":
        turn = rotation[..., :2, :].reshape(*rotation.shape[:-2], 6)
    else:
        turn = _to_rotvec(rotation)
    return np.concatenate([position, turn], axis=-1)


def inverse(matrices: Array) -> Array:
    """Return the inverses of homogeneous matrices [..., 4, 4] with orthogonal rotations."""
    out = np.zeros_like(matrices)
    turned = np.swapaxes(matrices[..., :3, :3], -1, -2)
    out[..., :3, :3] = turned
    out[..., :3, 3] = -(turned @ matrices[..., :3, 3, None])[..., 0]
    out[..., 3, 3] = 1.0
    return out


def _from_rows(rows: Array) -> Array:
    """Return rotations of two rows that need not be orthogonal: the first one's direction wins."""
    first = rows[..., :3] / _length(rows[..., :3])
    second = rows[..., 3:]
    second = second - (first * second).sum(axis=-1, keepdims=True) * first
    second = second / _length(second)
    return np.stack([first, second, np.cross(first, second)], axis=-2)


def _length(vectors: Array) -> Array:
    # A network may predict a null vector: no direction is right then, but NaN would be worse.
    length: Array = np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), _TINY)
    return length


def _from_rotvec(vectors: Array) -> Array:
    """Return exp of the cross-product matrices, through quaternions, exact for small angles."""
    angle = np.linalg.norm(vectors, axis=-1, keepdims=True)
    # sin(a/2) / a without dividing by zero: np.sinc(x) is sin(pi x) / (pi x).
    x, y, z = np.moveaxis(vectors * (0.5 * np.sinc(angle / (2 * np.pi))), -1, 0)
    w = np.cos(angle[..., 0] / 2)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def _to_rotvec(rotation: Array) -> Array:
    """Return axis times angle in [0, pi], through the quaternion whose largest part is known best.

    The four candidates are the same quaternion times one of its parts each.
    """
    r = np.moveaxis(rotation, (-2, -1), (0, 1))
    trace = r[0, 0] + r[1, 1] + r[2, 2]
    wx, wy, wz = r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]
    xy, xz, yz = r[0, 1] + r[1, 0], r[0, 2] + r[2, 0], r[1, 2] + r[2, 1]
    squares = [1 + 2 * r[i, i] - trace for i in range(3)]
    candidates = np.stack(
        [
            np.stack([1 + trace, wx, wy, wz], axis=-1),
            np.stack([wx, squares[0], xy, xz], axis=-1),
            np.stack([wy, xy, squares[1], yz], axis=-1),
            np.stack([wz, xz, yz, squares[2]], axis=-1),
        ],
        axis=-2,
    )
    best = np.stack([1 + trace, *squares], axis=-1).argmax(axis=-1)
    quaternion = np.take_along_axis(candidates, best[..., None, None], axis=-2)[..., 0, :]
    quaternion = quaternion / _length(quaternion)
    quaternion = np.where(quaternion[..., :1] < 0, -quaternion, quaternion)
    sine = np.linalg.norm(quaternion[..., 1:], axis=-1, keepdims=True)
    half = np.arctan2(sine, quaternion[..., :1])
    # half / sin(half) without dividing by zero.
    turn: Array = quaternion[..., 1:] * (2.0 / np.sinc(half / np.pi))
    return turn
