"""Camera frames and clips of any array type as uint8 pixels."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phyai.errors import RequestError
from phyai.models.cosmos3.processing.checks import array_of

Pixels: TypeAlias = NDArray[np.uint8]

MAX_SIDE = 8192
MAX_CLIP_BYTES = 2 << 30
_RANGE_SLACK = 1e-5  # float images may overshoot [0, 1] by rounding


def frame_of(name: str, value: Any) -> Pixels:
    """Return one frame as uint8 [height, width, 3], sharing no memory with the caller.

    value: uint8 [height, width, 3], or float in [0, 1] of that shape or [3, height, width].
    Raises: RequestError naming the image.
    """
    return _pixels(name, array_of(name, value), clip=False)


def clip_of(name: str, value: Any) -> Pixels:
    """Return a clip as uint8 [T, height, width, 3], sharing no memory with the caller.

    value: uint8 [T, height, width, 3], or float in [0, 1] of that shape or
        [T, 3, height, width]; or a list of such frames.
    Raises: RequestError naming the clip.
    """
    return _pixels(name, array_of(name, value), clip=True)


def to_signed(pixels: Pixels) -> Tensor:
    """Return levels 0..255 as float32 in [-1, 1], channels first.

    Shapes: [T, height, width, 3] -> [3, T, height, width].

    >>> to_signed(np.full((1, 2, 2, 3), 255, np.uint8)).shape
    torch.Size([3, 1, 2, 2])
    """
    levels = torch.from_numpy(np.ascontiguousarray(pixels)).permute(3, 0, 1, 2)
    return levels.to(torch.float32).div_(127.5).sub_(1.0).contiguous()


def _pixels(name: str, array: NDArray[Any], *, clip: bool) -> Pixels:
    floating = array.dtype.kind == "f"
    if array.dtype != np.uint8 and not floating:
        raise RequestError(
            f"{name} must be uint8, or float in [0, 1]; got dtype {array.dtype}. Convert it."
        )
    shape = list(array.shape)
    wanted = "[T, height, width, 3]" if clip else "[height, width, 3]"
    if array.ndim != (4 if clip else 3):
        raise RequestError(f"{name} must be {wanted}; got shape {shape}. Send RGB frames.")
    if floating and array.shape[-1] != 3 and array.shape[-3] == 3:
        array = np.moveaxis(array, -3, -1)
    if array.shape[-1] != 3:
        raise RequestError(
            f"{name} must be RGB with channels last, {wanted}; got shape {shape}. Convert it, and "
            "drop alpha."
        )
    height, width = array.shape[-3:-1]
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE) or array.shape[0] < 1:
        raise RequestError(
            f"{name} must have frames with sides in [1, {MAX_SIDE}]; got shape {shape}. "
            "Check the camera."
        )
    if array.size > MAX_CLIP_BYTES:
        raise RequestError(
            f"{name} must hold at most {MAX_CLIP_BYTES >> 20} MiB of pixels; got shape {shape}. "
            "Send fewer or smaller frames."
        )
    return np.ascontiguousarray(_levels(name, array) if floating else array)


def _levels(name: str, array: NDArray[Any]) -> Pixels:
    """Return float pixels in [0, 1] as the nearest levels of uint8."""
    low, high = float(array.min()), float(array.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise RequestError(f"{name} must be finite; got NaN or infinity. Check the camera.")
    if low < -_RANGE_SLACK or high > 1.0 + _RANGE_SLACK:
        raise RequestError(
            f"{name} in floats must lie in [0, 1]; got [{low:g}, {high:g}]. "
            "Send uint8, or divide by 255."
        )
    levels = np.rint(np.clip(array, 0.0, 1.0).astype(np.float64) * 255.0)
    return np.asarray(levels, dtype=np.uint8)
