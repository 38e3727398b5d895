"""Frames -> patches: golden images, the official strip, views and slices, settings, refusals."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from phyai.errors import CheckpointError, RequestError
from phyai.models.minicpm.frames import resize
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.processing.images import camera_frame, patch_rows, strip
from phyai.models.minicpm_robot.processing.settings import ImageSettings
from phyai.models.minicpm_robot.processing.slicing import make_views, plan_views, slice_grid
from phyai.models.minicpm_robot.request_rows import patches_of
from tests.conftest import GOLDEN

CASE = GOLDEN / "minicpm/case_preprocess.json"
IMAGES = json.loads(CASE.read_text(encoding="utf-8"))["images"]
SETTINGS = ImageSettings()


def formula_image(height: int, width: int, s: int) -> Any:
    y, x, c = np.mgrid[0:height, 0:width, 0:3]
    return ((3 * y * y + 7 * x + 41 * c + 13 * s + (x * y) // 5) % 256).astype(np.uint8)


def noise(height: int, width: int) -> Any:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


# ---------------------------------------------------------------- golden


@pytest.mark.parametrize("case", IMAGES, ids=lambda case: f"{case['height']}x{case['width']}")
def test_golden_images(case: dict[str, Any]) -> None:
    tensors = load_file(CASE.with_suffix(".safetensors"))
    index = case["index"]
    image = formula_image(case["height"], case["width"], case["pattern_s"])
    made = resize(image, (448, 448))
    # Another Pillow may round a level differently.
    same = hashlib.sha256(made.tobytes()).hexdigest() == case["resized_sha256"]
    levels = 0 if same else 1
    corner = tensors[f"{index}.resized_corner_uint8"].numpy().astype(int)
    assert abs(made[:8, :8].astype(int) - corner).max() <= levels
    rows, grids = patch_rows([made], SETTINGS)
    values = strip(rows)
    assert list(values.shape) == case["pixel_values_shape"]
    assert [list(grid) for grid in grids] == case["target_sizes"]
    atol = 1e-6 + levels / 127.5
    for name, start, count in (("first_6_patches", 0, 6), ("patch_row1_first_2", 32, 2)):
        want = tensors[f"{index}.pixel_values_{name}"]
        got = values[..., 14 * start : 14 * (start + count)]
        torch.testing.assert_close(got, want, atol=atol, rtol=0)
    assert abs(float(values.double().sum()) - case["pixel_values_sum"]) < 0.1 + levels * 1e3


@pytest.mark.parametrize("case", IMAGES, ids=lambda case: f"{case['height']}x{case['width']}")
def test_golden_views_of_unresized_images(case: dict[str, Any]) -> None:
    image = formula_image(case["height"], case["width"], case["pattern_s"])
    views, slices = make_views(image, SETTINGS)
    _, grids = patch_rows(views, SETTINGS)
    assert [list(grid) for grid in grids] == case["raw_target_sizes"]
    assert [list(slices)] == case["raw_grid"]
    tokens = [rows * columns // 16 for rows, columns in grids]
    assert tokens == case["raw_image_tokens"]


# ---------------------------------------------------------------- patches


def test_rows_are_channel_row_column_and_images_follow_each_other() -> None:
    images = [noise(28, 56), noise(42, 14)]
    rows, grids = patch_rows(images, SETTINGS)
    assert grids == [(2, 4), (3, 1)]
    assert rows.shape == (11, 588)
    assert rows.dtype == torch.float32
    patch = images[0][14:28, 28:42]  # row 1, column 2
    want = torch.from_numpy(patch.astype(np.float64) / 127.5 - 1).permute(2, 0, 1).reshape(-1)
    torch.testing.assert_close(rows[1 * 4 + 2].double(), want, atol=1e-6, rtol=0)
    last = images[1][28:42].astype(np.float64) / 127.5 - 1
    torch.testing.assert_close(
        rows[10].view(3, 14, 14).double(),
        torch.from_numpy(last).permute(2, 0, 1),
        atol=1e-6,
        rtol=0,
    )


def test_strip_lays_patches_side_by_side_and_back() -> None:
    rows = torch.arange(5 * 588, dtype=torch.float32).view(5, 588)
    made = strip(rows)
    assert made.shape == (1, 3, 14, 70)
    assert torch.equal(made[0, :, :, 14:28], rows[1].view(3, 14, 14))
    assert torch.equal(patches_of(MiniCPMRobotConfig(), made), rows)


@pytest.mark.parametrize("shape", [(1, 3, 14, 15), (2, 3, 14, 28), (3, 14, 28)])
def test_other_strips_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="pixel_values"):
        patches_of(MiniCPMRobotConfig(), torch.zeros(shape))


def test_mean_and_deviation_count_per_channel() -> None:
    settings = ImageSettings(image_mean=(0.1, 0.2, 0.3), image_std=(0.5, 1.0, 2.0))
    rows, _ = patch_rows([np.full((14, 14, 3), 51, np.uint8)], settings)
    want = [(0.2 - 0.1) / 0.5, 0.0, (0.2 - 0.3) / 2.0]
    torch.testing.assert_close(rows.view(3, -1)[:, 0], torch.tensor(want), atol=1e-6, rtol=0)


# ---------------------------------------------------------------- views


def test_square_frames_of_the_resolution_are_one_unsampled_view() -> None:
    image = noise(448, 448)
    [view], slices = make_views(image, SETTINGS)
    assert view is image
    assert slices == (0, 0)


def test_small_frames_are_brought_up_to_the_resolution() -> None:
    assert plan_views(224, 224, SETTINGS).overview == (448, 448)
    assert plan_views(100, 400, SETTINGS).grids(14) == [(16, 64)]


def test_slices_are_cut_from_one_enlarged_picture() -> None:
    image = noise(480, 640)
    views, slices = make_views(image, SETTINGS)
    assert slices == (1, 2)
    whole = resize(image, (560, 784))
    assert np.array_equal(views[1], whole[:, :392])
    assert np.array_equal(views[2], whole[:, 392:])


def test_the_limit_of_slices_holds() -> None:
    assert slice_grid(4000, 4000, SETTINGS) == (3, 3)
    few = ImageSettings(max_slice_nums=4)
    grid = slice_grid(4000, 1000, few)
    assert grid == (4, 1)
    assert plan_views(4000, 4000, ImageSettings(slice_mode=False)).slices == (0, 0)


def test_coarser_merges_allow_smaller_blocks() -> None:
    fine = ImageSettings(downsample_mode="4x")
    assert fine.block == 28
    assert plan_views(480, 640, fine).overview[0] % 28 == 0


# ---------------------------------------------------------------- frames


def test_float_frames_of_either_order_equal_their_levels() -> None:
    levels = noise(5, 7)
    floats = levels.astype(np.float32) / 255
    for value in (
        levels,
        floats,
        np.moveaxis(floats, -1, 0),
        torch.from_numpy(floats).to(torch.float64),
        levels.tolist(),
    ):
        if isinstance(value, list):
            with pytest.raises(RequestError, match="uint8"):
                camera_frame("a", value)
            continue
        assert np.array_equal(camera_frame("a", value), levels)


def test_frames_share_no_memory_with_the_caller() -> None:
    image = noise(4, 4)
    frame = camera_frame("a", image)
    image[:] = 0
    assert frame.any()


def test_flipped_views_of_an_array_are_fine() -> None:
    image = noise(20, 30)
    turned = camera_frame("a", image[::-1, ::-1])
    assert np.array_equal(turned, image[::-1, ::-1])
    patch_rows([resize(turned, (56, 56))], SETTINGS)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.zeros((4, 4), np.uint8), "height, width, 3"),
        (np.zeros((2, 4, 4, 3), np.uint8), "one RGB frame"),
        (np.zeros((4, 4, 4), np.uint8), "drop alpha"),
        (np.zeros((4, 4, 1), np.uint8), "RGB"),
        (np.zeros((3, 8, 8), np.uint8), "channels last"),
        (np.zeros((4, 4, 3), np.int64), "int64"),
        (np.zeros((4, 4, 3), bool), "bool"),
        (np.full((4, 4, 3), 2.0), r"\[0, 1\]"),
        (np.full((4, 4, 3), np.nan), "NaN"),
        (np.zeros((0, 4, 3), np.uint8), "sides"),
        (np.zeros((1, 8193, 3), np.uint8), "8193"),
        (None, "cam"),
        ([[1, 2], [3]], "one shape"),
    ],
)
def test_refused_frames(value: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        camera_frame("cam", value)
    assert "'cam'" in str(caught.value)


@pytest.mark.parametrize("size", [(1, 1), (1, 333), (447, 449), (113, 7)])
def test_odd_sizes_become_the_square(size: tuple[int, int]) -> None:
    made = resize(camera_frame("a", noise(*size)), (112, 112))
    assert made.shape == (112, 112, 3)
    assert made.dtype == np.uint8


# ---------------------------------------------------------------- settings


def test_settings_come_from_either_file(tmp_path: Any) -> None:
    assert ImageSettings.from_folder(tmp_path) is None
    nested = {"image_processor": {"max_slice_nums": 4, "use_image_id": False}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested), "utf-8")
    assert ImageSettings.from_folder(tmp_path) == ImageSettings(
        max_slice_nums=4, use_image_id=False
    )
    plain = {"scale_resolution": 112, "image_mean": [0, 0, 0], "unknown_key": 1, "resample": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(plain), "utf-8")
    made = ImageSettings.from_folder(tmp_path)
    assert made == ImageSettings(scale_resolution=112, image_mean=(0, 0, 0))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"do_normalize": False}, "do_normalize"),
        ({"do_rescale": 0}, "do_rescale"),
        ({"resample": 2}, "bicubic"),
        ({"downsample_mode": "8x"}, "downsample_mode"),
        ({"patch_size": 0}, "patch_size"),
        ({"scale_resolution": "448"}, "scale_resolution"),
        ({"max_slice_nums": True}, "max_slice_nums"),
        ({"slice_mode": 1}, "slice_mode"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_mean": 0.5}, "image_mean"),
        ({"image_std": [0.5, 0.5, 0.0]}, "above zero"),
        ({"image_std": [0.5, 0.5, "x"]}, "image_std"),
        ({"rescale_factor": -1.0}, "rescale_factor"),
        ({"rescale_factor": float("nan")}, "rescale_factor"),
    ],
)
def test_refused_settings(data: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        ImageSettings.from_json(data)
