"""Turns camera frames into the pixels the checkpoint was trained on: uint8 in, uint8 out.

Two official recipes exist and differ by a level or more almost everywhere, so the checkpoint's
``use_albumentations`` decides: OpenCV's area filter with a crop by share, or torchvision's
antialiased bilinear filter with a crop by pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from phyai.errors import CheckpointError, RequestError

Pixels: TypeAlias = NDArray[np.uint8]
Size: TypeAlias = tuple[int, int]

MAX_SIDE = 8192
MAX_ASPECT = 200
"""The backbone's own limit: longer strips would have no second row of patches."""
_MAX_TARGET = 4096


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """How frames of any size become model images; sizes are (height, width).

    area: the OpenCV recipe.  letterbox: first pad to a square with black.
    short_side: resize the shorter side to it and keep the aspect ratio; None = exactly ``target``.
    crop_fraction: share of both sides that the centre crop keeps.
    crop: pixels that the torchvision recipe's centre crop keeps.

    >>> recipe = ImageRecipe(area=True, short_side=256, crop_fraction=0.95)
    >>> recipe.apply(np.zeros((480, 640, 3), np.uint8)).shape
    (256, 340, 3)
    """

    area: bool = True
    letterbox: bool = False
    short_side: int | None = 256
    target: Size | None = None
    crop_fraction: float | None = 0.95
    crop: Size | None = None

    def __post_init__(self) -> None:
        if self.area and self.short_side is None and self.target is None:
            raise CheckpointError(
                "image settings must have shortest_image_edge or image_target_size; got neither. "
                "Correct processor_config.json."
            )
        if self.area and not 0.0 < (self.crop_fraction or 0.0) <= 1.0:
            raise CheckpointError(
                "image settings must keep a share in (0, 1]: crop_fraction, or image_crop_size "
                f"over image_target_size; got {self.crop_fraction}. Correct processor_config.json."
            )
        if not self.area and (self.target is None or self.crop is None):
            raise CheckpointError(
                "image settings without use_albumentations must have image_target_size and "
                f"image_crop_size; got {self.target} and {self.crop}. "
                "Correct processor_config.json."
            )

    @classmethod
    def from_settings(cls, data: Mapping[str, Any]) -> ImageRecipe:
        """Return the recipe of ``processor_kwargs``; a stored null counts, an absent key does not.

        Raises: CheckpointError.
        """
        target = _size(data, "image_target_size")
        crop = _size(data, "image_crop_size")
        share = _number(data, "crop_fraction", 0.95)
        if share is None and target is not None and crop is not None:
            share = crop[0] / target[0]
        short = data.get("shortest_image_edge", 256)
        if short is not None and not _is_side(short):
            raise _bad("shortest_image_edge", f"an integer in [1, {_MAX_TARGET}] or null", short)
        return cls(
            area=_flag(data, "use_albumentations"),
            letterbox=_flag(data, "letter_box_transform"),
            short_side=short,
            target=target,
            crop_fraction=share,
            crop=crop,
        )

    def apply(self, image: Pixels) -> Pixels:
        """Return the model image of one frame.

        Shapes: image uint8 [height, width, 3] -> uint8 [height', width', 3].
        Raises: RequestError for a frame so small or narrow that nothing of it would be left.
        """
        if self.letterbox:
            image = letterbox(image)
        if not self.area:
            assert self.target is not None
            assert self.crop is not None
            image = centre_crop(resize_bilinear(image, self.target), self.crop, rounded=True)
            return np.ascontiguousarray(resize_bilinear(image, self.target))
        image = self._resize(image)
        assert self.crop_fraction is not None
        height, width = image.shape[:2]
        kept = int(height * self.crop_fraction), int(width * self.crop_fraction)
        if min(kept) < 1:
            raise RequestError(
                "image must leave pixels to crop to; got "
                f"{height} x {width} after resizing. Send a larger one."
            )
        return np.ascontiguousarray(self._resize(centre_crop(image, kept)))

    def _resize(self, image: Pixels) -> Pixels:
        if self.short_side is None:
            assert self.target is not None
            return resize_area(image, self.target)
        height, width = image.shape[:2]
        scale = self.short_side / min(height, width)
        # Rounded half to even, as Python and the official resize do.
        return resize_area(image, (round(height * scale), round(width * scale)))


# ---------------------------------------------------------------- steps


def letterbox(image: Pixels) -> Pixels:
    """Return the image in the middle of a black square as large as its longer side."""
    height, width = image.shape[:2]
    if height == width:
        return image
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    square = np.zeros((side, side, image.shape[2]), dtype=np.uint8)
    square[top : top + height, left : left + width] = image
    return square


def centre_crop(image: Pixels, size: Size, *, rounded: bool = False) -> Pixels:
    """Return the middle of the image, padded with black where ``size`` is larger.

    rounded: an odd rest is halved as torchvision does, half to even, instead of down.
    """
    height, width = image.shape[:2]
    if size[0] > height or size[1] > width:
        padded = np.zeros((max(size[0], height), max(size[1], width), 3), dtype=np.uint8)
        top, left = (padded.shape[0] - height) // 2, (padded.shape[1] - width) // 2
        padded[top : top + height, left : left + width] = image
        image, (height, width) = padded, padded.shape[:2]
    rest = height - size[0], width - size[1]
    top, left = (round(n / 2) if rounded else n // 2 for n in rest)
    return image[top : top + size[0], left : left + size[1]]


def resize_area(image: Pixels, size: Size) -> Pixels:
    """Return the image resized with OpenCV's area filter; one of ``size`` as it is."""
    if image.shape[:2] == size:
        return image
    import cv2  # here: a server that only loads checkpoints needs no image library

    height, width = size
    return np.asarray(
        cv2.resize(np.ascontiguousarray(image), (width, height), interpolation=cv2.INTER_AREA),
        dtype=np.uint8,
    )


def resize_bilinear(image: Pixels, size: Size) -> Pixels:
    """Return the image resized with torch's antialiased bilinear filter on uint8."""
    if image.shape[:2] == size:
        return image
    # A copy: torch takes no negative strides, and no memory the caller may write to meanwhile.
    chw = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    resized = functional.interpolate(
        chw, size=size, mode="bilinear", align_corners=False, antialias=True
    )
    return np.asarray(resized[0].permute(1, 2, 0).numpy(), dtype=np.uint8)


# ---------------------------------------------------------------- settings


def _is_side(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_TARGET


def _size(data: Mapping[str, Any], name: str) -> Size | None:
    value = data.get(name)
    if value is None:
        return None
    sides = [value, value] if _is_side(value) else value
    if not isinstance(sides, (list, tuple)) or len(sides) != 2 or not all(map(_is_side, sides)):
        raise _bad(name, f"two integers in [1, {_MAX_TARGET}] or null", value)
    return int(sides[0]), int(sides[1])


def _number(data: Mapping[str, Any], name: str, default: float) -> float | None:
    value = data.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _bad(name, "a number or null", value)
    return float(value)


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name, False)
    if not isinstance(value, bool):
        raise _bad(name, "true or false", value)
    return value


def _bad(name: str, rule: str, got: Any) -> CheckpointError:
    return CheckpointError(f"{name} must be {rule}; got {got!r}. Correct processor_config.json.")
