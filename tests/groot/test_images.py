"""Image recipes: geometry, both resizes, settings with and without their keys, refused inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phyai.errors import CheckpointError, RequestError
from phyai.models.gr00t.processing.images import (
    ImageRecipe,
    centre_crop,
    letterbox,
    resize_area,
    resize_bilinear,
)


def _noise(height: int, width: int) -> Any:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


def _area_average(image: Any, size: tuple[int, int]) -> Any:
    """Return exact area averages: every output pixel is a box of the input, edges by share."""
    for axis, wanted in enumerate(size):
        have = image.shape[axis]
        edges = np.arange(wanted + 1) * have / wanted
        sums = np.concatenate([np.zeros_like(image[:1] if axis == 0 else image[:, :1], float),
                               np.cumsum(image, axis=axis, dtype=float)], axis=axis)  # fmt: skip
        low = np.minimum(edges.astype(int), have - 1)
        share = (edges - low).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        at = np.take(sums, low, axis) * (1 - share) + np.take(sums, low + 1, axis) * share
        image = np.diff(at, axis=axis) * wanted / have
    return image


# ---------------------------------------------------------------- steps


def test_letterbox_is_black_and_centred() -> None:
    wide = letterbox(np.full((3, 8, 3), 9, np.uint8))
    assert wide.shape == (8, 8, 3)
    # (8 - 3) // 2 rows above, the odd one below
    assert [int(row.max()) for row in wide] == [0, 0, 9, 9, 9, 0, 0, 0]
    square = _noise(5, 5)
    assert letterbox(square) is square


@pytest.mark.parametrize(
    ("side", "kept", "rounded", "first"),
    [(10, 6, False, 2), (10, 7, False, 1), (10, 7, True, 2), (11, 10, True, 0), (10, 5, True, 2)],
)
def test_crop_offsets(side: int, kept: int, rounded: bool, first: int) -> None:
    column = np.tile(np.arange(side, dtype=np.uint8)[:, None, None], (1, side, 3))
    assert centre_crop(column, (kept, kept), rounded=rounded)[0, 0, 0] == first


def test_crop_larger_than_the_image_pads() -> None:
    out = centre_crop(np.full((2, 6, 3), 7, np.uint8), (4, 4))
    assert out.shape == (4, 4, 3)
    assert [int(row.min()) for row in out] == [0, 7, 7, 0]


@pytest.mark.parametrize(("height", "width", "size"), [(48, 64, (31, 40)), (97, 53, (50, 53))])
def test_area_resize_averages_areas(height: int, width: int, size: tuple[int, int]) -> None:
    image = _noise(height, width)
    off = abs(resize_area(image, size) - _area_average(image, size))
    assert off.max() <= 0.51


def test_bilinear_resize_is_antialiased() -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    out = resize_bilinear(stripes, (16, 16))
    assert out.shape == (16, 16, 3)
    assert abs(out.astype(int) - 127).max() <= 20  # without it: 0 or 255


@pytest.mark.parametrize("resize", [resize_area, resize_bilinear])
def test_equal_size_is_returned_as_it_is(resize: Any) -> None:
    image = _noise(8, 9)
    assert resize(image, (8, 9)) is image


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("size", "settings", "want"),
    [
        ((480, 640), {}, (256, 340)),
        ((640, 480), {}, (340, 256)),
        ((480, 640), {"letter_box_transform": True}, (256, 256)),
        ((90, 50), {"shortest_image_edge": None, "image_target_size": [64, 48]}, (64, 48)),
        # upscaling: 120 x 64, of which 114 x 60 are kept
        ((32, 17), {"shortest_image_edge": 64}, (122, 64)),
    ],
)
def test_area_recipe_sizes(size: Any, settings: dict[str, Any], want: Any) -> None:
    recipe = ImageRecipe.from_settings({"use_albumentations": True, **settings})
    out = recipe.apply(_noise(*size))
    assert out.shape == (*want, 3)
    assert out.dtype == np.uint8
    assert out.flags.c_contiguous


def test_padding_is_computed_per_image() -> None:
    recipe = ImageRecipe.from_settings({"use_albumentations": True, "letter_box_transform": True})
    wide, tall = (recipe.apply(np.full(s, 200, np.uint8)) for s in ((60, 120, 3), (120, 60, 3)))
    assert np.array_equal(wide, tall.transpose(1, 0, 2))
    assert wide[0].max() == 0
    assert wide[:, 0].max() == 200


def test_torchvision_recipe_crops_pixels() -> None:
    data = {"image_target_size": [64, 64], "image_crop_size": [32, 32]}
    recipe = ImageRecipe.from_settings(data)
    assert not recipe.area
    image = np.zeros((64, 64, 3), np.uint8)
    image[16:48, 16:48] = 77
    assert (recipe.apply(image) == 77).all()


@pytest.mark.parametrize(
    ("data", "share", "short"),
    [
        ({}, 0.95, 256),
        ({"crop_fraction": 0.8, "shortest_image_edge": 224}, 0.8, 224),
        # a stored null is no absent key: crop sizes and the exact target count then
        (
            {
                "crop_fraction": None,
                "shortest_image_edge": None,
                "image_crop_size": [230, 230],
                "image_target_size": [256, 256],
            },
            230 / 256,
            None,
        ),
        ({"image_crop_size": [230, 230], "image_target_size": [256, 256]}, 0.95, 256),
    ],
)
def test_absent_and_null_settings(data: dict[str, Any], share: float, short: int | None) -> None:
    recipe = ImageRecipe.from_settings({"use_albumentations": True, **data})
    assert (recipe.crop_fraction, recipe.short_side) == (share, short)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"use_albumentations": True, "crop_fraction": None}, "crop_fraction"),
        ({"use_albumentations": True, "crop_fraction": 1.5}, r"\(0, 1\]"),
        ({"use_albumentations": True, "shortest_image_edge": None}, "image_target_size"),
        ({"use_albumentations": True, "shortest_image_edge": 0}, "shortest_image_edge"),
        ({"use_albumentations": True, "shortest_image_edge": "256"}, "shortest_image_edge"),
        ({"use_albumentations": True, "crop_fraction": "0.9"}, "crop_fraction"),
        ({"use_albumentations": 1}, "use_albumentations"),
        ({"letter_box_transform": "no"}, "letter_box_transform"),
        ({"image_target_size": [256]}, "image_target_size"),
        ({"image_target_size": [256, 10**7]}, "image_target_size"),
        ({}, "without use_albumentations"),
    ],
)
def test_refused_settings(data: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        ImageRecipe.from_settings(data)


def test_a_crop_of_nothing_is_refused() -> None:
    recipe = ImageRecipe(short_side=1, crop_fraction=0.5)
    with pytest.raises(RequestError, match="leave pixels"):
        recipe.apply(_noise(3, 3))
