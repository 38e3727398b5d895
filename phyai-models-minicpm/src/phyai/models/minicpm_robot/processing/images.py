"""Turns camera frames into patch rows the way the checkpoint's image processor does.

A frame is first resized to a square with Pillow's bicubic filter, without keeping its aspect
ratio; the image processor then makes views of it (``slicing``) and scales its levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from phyai.errors import RequestError
from phyai.models.minicpm.frames import MAX_SIDE, Pixels, frame_array, frame_levels
from phyai.models.minicpm_robot.processing.settings import ImageSettings

Size: TypeAlias = tuple[int, int]
Grid: TypeAlias = tuple[int, int]

CHANNELS = 3


def camera_frame(camera: str, value: Any) -> Pixels:
    """Return one frame as uint8 [height, width, 3], sharing no memory with the caller.

    value: uint8 [height, width, 3], or float in [0, 1] of that shape or [3, height, width].
    Raises: RequestError naming the camera.
    """
    array = frame_array(camera, value)
    if array.ndim != 3:
        raise RequestError(
            f"image of camera {camera!r} must be [height, width, 3]; got shape "
            f"{list(array.shape)}. Send one RGB frame."
        )
    floating = array.dtype.kind == "f"
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
    return np.ascontiguousarray(frame_levels(camera, array))


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
