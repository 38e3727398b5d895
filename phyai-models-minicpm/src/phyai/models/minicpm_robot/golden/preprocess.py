"""Cases of preprocessing: pictures made by a formula, resized, cut into patches, sliced.

A case is a JSON file of facts and, under the same name, a safetensors file of samples. Resizing is
Pillow's: with another version than the fixtures' a level of a resized picture may differ by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.golden import Comparison, GoldenRun, absolute, exact, unknown
from phyai.json_files import read_json_object
from phyai.models.minicpm.frames import Pixels, resize
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.golden.cases import Case
from phyai.models.minicpm_robot.processing.images import patch_rows, strip
from phyai.models.minicpm_robot.processing.settings import ImageSettings
from phyai.models.minicpm_robot.processing.slicing import plan_views

ATOL = 1e-6
LEVEL = 1 / 127.5
"""One level of a picture, in what the model sees."""
INPUTS = frozenset({"index", "height", "width", "pattern_s"})


def preprocess_runs(case: Case) -> list[GoldenRun]:
    """Return the run of one of the two files; needs no engine."""
    return [GoldenRun(case.path.name, lambda *_: _compare(case))]


@dataclass(frozen=True)
class _Picture:
    """One picture and what becomes of it.

    same: it was resized exactly as for the fixture.  patches: float32 [P, 3 * patch * patch].
    """

    facts: Mapping[str, Any]
    settings: ImageSettings
    resized: Pixels
    same: bool
    patches: Tensor
    grid: tuple[int, int]

    @property
    def tolerance(self) -> float:
        return ATOL if self.same else LEVEL + ATOL

    @property
    def strip(self) -> Tensor:
        return strip(self.patches)


def _compare(case: Case) -> list[Comparison]:
    facts = case.data
    if case.kind == "preprocess":
        facts = read_json_object(case.path.with_suffix(".json"))
    config = MiniCPMRobotConfig.from_folder(case.root)
    settings = ImageSettings.from_folder(case.root) or ImageSettings(
        scale_resolution=config.image_size, patch_size=config.vision.patch_size
    )
    pictures = {}
    for record in facts["images"]:
        if not isinstance(record, Mapping) or not record.keys() >= INPUTS:
            raise CheckpointError(
                f"images of golden case {case.path.name} must say {', '.join(sorted(INPUTS))}; "
                f"got {record!r}. Copy the golden set again."
            )
        pictures[str(record["index"])] = _picture(record, config.image_size, settings)
    if case.kind == "preprocess":
        return [_sample(name, want, pictures) for name, want in case.tensors.items()]
    return [
        _fact(f"images.{number}.{key}", key, want, picture)
        for number, picture in pictures.items()
        for key, want in picture.facts.items()
        if key not in INPUTS
    ]


def _picture(facts: Mapping[str, Any], side: int, settings: ImageSettings) -> _Picture:
    picture = _formula(int(facts["height"]), int(facts["width"]), int(facts["pattern_s"]))
    resized = resize(picture, (side, side))
    digest = hashlib.sha256(np.ascontiguousarray(resized).tobytes()).hexdigest()
    same = facts.get("resized_sha256", digest) == digest or resized is picture
    patches, grids = patch_rows([resized], settings)
    return _Picture(facts, settings, resized, same, patches, grids[0])


def _formula(height: int, width: int, s: int) -> Pixels:
    """Return the fixtures' picture, uint8 [height, width, 3]."""
    y, x, c = np.ogrid[:height, :width, :3]
    values = 3 * y * y + 7 * x + 41 * c + 13 * s + (x * y) // 5
    return np.asarray(values % 256, dtype=np.uint8)


def _sample(name: str, want: Tensor, pictures: Mapping[str, _Picture]) -> Comparison:
    number, _, what = name.partition(".")
    picture = pictures.get(number)
    if picture is None:
        return unknown(name)
    side, columns = picture.settings.patch_size, picture.grid[1]
    if what == "resized_corner_uint8":
        got = torch.from_numpy(picture.resized[: want.shape[0], : want.shape[1]].copy())
        return absolute(name, got, want, 0.0 if picture.same else 1.0)
    if what.startswith("pixel_values_first_"):
        return absolute(name, picture.strip[..., : want.shape[-1]], want, picture.tolerance)
    if what.startswith("pixel_values_patch_row1_first_"):
        start = side * columns
        part = picture.strip[..., start : start + want.shape[-1]]
        return absolute(name, part, want, picture.tolerance)
    return unknown(name)


def _fact(name: str, key: str, want: Any, picture: _Picture) -> Comparison:
    facts, settings = picture.facts, picture.settings
    plan = plan_views(int(facts["height"]), int(facts["width"]), settings)
    grids = plan.grids(settings.patch_size)
    exactly: dict[str, Any] = {
        "pixel_values_shape": list(picture.strip.shape),
        "target_sizes": [list(picture.grid)],
        "raw_target_sizes": [list(grid) for grid in grids],
        "raw_grid": [list(plan.slices)],
        "raw_image_tokens": [h * w // settings.merge**2 for h, w in grids],
    }
    if key in exactly:
        return exact(name, exactly[key], want)
    if key == "resized_sha256":
        # Tied to the version of Pillow; the samples are compared with a wider tolerance then.
        return Comparison(name, 0.0 if picture.same else LEVEL, LEVEL)
    if key == "pixel_values_sum":
        count = picture.patches.numel()
        error = abs(float(picture.patches.double().sum()) - float(want)) / count
        return Comparison(f"{name} [mean]", error, picture.tolerance)
    if key == "pixel_values_sha256_f32":
        return _hashed(name, str(want), picture)
    return unknown(name)


def _hashed(name: str, want: str, picture: _Picture) -> Comparison:
    """Compare with the official arithmetic, which the hash shows to be right.

    The runtime's own may differ in the last bit, which a hash cannot forgive.
    """
    official = _official(picture.resized, picture.settings)
    if picture.same and hashlib.sha256(official.numpy().tobytes()).hexdigest() != want:
        return unknown(name)
    return absolute(name, picture.strip, official, ATOL)


def _official(picture: NDArray[Any], settings: ImageSettings) -> Tensor:
    """Return pixel values as the official processor computes them: scale, then normalise."""
    scaled = picture.astype(np.float64) * settings.rescale_factor
    levels = scaled.astype(np.float32)
    mean = np.asarray(settings.image_mean, dtype=np.float32)
    std = np.asarray(settings.image_std, dtype=np.float32)
    values = torch.from_numpy((levels - mean) / std).permute(2, 0, 1)
    side = settings.patch_size
    channels, height, width = values.shape
    cut = values.reshape(channels, height // side, side, width // side, side)
    return cut.permute(0, 2, 1, 3, 4).reshape(1, channels, side, -1).contiguous()
