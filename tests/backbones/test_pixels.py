"""Patch rows: the recorded pixel values, the sizes of resizing, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from phyai.backbones.qwen3_vl import PixelSettings, image_size, patch_rows
from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError, RequestError
from tests.backbones.golden_backbone import CASES, FOLDER, backbone, case


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_recorded_pixel_values(path: Path) -> None:
    found = case(path, backbone())
    names = sorted(name for name in found.tensors if name.startswith("in.image_"))
    names = [name for name in names if name != "in.image_grid_thw"]
    images = [found.tensors[name].numpy() for name in names]
    rows, grids = patch_rows(images, PixelSettings.from_folder(FOLDER))
    assert grids == [grid for row in found.grids for grid in row]
    torch.testing.assert_close(rows, found.tensors["in.pixel_values"], rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    ("size", "want"),
    [
        ((256, 256), (256, 256)),
        ((256, 340), (256, 352)),
        ((240, 272), (256, 256)),  # half blocks round to even
        ((100, 100), (256, 256)),
        ((10, 100), (96, 832)),
        ((8000, 8000), (4096, 4096)),
        ((3000, 9000), (2336, 7072)),
    ],
)
def test_sizes(size: tuple[int, int], want: tuple[int, int]) -> None:
    assert image_size(*size, PixelSettings()) == want


def test_a_row_is_one_patch_in_merge_order() -> None:
    """Channel, frame, y, x; the four patches of a token stand together."""
    image = np.zeros((64, 64, 3), np.uint8)
    image[16:32, 48:64] = (255, 0, 128)  # patch row 1, column 3: token 1, its third patch
    rows, grids = patch_rows([image], PixelSettings(min_pixels=1024))
    assert grids == [(1, 4, 4)]
    lit = (rows != -1).any(dim=1).nonzero().flatten().tolist()
    assert lit == [7]
    channels = rows[7].view(3, 2, 16, 16)
    torch.testing.assert_close(
        channels.amax(dim=(1, 2, 3)), torch.tensor([1.0, -1.0, 128 / 127.5 - 1])
    )
    assert torch.equal(channels.amin(dim=(1, 2, 3)), channels.amax(dim=(1, 2, 3)))


def test_resizing_is_antialiased_and_bicubic() -> None:
    """A fine checkerboard becomes its mean, a step overshoots; plain sampling would do neither."""
    board = (np.indices((512, 512)).sum(axis=0) % 2 * 255).astype(np.uint8)
    settings = PixelSettings(min_pixels=1024, max_pixels=128 * 128)
    rows, grids = patch_rows([np.repeat(board[..., None], 3, axis=2)], settings)
    assert grids == [(1, 8, 8)]
    assert rows.abs().max() < 0.02
    step = np.full((64, 88, 3), 64, np.uint8)
    step[:, 41:] = 192
    rows, _ = patch_rows([step], PixelSettings(min_pixels=1024))
    assert rows.max() > 192 / 127.5 - 1 + 0.02


def test_without_resizing_sides_must_fit() -> None:
    settings = PixelSettings(do_resize=False)
    rows, grids = patch_rows([np.zeros((32, 64, 3), np.uint8)], settings)
    assert (rows.shape, grids) == ((8, 1536), [(1, 2, 4)])
    with pytest.raises(RequestError, match="multiples of 32"):
        patch_rows([np.zeros((32, 60, 3), np.uint8)], settings)


def test_no_images() -> None:
    rows, grids = patch_rows([], PixelSettings())
    assert (rows.shape, grids) == ((0, 1536), [])


@pytest.mark.parametrize("shape", [(32, 32), (3, 32, 32), (0, 32, 3), (32, 32, 4)])
def test_other_arrays_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match=r"uint8 \[height, width, 3\]"):
        patch_rows([np.zeros(shape, np.uint8)], PixelSettings())
    with pytest.raises(RequestError, match="float32"):
        patch_rows([np.zeros((32, 32, 3), np.float32)], PixelSettings())  # type: ignore[list-item]


def test_very_long_images_are_refused() -> None:
    with pytest.raises(RequestError, match="at most 200 times"):
        image_size(10, 2001, PixelSettings())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"resample": 2}, "resample must be 3"),
        ({"do_normalize": False}, "do_normalize must be true"),
        ({"patch_size": 0}, "patch_size must be a positive integer"),
        ({"size": {"longest_edge": 512}}, "max_pixels must hold one block"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std must be three numbers"),
        ({"rescale_factor": 0}, "rescale_factor must be positive"),
    ],
)
def test_settings_that_cannot_work(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PixelSettings.from_json(data)


def test_settings_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"must hold preprocessor_config\.json"):
        PixelSettings.from_folder(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    for text in ("{", "[1]"):
        file.write_text(text)
        with pytest.raises(CheckpointError, match="JSON"):
            PixelSettings.from_folder(tmp_path)
    file.write_text(json.dumps({"min_pixels": 2048, "size": {"shortest_edge": 1}}))
    assert PixelSettings.from_folder(tmp_path).min_pixels == 2048
