"""Settings of the checkpoint's image processor, as its files name them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.json_files import read_json_object

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
BICUBIC = 3
_MOST = 4096
# Token-saving merges of the vision tower: patches per side of one image token.
MERGES = {"16x": 4, "4x": 2}


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """How frames become patches; names as in ``preprocessor_config.json``.

    scale_resolution: side of the square whose area a view should have.
    max_slice_nums: most slices a large image is cut into besides its overview.
    use_image_id: images are numbered in the prompt.

    >>> ImageSettings().merge, ImageSettings().block
    (4, 56)
    """

    scale_resolution: int = 448
    patch_size: int = 14
    max_slice_nums: int = 9
    slice_mode: bool = True
    downsample_mode: str = "16x"
    use_image_id: bool = True
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        for name in ("scale_resolution", "patch_size", "max_slice_nums"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _MOST:
                raise _bad(name, f"an integer in [1, {_MOST}]", value)
        for name in ("slice_mode", "use_image_id"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, "true or false", getattr(self, name))
        if self.downsample_mode not in MERGES:
            raise _bad("downsample_mode", " or ".join(map(repr, MERGES)), self.downsample_mode)
        if not _is_number(self.rescale_factor) or self.rescale_factor <= 0:
            raise _bad("rescale_factor", "a number above zero", self.rescale_factor)
        for name in ("image_mean", "image_std"):
            values = getattr(self, name)
            if len(values) != 3 or not all(map(_is_number, values)):
                raise _bad(name, "three numbers", list(values))
        if min(self.image_std) <= 0:
            raise _bad("image_std", "three numbers above zero", list(self.image_std))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ImageSettings:
        """Return the settings in an image processor's JSON; keys of no meaning here are left alone.

        Raises: CheckpointError for steps that are switched off and for values of another kind.
        """
        for step in ("do_resize", "do_rescale", "do_normalize"):
            if data.get(step) not in (None, True):
                raise _bad(step, "true: images without this step are not supported", data[step])
        if data.get("resample") not in (None, BICUBIC):
            raise _bad("resample", f"{BICUBIC} (bicubic)", data["resample"])
        known: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            value = data.get(name)
            if value is not None:
                known[name] = tuple(value) if isinstance(value, list) else value
        for name in ("image_mean", "image_std"):
            if not isinstance(known.get(name, ()), tuple):
                raise _bad(name, "three numbers", known[name])
        return cls(**known)

    @classmethod
    def from_folder(cls, folder: Path) -> ImageSettings | None:
        """Return the settings in a folder, None when it holds neither of the two files.

        Raises: CheckpointError for a file that is broken or of an unknown form.
        """
        if (folder / PREPROCESSOR).is_file():
            return cls.from_json(read_json_object(folder / PREPROCESSOR))
        if not (folder / PROCESSOR).is_file():
            return None
        data = read_json_object(folder / PROCESSOR).get("image_processor")
        if data is None:
            return None
        if not isinstance(data, dict):
            raise CheckpointError(
                f"image_processor in {folder / PROCESSOR} must be an object; got {data!r}. "
                "Download the file again."
            )
        return cls.from_json(data)

    @property
    def merge(self) -> int:
        """Return patches per side of one image token."""
        return MERGES[self.downsample_mode]

    @property
    def block(self) -> int:
        """Return pixels per side of one image token."""
        return self.patch_size * self.merge

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return scale and shift per channel, float32 [3] each: value = level * scale + shift."""
        mean = torch.tensor(self.image_mean, dtype=torch.float64)
        std = torch.tensor(self.image_std, dtype=torch.float64)
        return (self.rescale_factor / std).float(), (-mean / std).float()


def _is_number(value: Any) -> bool:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and math.isfinite(value)


def _bad(name: str, rule: str, got: Any) -> CheckpointError:
    return CheckpointError(
        f"{name} of the image processor must be {rule}; got {got!r}. Correct {PREPROCESSOR}."
    )
