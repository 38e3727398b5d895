"""From camera frames to what the towers' first layers see."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from phyai.errors import CheckpointError, RequestError
from phyai.json_files import read_json_object
from phyai.models.minicpm import frames
from phyai.models.minicpm.frames import MAX_SIDE, Pixels

Channels: TypeAlias = tuple[float, float, float]

PREPROCESSOR_FILE = "preprocessor_config.json"


def resize(frame: Pixels, side: int = 384) -> Pixels:
    """Return the frame as a square, with Pillow's bicubic filter; one of that size as it is.

    Shapes: frame uint8 RGB [height, width, 3] -> uint8 [side, side, 3].
    Raises: RequestError for anything but such a frame.
    """
    shape: tuple[int, ...] = getattr(frame, "shape", ())
    fits = len(shape) == 3 and shape[2] == 3 and min(shape[:2]) >= 1 and max(shape[:2]) <= MAX_SIDE
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or not fits:
        got = f"{getattr(frame, 'dtype', type(frame).__name__)} {list(shape)}"
        raise RequestError(
            f"frame must be uint8 [height, width, 3], sides 1 to {MAX_SIDE}; got {got}. "
            "Send RGB frames as the camera gives them."
        )
    return frames.resize(frame, (side, side))


@dataclass(frozen=True, slots=True)
class PixelScale:
    """(value * factor - mean) / std per channel, of RGB values 0..255.

    >>> half = PixelScale((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    >>> half.apply(torch.tensor([0.0, 255.0]).expand(1, 3, 1, 2))[0, 0].round(decimals=4).tolist()
    [[-1.0, 1.0]]
    """

    mean: Channels
    std: Channels
    factor: float = 1 / 255

    @classmethod
    def from_folder(cls, folder: Path, default: PixelScale) -> PixelScale:
        """Return what ``preprocessor_config.json`` says, ``default`` for what it does not say.

        Raises: CheckpointError for a file that is damaged or asks for more than a scale.
        """
        path = folder / PREPROCESSOR_FILE
        if not path.is_file():
            return default
        data = read_json_object(path)
        if data.get("do_center_crop"):
            raise CheckpointError(
                f"do_center_crop in {path} must be false: frames are not cropped; got "
                f"{data['do_center_crop']!r}. Use the tower's released folder."
            )
        mean, std, factor = default.mean, default.std, default.factor
        if _flag(data, "do_normalize", path):
            mean = _channels(data, "image_mean", mean, path)
            std = _channels(data, "image_std", std, path, positive=True)
        else:
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        if _flag(data, "do_rescale", path):
            factor = _number(data.get("rescale_factor", factor), "rescale_factor", path)
        else:
            factor = 1.0
        return cls(mean, std, factor)

    def table(self, device: torch.device) -> Tensor:
        """Return [2, 3, 1, 1] float32: what to multiply values with, and what to add then."""
        scale = [self.factor / s for s in self.std]
        shift = [-m / s for m, s in zip(self.mean, self.std, strict=True)]
        rows = torch.tensor([scale, shift], dtype=torch.float64)
        return rows.to(device, torch.float32)[:, :, None, None]

    def apply(self, frames: Tensor) -> Tensor:
        """Return the scaled frames, float32. Shapes: frames [F, 3, S, S], any dtype."""
        return scaled(frames.float(), self.table(frames.device))


def scaled(frames: Tensor, table: Tensor) -> Tensor:
    """Return float32 frames [F, 3, S, S] through a ``PixelScale.table``."""
    scale, shift = table
    return torch.addcmul(shift, frames, scale)


IMAGENET = PixelScale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Of DINOv3."""
HALF = PixelScale((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Of SigLIP: from -1 to 1."""


def _flag(data: Mapping[str, Any], name: str, path: Path) -> bool:
    value = data.get(name, True)
    if not isinstance(value, bool):
        raise _bad(name, path, "true or false", value)
    return value


def _channels(
    data: Mapping[str, Any], name: str, default: Channels, path: Path, *, positive: bool = False
) -> Channels:
    value = data.get(name, default)
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise _bad(name, path, "three numbers", value)
    red, green, blue = (_number(v, name, path, positive=positive) for v in value)
    return red, green, blue


def _number(value: Any, name: str, path: Path, *, positive: bool = True) -> float:
    sane = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not sane or (positive and value <= 0):
        raise _bad(name, path, "a positive number" if positive else "a finite number", value)
    return float(value)


def _bad(name: str, path: Path, rule: str, got: Any) -> CheckpointError:
    return CheckpointError(f"{name} in {path} must be {rule}; got {got!r}. Correct the file.")
