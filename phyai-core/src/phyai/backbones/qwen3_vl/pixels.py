"""From camera images to patch rows: resize to whole merge blocks, scale, cut up. Host only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from phyai.backbones.qwen3_vl.positions import Grid
from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError, RequestError

FILE = "preprocessor_config.json"
BICUBIC = 3
MAX_RATIO = 200


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """Settings of the image processor, names as in ``preprocessor_config.json``.

    min_pixels, max_pixels: limits of an image's area after resizing.

    >>> from phyai.backbones.qwen3_vl import PixelSettings
    >>> PixelSettings.from_json({"size": {"shortest_edge": 1024, "longest_edge": 4096}}).max_pixels
    4096
    """

    min_pixels: int = 65536
    max_pixels: int = 16777216
    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    do_resize: bool = True

    def __post_init__(self) -> None:
        for name in ("min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"image processor's {name} must be a positive integer; got {value!r}. "
                    f"Correct {FILE}."
                )
        if self.max_pixels < max(self.min_pixels, self.block**2):
            raise ConfigError(
                f"image processor's max_pixels must hold one block of {self.block} x {self.block} "
                f"pixels and be at least min_pixels = {self.min_pixels}; got {self.max_pixels}. "
                f"Correct {FILE}."
            )
        for name in ("image_mean", "image_std"):
            values = getattr(self, name)
            numbers = all(isinstance(v, int | float) and math.isfinite(v) for v in values)
            if len(values) != 3 or not numbers or (name == "image_std" and min(values) <= 0):
                raise ConfigError(
                    f"image processor's {name} must be three numbers, deviations above zero; got "
                    f"{list(values)}. Correct {FILE}."
                )
        if not (math.isfinite(self.rescale_factor) and self.rescale_factor > 0):
            raise ConfigError(
                "image processor's rescale_factor must be positive; got "
                f"{self.rescale_factor!r}. Correct {FILE}."
            )

    @property
    def block(self) -> int:
        """Pixels per side of what becomes one image token."""
        return self.patch_size * self.merge_size

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PixelSettings:
        """Return the settings of a ``preprocessor_config.json``; unknown keys are left alone.

        Raises: ConfigError for values that cannot work, and for steps left out or of another kind.
        """
        known: dict[str, Any] = {}
        for name in ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor"):
            if data.get(name) is not None:
                known[name] = data[name]
        for name in ("image_mean", "image_std"):
            if isinstance(data.get(name), Sequence):
                known[name] = tuple(data[name])
        size = data.get("size") or {}
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            value = data.get(name) if data.get(name) is not None else size.get(edge)
            if value is not None:
                known[name] = value
        for step in ("do_rescale", "do_normalize"):
            if data.get(step) is False:
                raise ConfigError(
                    f"image processor's {step} must be true; got false. Such backbones are not "
                    "supported."
                )
        if data.get("resample", BICUBIC) not in (BICUBIC, None):
            raise ConfigError(
                f"image processor's resample must be {BICUBIC} (bicubic); got "
                f"{data['resample']!r}. Other filters are not supported."
            )
        return cls(do_resize=data.get("do_resize") is not False, **known)

    @classmethod
    def from_folder(cls, folder: str | Path) -> PixelSettings:
        """Return the settings in a folder's ``preprocessor_config.json``.

        Raises: CheckpointNotFound without the file, CheckpointError for a broken one.
        """
        path = Path(folder) / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointNotFound(
                f"folder must hold {FILE}; {str(folder)!r} has none. Pass the backbone's folder."
            ) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} must be a JSON file; got {error}. Fetch the file again."
            ) from error
        if not isinstance(data, dict):
            raise CheckpointError(
                f"{path} must hold a JSON object; got {type(data).__name__}. Fetch it again."
            )
        return cls.from_json(data)


def image_size(height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
    """Return the height and width an image is resized to: whole blocks, area within the limits.

    Raises: RequestError for an image that is over 200 times as long as wide.

    >>> from phyai.backbones.qwen3_vl import PixelSettings, image_size
    >>> image_size(256, 340, PixelSettings())
    (256, 352)
    """
    block = settings.block
    if max(height, width) > MAX_RATIO * min(height, width):
        raise RequestError(
            f"image must be at most {MAX_RATIO} times as long as wide; got {height} x {width}. "
            "Check the camera."
        )
    high, wide = round(height / block) * block, round(width / block) * block
    if high * wide > settings.max_pixels:
        shrink = math.sqrt(height * width / settings.max_pixels)
        high = max(block, math.floor(height / shrink / block) * block)
        wide = max(block, math.floor(width / shrink / block) * block)
    elif high * wide < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (height * width))
        high = math.ceil(height * grow / block) * block
        wide = math.ceil(width * grow / block) * block
    return high, wide


def patch_rows(
    images: Sequence[NDArray[np.uint8]], settings: PixelSettings
) -> tuple[Tensor, list[Grid]]:
    """Return the patches of all images as rows, float32 [N, 3 * T * p * p], and their grids.

    Shapes: images uint8 [height, width, 3], RGB. A row is (channel, frame, y, x); the frames of a
    still image are equal. Patches are in the order of merge blocks.
    Raises: RequestError for anything that is no such image, and for sizes that do not fit.
    """
    rows, grids = [], []
    for image in images:
        pixels = _resized(_checked(image), settings)
        patch, merge = settings.patch_size, settings.merge_size
        high, wide = pixels.shape[1] // patch, pixels.shape[2] // patch
        mean = torch.tensor(settings.image_mean) / settings.rescale_factor
        deviation = torch.tensor(settings.image_std) / settings.rescale_factor
        scaled = (pixels.float() - mean[:, None, None]) / deviation[:, None, None]
        cut = scaled.view(3, high // merge, merge, patch, wide // merge, merge, patch)
        cut = cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(high * wide, 3, 1, patch, patch)
        rows.append(cut.expand(-1, -1, settings.temporal_patch_size, -1, -1).flatten(1))
        grids.append((1, high, wide))
    width = 3 * settings.temporal_patch_size * settings.patch_size**2
    return torch.cat(rows) if rows else torch.zeros(0, width), grids


def _checked(image: Any) -> Tensor:
    """Return the image as uint8 [3, height, width]."""
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3 or not array.size:
        raise RequestError(
            "image must be uint8 [height, width, 3]; got "
            f"{array.dtype} {list(array.shape)}. Send one RGB image."
        )
    return torch.from_numpy(np.array(np.moveaxis(array, -1, 0), copy=True, order="C"))


def _resized(pixels: Tensor, settings: PixelSettings) -> Tensor:
    size = (pixels.shape[1], pixels.shape[2])
    if not settings.do_resize:
        if size[0] % settings.block or size[1] % settings.block:
            raise RequestError(
                f"image sides must be multiples of {settings.block} when nothing is resized; got "
                f"{size[0]} x {size[1]}. Resize the image."
            )
        return pixels
    wanted = image_size(*size, settings)
    if wanted == size:
        return pixels
    # torch's own filter for uint8, antialiased, rounds once per axis as the official one does
    return functional.interpolate(pixels[None], size=wanted, mode="bicubic", antialias=True)[0]
