"""Rotations in the forms that robots and the model use, as matrices and back; float64.

Six-number forms hold the first two columns of the matrix: ``interleaved`` row by row, ``columns``
one after the other. Euler angles turn about the fixed x, y and z axes in this order.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Rotation6D: TypeAlias = Literal["interleaved", "columns"]

TINY = 1e-8
"""Vectors shorter than this have no direction."""


def from_rotation6d(values: Array, form: Rotation6D) -> Array:
    """Return rotation matrices of six numbers that need not be orthogonal.

    Shapes: [..., 6] -> [..., 3, 3]; NaN where the numbers say no rotation.
    """
    values = np.asarray(values, dtype=np.float64)
    if form == "interleaved":
        first, second = values[..., 0::2], values[..., 1::2]
    else:
        first, second = values[..., :3], values[..., 3:]
    first = _unit(first)
    # Gram-Schmidt: the first column's direction wins.
    second = _unit(second - (first * second).sum(-1, keepdims=True) * first)
    return np.stack([first, second, np.cross(first, second)], axis=-1)


def to_rotation6d(matrices: Array, form: Rotation6D) -> Array:
    """Return the first two columns; [..., 3, 3] -> [..., 6]."""
    two = matrices[..., :, :2]
    if form == "columns":
        two = np.swapaxes(two, -1, -2)
    return np.ascontiguousarray(two).reshape(*matrices.shape[:-2], 6)


def from_quaternion(wxyz: Array) -> Array:
    """Return rotation matrices of quaternions of any length above zero; [..., 4] -> [..., 3, 3]."""
    w, x, y, z = np.moveaxis(_unit(np.asarray(wxyz, dtype=np.float64)), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def to_quaternion(matrices: Array) -> Array:
    """Return unit quaternions (w, x, y, z) with w >= 0; [..., 3, 3] -> [..., 4]."""
    m = np.moveaxis(matrices, (-2, -1), (0, 1))
    trace = m[0, 0] + m[1, 1] + m[2, 2]
    sums = [[m[i, j] + m[j, i] for j in range(3)] for i in range(3)]
    turns = [m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1]]
    squares = [1 + 2 * m[i, i] - trace for i in range(3)]
    # Four times the outer product of the quaternion with itself: every row is a multiple of it.
    table = np.stack(
        [
            np.stack([1 + trace, *turns], axis=-1),
            *(
                np.stack(
                    [turns[i], *(squares[i] if i == j else sums[i][j] for j in range(3))], axis=-1
                )
                for i in range(3)
            ),
        ],
        axis=-2,
    )
    diagonal = np.stack([1 + trace, *squares], axis=-1)
    # The row of the largest part loses the least.
    best = np.nan_to_num(diagonal, nan=0.0).argmax(axis=-1)
    quaternion = np.take_along_axis(table, best[..., None, None], axis=-2)[..., 0, :]
    quaternion = _unit(quaternion)
    return np.where(quaternion[..., :1] < 0, -quaternion, quaternion)


def from_euler(angles: Array) -> Array:
    """Return rotation matrices of (x, y, z) angles in rad; [..., 3] -> [..., 3, 3]."""
    a, b, c = np.moveaxis(np.asarray(angles, dtype=np.float64), -1, 0)
    (sa, sb, sc), (ca, cb, cc) = (tuple(f(t) for t in (a, b, c)) for f in (np.sin, np.cos))
    rows = [
        [cc * cb, cc * sb * sa - sc * ca, cc * sb * ca + sc * sa],
        [sc * cb, sc * sb * sa + cc * ca, sc * sb * ca - cc * sa],
        [-sb, cb * sa, cb * ca],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def to_euler(matrices: Array) -> Array:
    """Return (x, y, z) angles in rad, y in [-pi/2, pi/2]; [..., 3, 3] -> [..., 3].

    Straight up or down, where x and z turn about one axis, z is 0.
    """
    m = np.moveaxis(matrices, (-2, -1), (0, 1))
    level = np.hypot(m[0, 0], m[1, 0])
    steep = level < 1e-6
    x = np.where(steep, np.arctan2(-m[1, 2], m[1, 1]), np.arctan2(m[2, 1], m[2, 2]))
    z = np.where(steep, 0.0, np.arctan2(m[1, 0], m[0, 0]))
    return np.stack([x, np.arctan2(-m[2, 0], level), z], axis=-1)


def from_axis_angle(vectors: Array) -> Array:
    """Return rotation matrices of axis times angle in rad; [..., 3] -> [..., 3, 3]."""
    vectors = np.asarray(vectors, dtype=np.float64)
    angle = np.linalg.norm(vectors, axis=-1, keepdims=True)
    # sin(a/2) / a without dividing by zero: np.sinc(x) is sin(pi x) / (pi x).
    imaginary = vectors * (0.5 * np.sinc(angle / (2 * np.pi)))
    return from_quaternion(np.concatenate([np.cos(angle / 2), imaginary], axis=-1))


def to_axis_angle(matrices: Array) -> Array:
    """Return axis times angle in [0, pi] rad; [..., 3, 3] -> [..., 3]."""
    quaternion = to_quaternion(matrices)
    imaginary = quaternion[..., 1:]
    half = np.arctan2(np.linalg.norm(imaginary, axis=-1, keepdims=True), quaternion[..., :1])
    turn: Array = imaginary * (2.0 / np.sinc(half / np.pi))  # half / sin(half), also at 0
    return turn


def _unit(vectors: Array) -> Array:
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        unit: Array = vectors / np.where(length < TINY, np.nan, length)
    return unit
