"""Turns camera frames into patch rows the way the checkpoint's image processor does.

A frame is first resized to a square with Pillow's bicubic filter, without keeping its aspect
ratio; the image processor then makes views of it (``slicing``) and scales its levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phyai.errors import RequestError
from phyai.models.minicpm_robot.processing.settings import ImageSettings
from phyai.request_values import host_tensor

Pixels: TypeAlias = NDArray[np.uint8]
Size: TypeAlias = tuple[int, int]
Grid: TypeAlias = tuple[int, int]

CHANNELS = 3
MAX_SIDE = 8192
_RANGE_SLACK = 1e-5  # float images may overshoot [0, 1] by rounding


def camera_frame(camera: str, value: Any) -> Pixels:
    """Return one frame as uint8 [height, width, 3], sharing no memory with the caller.

    value: uint8 [height, width, 3], or float in [0, 1] of that shape or [3, height, width].
    Raises: RequestError naming the camera.
    """
    array = _array(camera, value)
    floating = array.dtype.kind == "f"
    if array.dtype != np.uint8 and not floating:
        raise RequestError(
            f"image of camera {camera!r} must be uint8, or float in [0, 1]; got dtype "
            f"{array.dtype}. Convert it."
        )
    if array.ndim != 3:
        raise RequestError(
            f"image of camera {camera!r} must be [height, width, 3]; got shape "
            f"{list(array.shape)}. Send one RGB frame."
        )
    if floating and array.shape[-1] != CHANNELS and array.shape[0] == CHANNELS:
        array = np.moveaxis(array, 0, -1)
    if array.shape[-1] != CHANNELS:
        raise RequestError(
            f"image of camera {camera!r} must be RGB with channels last, [height, width, 3]; got "
            f"shape {list(array.shape)}. Convert it, and drop alpha."
        )
    height, width = array.shape[:2]
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise RequestError(
            f"image of camera {camera!r} must have sides in [1, {MAX_SIDE}]; got {height} x "
            f"{width}. Check the camera."
        )
    return np.ascontiguousarray(_levels(camera, array) if floating else array)


def resize(image: Pixels, size: Size) -> Pixels:
    """Return the image resized with Pillow's bicubic filter; one of ``size`` as it is.

    size: (height, width).
    """
    if image.shape[:2] == size:
        return image
    from PIL import Image  # here: a server that only loads checkpoints needs no image library

    height, width = size
    resized = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized, dtype=np.uint8)


def patch_rows(images: Sequence[Pixels], settings: ImageSettings) -> tuple[Tensor, list[Grid]]:
    """Return the patches of images, one after the other, and each one's grid in patches.

    Shapes: images uint8 [height, width, 3], sides whole patches -> float32 [P, 3 * patch * patch],
        values in (channel, row, column) order; the patches of an image row by row.
    """
    side = settings.patch_size
    grids = [(image.shape[0] // side, image.shape[1] // side) for image in images]
    total = sum(rows * columns for rows, columns in grids)
    levels = np.empty((total, CHANNELS, side, side), dtype=np.uint8)
    at = 0
    for image, (rows, columns) in zip(images, grids, strict=True):
        cut = image.reshape(rows, side, columns, side, CHANNELS).transpose(0, 2, 4, 1, 3)
        levels[at : at + rows * columns] = cut.reshape(-1, CHANNELS, side, side)
        at += rows * columns
    scale, shift = settings.affine()
    values = torch.from_numpy(levels).float().view(total, CHANNELS, side * side)
    return torch.addcmul(shift[:, None], values, scale[:, None]).view(total, -1), grids


def strip(rows: Tensor) -> Tensor:
    """Return the official layout of patch rows: patches side by side in one image.

    Shapes: [P, 3 * patch * patch] -> [1, 3, patch, patch * P].

    >>> strip(torch.zeros(6, 588)).shape
    torch.Size([1, 3, 14, 84])
    """
    side = round((rows.shape[1] // CHANNELS) ** 0.5)
    cut = rows.view(-1, CHANNELS, side, side)
    return cut.permute(1, 2, 0, 3).reshape(1, CHANNELS, side, -1)


def rows_of_strip(values: Tensor, patch: int = 14) -> Tensor:
    """Return the patch rows of the official layout; inverse of ``strip``.

    Shapes: [1, 3, patch, patch * P] -> [P, 3 * patch * patch].
    Raises: RequestError for another shape.

    >>> rows_of_strip(torch.zeros(1, 3, 14, 84)).shape
    torch.Size([6, 588])
    """
    shape = list(values.shape)
    if len(shape) != 4 or shape[:3] != [1, CHANNELS, patch] or shape[3] % patch or not shape[3]:
        raise RequestError(
            f"pixel_values must be [1, {CHANNELS}, {patch}, {patch} * patches]; got {shape}. "
            "Send the image processor's output."
        )
    cut = values.view(CHANNELS, patch, shape[3] // patch, patch)
    return cut.permute(2, 0, 1, 3).reshape(shape[3] // patch, -1)


def _levels(camera: str, array: NDArray[Any]) -> Pixels:
    """Return float images in [0, 1] as the nearest levels of uint8."""
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


def _array(camera: str, value: Any) -> NDArray[Any]:
    """Return what a caller calls an image as an array of its own."""
    if isinstance(value, Tensor):
        tensor = host_tensor(f"image of camera {camera!r}", value)
        value = (tensor.float() if tensor.is_floating_point() else tensor).numpy(force=True)
    try:
        return np.array(value)
    except Exception as error:  # anything an array-like's own conversion raises
        raise RequestError(
            f"image of camera {camera!r} must be an array of one shape; got "
            f"{type(value).__name__} ({error}). Convert it."
        ) from error
