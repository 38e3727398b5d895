"""Camera frames of any array type as uint8 pixels, and their resizing."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from phyai.errors import RequestError
from phyai.request_values import host_tensor

Pixels: TypeAlias = NDArray[np.uint8]

MAX_SIDE = 8192
_RANGE_SLACK = 1e-5  # float images may overshoot [0, 1] by rounding


def frame_array(camera: str, value: Any) -> NDArray[Any]:
    """Return what a caller calls an image as an array of its own, uint8 or floating.

    Raises: RequestError naming the camera.
    """
    name = f"image of camera {camera!r}"
    if isinstance(value, Tensor):
        tensor = host_tensor(name, value)
        value = (tensor.float() if tensor.is_floating_point() else tensor).numpy(force=True)
    try:
        array = np.array(value)
    except Exception as error:  # anything an array-like's own conversion raises
        raise RequestError(
            f"{name} must be an array of one shape; got {type(value).__name__} ({error}). "
            "Convert it."
        ) from error
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise RequestError(
            f"{name} must be uint8, or float in [0, 1]; got dtype {array.dtype}. Convert it."
        )
    return array


def frame_levels(camera: str, array: NDArray[Any]) -> Pixels:
    """Return a float image in [0, 1] as the nearest levels of uint8; one of uint8 as it is.

    Raises: RequestError naming the camera.
    """
    if array.dtype == np.uint8:
        return array
    low, high = float(array.min()), float(array.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise RequestError(
            f"image of camera {camera!r} must be finite; got NaN or infinity. Check the camera."
        )
    if low < -_RANGE_SLACK or high > 1.0 + _RANGE_SLACK:
        raise RequestError(
            f"float image of camera {camera!r} must lie in [0, 1]; got [{low:g}, {high:g}]. "
            "Send uint8, or divide by 255."
        )
    levels = np.rint(np.clip(array, 0.0, 1.0).astype(np.float64) * 255.0)
    return np.asarray(levels, dtype=np.uint8)


def resize(image: Pixels, size: tuple[int, int]) -> Pixels:
    """Return the image resized with Pillow's bicubic filter; one of ``size`` as it is.

    Shapes: uint8 [height, width, 3] -> uint8 [*size, 3]; size: (height, width).
    """
    if image.shape[:2] == size:
        return image
    from PIL import Image  # here: a server that only loads checkpoints needs no image library

    height, width = size
    whole = Image.fromarray(np.ascontiguousarray(image))
    resized = whole.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized, dtype=np.uint8)
