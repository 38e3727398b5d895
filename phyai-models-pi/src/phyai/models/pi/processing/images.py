"""Turns camera images into the network's input: letterboxed float32 CHW in [-1, 1].

Two official resizes exist and differ by up to 0.46 on noisy images, so the checkpoint's family
decides: ``lerobot`` interpolates floats without antialiasing, ``openpi`` uses PIL's antialiased
bilinear filter on uint8. Geometry is the same: keep the aspect ratio, pad with black.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from phyai.errors import RequestError
from phyai.request_values import host_tensor

Interpolation = Literal["lerobot", "openpi"]

INTERPOLATIONS: tuple[Interpolation, ...] = ("lerobot", "openpi")
MISSING_FILL = -1.0
_LEGACY_BORDER = -3.0
_RANGE_SLACK = 1e-5  # float images may overshoot [0, 1] by rounding


def letterbox(height: int, width: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return (resized height, resized width, top, left) of an image fitted into ``size``."""
    target_height, target_width = size
    ratio = max(width / target_width, height / target_height)
    new_height = max(int(height / ratio), 1)
    new_width = max(int(width / ratio), 1)
    return (
        new_height,
        new_width,
        (target_height - new_height) // 2,
        (target_width - new_width) // 2,
    )


def resize_with_pad_float(
    images: Tensor,
    size: tuple[int, int],
    *,
    pad: float = 0.0,
    value_range: tuple[float, float] = (0.0, 1.0),
) -> Tensor:
    """Return float images letterboxed to ``size`` without antialiasing.

    Shapes: images [..., 3, height, width] float32 in ``value_range`` -> [..., 3, *size].
    An image that already has ``size`` is returned as it is.
    Source: LeRobot 0.6.1 pi0 policy (torch bilinear, align_corners False, clamp).
    """
    height, width = images.shape[-2:]
    if (height, width) == tuple(size):
        return images
    new_height, new_width, top, left = letterbox(height, width, size)
    flat = images.reshape(-1, *images.shape[-3:])
    resized = functional.interpolate(
        flat, size=(new_height, new_width), mode="bilinear", align_corners=False
    ).clamp(*value_range)
    bottom, right = size[0] - new_height - top, size[1] - new_width - left
    padded = functional.pad(resized, (left, right, top, bottom), value=pad)
    return padded.reshape(*images.shape[:-2], *size)


def resize_with_pad_uint8(image: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return a uint8 image letterboxed to ``size`` with PIL's bilinear filter.

    Shapes: image [height, width, 3] -> [*size, 3]. An image of ``size`` is returned as it is.
    Source: openpi client image tools (antialiased when shrinking, rounded to uint8).
    """
    height, width = image.shape[:2]
    if (height, width) == tuple(size):
        return image
    new_height, new_width, top, left = letterbox(height, width, size)
    resized = Image.fromarray(np.ascontiguousarray(image)).resize(
        (new_width, new_height), resample=Image.Resampling.BILINEAR
    )
    canvas = np.zeros((*size, 3), dtype=np.uint8)
    canvas[top : top + new_height, left : left + new_width] = np.asarray(resized)
    return canvas


def float_to_uint8(image: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a [0, 1] float image as uint8, truncating 255 * x as openpi's robot inputs do."""
    return np.clip(255.0 * image, 0.0, 255.0).astype(np.uint8)


def _as_array(image: Any, camera: str) -> NDArray[Any]:
    if isinstance(image, Tensor):
        image = host_tensor(f"image of camera {camera!r}", image)
        return np.asarray(image.float() if image.is_floating_point() else image)
    try:
        array = np.asarray(image)
    except Exception as error:
        raise RequestError(
            f"image of camera {camera!r} must be an array; got {type(image).__name__}. "
            "Send a uint8 [height, width, 3] array."
        ) from error
    return array


def check_image(image: Any, camera: str, *, allow_uint8_chw: bool = False) -> NDArray[Any]:
    """Return the image as [height, width, 3], uint8 or float32 in [0, 1].

    image: uint8 [height, width, 3], or float in [0, 1] of that shape or [3, height, width].
    Raises: RequestError naming the camera for any other rank, channel count, dtype or range,
    and for empty images and non-finite values.
    """
    array = _as_array(image, camera)
    floating = array.dtype.kind == "f"
    if array.dtype != np.uint8 and not floating:
        raise RequestError(
            f"image of camera {camera!r} must be uint8, or float32 in [0, 1]; got dtype "
            f"{array.dtype}. Convert it."
        )
    if array.ndim == 3 and array.shape[-1] != 3 and array.shape[0] == 3:
        if not floating and not allow_uint8_chw:
            raise RequestError(
                f"image of camera {camera!r} must be [height, width, 3] when it is uint8; got "
                f"{list(array.shape)}. Move the channel axis to the end."
            )
        array = np.moveaxis(array, 0, -1)
    if array.ndim != 3 or array.shape[-1] != 3:
        raise RequestError(
            f"image of camera {camera!r} must be RGB [height, width, 3]; got shape "
            f"{list(array.shape)}. Send one RGB image without alpha or batch axis."
        )
    if array.size == 0:
        raise RequestError(
            f"image of camera {camera!r} must not be empty; got shape {list(array.shape)}. "
            "Check the camera."
        )
    if not floating:
        return array
    with np.errstate(over="ignore"):  # an overflow is infinite, which is refused below
        array = array.astype(np.float32, copy=False)
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
    return array


def model_image(
    image: NDArray[Any],
    size: tuple[int, int],
    interpolation: Interpolation,
    *,
    legacy_padding: bool = False,
) -> Tensor:
    """Return the network input of one checked image.

    Shapes: image [height, width, 3] uint8 or float32 in [0, 1] -> float32 [3, *size] in [-1, 1].
    legacy_padding: the border becomes -3 instead of -1, which LeRobot 0.4 trained with on
    images that are not square (it padded with -1 before the final 2x - 1).
    """
    if interpolation == "openpi":
        pixels = image if image.dtype == np.uint8 else float_to_uint8(image)
        resized = resize_with_pad_uint8(pixels, size)
        hwc = resized.astype(np.float32) / np.float32(255.0) * np.float32(2.0) - np.float32(1.0)
        scaled = torch.from_numpy(np.ascontiguousarray(np.moveaxis(hwc, -1, 0)))
    else:
        chw = torch.from_numpy(np.ascontiguousarray(np.moveaxis(image, -1, 0)))
        unit = chw.float() / 255.0 if chw.dtype == torch.uint8 else chw
        scaled = resize_with_pad_float(unit, size) * 2.0 - 1.0
    if legacy_padding:
        scaled = _legacy_border(scaled, image.shape[0], image.shape[1])
    return scaled


def _legacy_border(scaled: Tensor, height: int, width: int) -> Tensor:
    size = (int(scaled.shape[-2]), int(scaled.shape[-1]))
    if (height, width) == size:
        return scaled
    new_height, new_width, top, left = letterbox(height, width, size)
    out = torch.full_like(scaled, _LEGACY_BORDER)
    inside = (slice(None), slice(top, top + new_height), slice(left, left + new_width))
    out[inside] = scaled[inside]
    return out


def missing_image(size: tuple[int, int]) -> Tensor:
    """Return the black stand-in of a camera that was not sent: float32 [3, *size], all -1."""
    return torch.full((3, *size), MISSING_FILL, dtype=torch.float32)
