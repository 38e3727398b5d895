"""Images: geometry, both resizes, the legacy border and every refused input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from phyai.errors import RequestError
from phyai.models.pi.processing.images import (
    INTERPOLATIONS,
    check_image,
    float_to_uint8,
    letterbox,
    missing_image,
    model_image,
    resize_with_pad_uint8,
)

SIZE = (56, 56)


def _noise(height: int, width: int) -> Any:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(
    ("height", "width", "want"),
    [
        (480, 640, (168, 224, 28, 0)),
        (640, 480, (224, 168, 0, 28)),
        (224, 224, (224, 224, 0, 0)),
        (37, 200, (41, 224, 91, 0)),
        # Truncation of 223.99.. is the official rounding.
        (1, 5000, (1, 223, 111, 0)),
    ],
)
def test_letterbox(height: int, width: int, want: tuple[int, int, int, int]) -> None:
    assert letterbox(height, width, (224, 224)) == want


def test_uint8_resize_is_pils() -> None:
    image = _noise(90, 90)
    want = np.asarray(Image.fromarray(image).resize((56, 56), Image.Resampling.BILINEAR))
    assert np.array_equal(resize_with_pad_uint8(image, SIZE), want)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_model_image_range_border_and_exact_size(interpolation: Any) -> None:
    tall = model_image(_noise(90, 45), SIZE, interpolation)
    assert tall.shape == (3, 56, 56)
    assert tall.dtype == torch.float32
    assert tall.abs().max() <= 1.0
    assert (tall[:, :, :14] == -1).all()
    assert (tall[:, :, -14:] == -1).all()
    assert (tall[:, :, 14:-14] != -1).any()
    same = _noise(56, 56)
    want = torch.from_numpy(same.transpose(2, 0, 1).astype(np.float32)) / 255 * 2 - 1
    assert torch.allclose(model_image(same, SIZE, interpolation), want, atol=1e-6)


def test_the_two_interpolations_differ_when_shrinking() -> None:
    image = _noise(150, 150)
    gap = model_image(image, SIZE, "lerobot") - model_image(image, SIZE, "openpi")
    assert gap.abs().max() > 0.1


def test_legacy_border_is_minus_three_and_nothing_else_changes() -> None:
    image = _noise(45, 90)
    now = model_image(image, SIZE, "lerobot")
    legacy = model_image(image, SIZE, "lerobot", legacy_padding=True)
    assert (legacy[:, :14] == -3).all()
    assert (legacy[:, -14:] == -3).all()
    assert torch.equal(legacy[:, 14:-14], now[:, 14:-14])
    square = _noise(56, 56)
    assert torch.equal(
        model_image(square, SIZE, "lerobot", legacy_padding=True),
        model_image(square, SIZE, "lerobot"),
    )


def test_float_input_of_openpi_is_truncated() -> None:
    assert float_to_uint8(np.array([0.0, 0.5, 0.999, 1.0])).tolist() == [0, 127, 254, 255]
    image = np.full((56, 56, 3), 0.999, np.float32)
    assert torch.allclose(
        model_image(image, SIZE, "openpi"), torch.full((3, *SIZE), 254 / 255 * 2 - 1), atol=1e-6
    )


def test_layouts_and_dtypes_agree() -> None:
    image = _noise(40, 50)
    hwc = (image / np.float32(255)).astype(np.float32)
    inputs = (hwc, hwc.transpose(2, 0, 1), torch.from_numpy(hwc), hwc.astype(np.float64))
    for other in inputs:
        assert np.array_equal(check_image(other, "front"), hwc)
    assert check_image(torch.from_numpy(image), "front").dtype == np.uint8


def test_missing_image() -> None:
    assert (missing_image((28, 28)) == -1).all()
    assert missing_image((28, 28)).shape == (3, 28, 28)


NAN = np.zeros((8, 8, 3), np.float32)
NAN[0, 0, 0] = np.nan
INF = np.zeros((8, 8, 3), np.float32)
INF[0, 0, 0] = np.inf


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((8, 8), np.uint8),
        np.zeros((8, 8, 1), np.uint8),
        np.zeros((8, 8, 4), np.uint8),
        np.zeros((1, 8, 8, 3), np.uint8),
        np.zeros((3, 8, 8), np.uint8),
        np.zeros((0, 8, 3), np.uint8),
        np.zeros((0, 0, 3), np.float32),
        np.zeros((4, 8, 8), np.float32),
        np.zeros((8, 8, 3), np.int64),
        np.zeros((8, 8, 3), bool),
        np.full((8, 8, 3), 255.0, np.float32),
        np.full((8, 8, 3), -0.1, np.float32),
        NAN,
        INF,
        None,
        "frame.png",
        [[1, 2], [3]],
    ],
)
def test_bad_images_name_the_camera(image: Any) -> None:
    with pytest.raises(RequestError, match="wrist"):
        check_image(image, "wrist")


def test_rounding_outside_the_range_is_tolerated() -> None:
    image = np.full((8, 8, 3), 1.0 + 1e-6, np.float32)
    assert check_image(image, "front") is not None
