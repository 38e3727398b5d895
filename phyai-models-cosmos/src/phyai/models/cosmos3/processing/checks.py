"""Checks of numbers and arrays that clients send."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from phyai.adapter import is_integer
from phyai.errors import RequestError
from phyai.request_values import host_tensor

MIN_FPS, MAX_FPS = 0.01, 1000.0  # what a video file can say


def check_integer(name: str, value: Any, least: int = 1, most: int = 100_000) -> int:
    """Return an integer in [least, most].  Raises: RequestError.

    >>> check_integer("chunk", 32)
    32
    """
    if not is_integer(value):
        raise RequestError(f"{name} must be an integer; got {value!r}. Send a whole number.")
    if not least <= value <= most:
        near = f"{least} or more" if value < least else f"{most} or less"
        raise RequestError(f"{name} must be in [{least}, {most}]; got {value}. Take {near}.")
    return int(value)


def check_number(name: str, value: Any, above: float, most: float) -> float:
    """Return a finite number in (above, most].  Raises: RequestError."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise RequestError(f"{name} must be a number; got {value!r}. Send one.")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not above < number <= most:  # also NaN
        near = f"{most:g} or less" if number > most else f"more than {above:g}"
        raise RequestError(f"{name} must be in ({above:g}, {most:g}]; got {value}. Take {near}.")
    return number


def check_flag(name: str, value: Any) -> bool:
    """Return a truth value.  Raises: RequestError for anything else, also for texts."""
    if not isinstance(value, (bool, np.bool_)):
        raise RequestError(f"{name} must be true or false; got {value!r}. Send one of them.")
    return bool(value)


def check_fps(value: Any) -> float:
    """Return a frame rate in frames per second.  Raises: RequestError."""
    rate = check_number("fps", value, 0.0, MAX_FPS)
    if rate < MIN_FPS:
        raise RequestError(
            f"fps must be in [{MIN_FPS:g}, {MAX_FPS:g}]; got {value}. Take {MIN_FPS:g} or more."
        )
    return rate


def array_of(name: str, value: Any) -> NDArray[Any]:
    """Return what a caller calls an array, sharing no memory with it.

    Raises: RequestError.
    """
    if isinstance(value, Tensor):
        tensor = host_tensor(name, value)
        value = (tensor.float() if tensor.is_floating_point() else tensor).numpy(force=True)
    try:
        return np.array(value)
    except Exception as error:  # anything an array-like's own conversion raises
        raise RequestError(
            f"{name} must be an array of one shape; got {type(value).__name__} ({error}). "
            "Convert it."
        ) from error


def float_rows(name: str, value: Any, width: int | None) -> NDArray[np.float32]:
    """Return finite float32 rows [T, width]; one row may come without its first axis.

    width: None = any.  Raises: RequestError.
    """
    array = array_of(name, value)
    if array.dtype.kind not in "fiu":
        raise RequestError(f"{name} must be numbers; got dtype {array.dtype}. Send floats.")
    shape = list(array.shape)
    rows = array[None] if array.ndim == 1 else array
    if rows.ndim != 2 or rows.size == 0 or (width is not None and rows.shape[1] != width):
        wanted = "D" if width is None else width
        raise RequestError(
            f"{name} must have shape [{wanted}] or [T, {wanted}]; got {shape}. "
            "Send what the checkpoint was trained on."
        )
    with np.errstate(over="ignore"):  # an overflow is infinite, which is refused below
        out = rows.astype(np.float32)
    if not np.isfinite(out).all():
        raise RequestError(
            f"{name} must be finite; got NaN or infinity. Check the robot's sensors."
        )
    return out
