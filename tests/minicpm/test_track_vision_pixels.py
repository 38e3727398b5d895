"""What happens to a frame before the towers, and to their grids after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from phyai.errors import CheckpointError, ConfigError, RequestError
from phyai.models.minicpm_robot_track.vision import PixelScale, pool_features, resize
from phyai.models.minicpm_robot_track.vision.pixels import HALF, IMAGENET
from tests.conftest import GOLDEN
from tests.minicpm.tower_reference import normalised, pooled, random_frames

# ---------------------------------------------------------------- pixels


@pytest.mark.parametrize("shape", [(480, 640), (100, 37), (384, 384), (1, 1)])
def test_frames_are_resized_as_pillow_does(shape: tuple[int, int]) -> None:
    frame = np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
    want = Image.fromarray(frame).convert("RGB").resize((384, 384), Image.Resampling.BICUBIC)
    made = resize(frame)
    assert made.dtype == np.uint8
    assert np.array_equal(made, np.asarray(want))
    assert np.array_equal(resize(frame[::-1]), resize(frame[::-1].copy()))


def test_a_frame_of_the_right_size_is_not_touched() -> None:
    frame = np.zeros((64, 64, 3), dtype=np.uint8)
    assert resize(frame, 64) is frame


@pytest.mark.parametrize(
    "frame",
    [
        np.zeros((4, 4, 3), dtype=np.float32),
        np.zeros((4, 4), dtype=np.uint8),
        np.zeros((3, 4, 4), dtype=np.uint8),
        np.zeros((0, 4, 3), dtype=np.uint8),
        np.zeros((1, 9000, 3), dtype=np.uint8),
        "frame",
    ],
    ids=str,
)
def test_other_frames_are_refused(frame: Any) -> None:
    with pytest.raises(RequestError, match="frame must be uint8"):
        resize(frame)


@pytest.mark.parametrize("scale", [IMAGENET, HALF], ids=["dinov3", "siglip"])
def test_pixels_as_the_official_formula(scale: PixelScale) -> None:
    frames = random_frames(2, 20)
    want = normalised(frames, scale.mean, scale.std)
    torch.testing.assert_close(scale.apply(frames), want, atol=1e-6, rtol=0)


def test_pixels_as_the_official_processor() -> None:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    frames = random_frames(1, 24)
    image = Image.fromarray(frames[0].permute(1, 2, 0).numpy())
    for scale in (HALF, IMAGENET):
        processor = SiglipImageProcessorPil(
            size={"height": 24, "width": 24}, image_mean=scale.mean, image_std=scale.std
        )
        want = torch.as_tensor(np.asarray(processor(images=image)["pixel_values"]))
        torch.testing.assert_close(scale.apply(frames), want.float(), atol=1e-6, rtol=0)


def write(folder: Path, **settings: Any) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def test_settings_come_from_the_folder(tmp_path: Path) -> None:
    assert PixelScale.from_folder(tmp_path, IMAGENET) == IMAGENET
    assert PixelScale.from_folder(write(tmp_path, resample=3), HALF) == HALF
    write(tmp_path, image_mean=[0.1, 0.2, 0], image_std=[1, 2, 3], rescale_factor=0.5)
    assert PixelScale.from_folder(tmp_path, HALF) == PixelScale((0.1, 0.2, 0.0), (1, 2, 3), 0.5)
    write(tmp_path, do_normalize=False, image_mean=[9, 9, 9])
    assert PixelScale.from_folder(tmp_path, HALF) == PixelScale((0, 0, 0), (1, 1, 1), 1 / 255)
    write(tmp_path, do_rescale=False)
    assert PixelScale.from_folder(tmp_path, HALF).factor == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {"image_mean": [0.5, 0.5]},
        {"image_mean": [0.5, 0.5, "0.5"]},
        {"image_std": [0.5, 0.0, 0.5]},
        {"image_std": 0.5},
        {"rescale_factor": -1},
        {"rescale_factor": True},
        {"do_normalize": "yes"},
        {"do_center_crop": True},
    ],
    ids=str,
)
def test_damaged_settings_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=next(iter(settings))):
        PixelScale.from_folder(write(tmp_path, **settings), HALF)


# ---------------------------------------------------------------- pooling


def check(dino: Tensor, siglip: Tensor, want: dict[str, Tensor]) -> None:
    seen: dict[str, Tensor] = {}
    coarse, fine = pool_features(
        dino,
        siglip,
        coarse_tokens=want["coarse"].shape[1],
        fine_tokens=want["fine"].shape[1],
        record=seen.__setitem__,
    )
    seen |= {"coarse": coarse, "fine": fine}
    for name in ("siglip_resized", "coarse", "fine"):
        assert seen[name].dtype == torch.float32
        torch.testing.assert_close(seen[name], want[name], atol=1e-6, rtol=0, msg=name)


def test_pooling_of_the_golden_case() -> None:
    case = load_file(GOLDEN / "minicpm" / "track_case_pool.safetensors")
    check(case["dino_tokens"], case["siglip_tokens"], case)


@pytest.mark.parametrize("counts", [(4, 64), (1, 9), (25, 49)], ids=str)
@pytest.mark.parametrize("sides", [(24, 27), (7, 8), (8, 5), (5, 5), (1, 2), (3, 16)], ids=str)
def test_pooling_of_any_grids(sides: tuple[int, int], counts: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(11)
    dino = torch.randn(2, sides[0] ** 2, 5, generator=generator)
    siglip = torch.randn(2, sides[1] ** 2, 3, generator=generator)
    names = dict(zip(("coarse", "fine"), counts, strict=True))
    check(dino, siglip, pooled(dino, siglip, names))


def test_low_precision_tokens_are_pooled_in_float32() -> None:
    tokens = torch.randn(1, 36, 4, generator=torch.Generator().manual_seed(2)).bfloat16()
    check(tokens, tokens, pooled(tokens.float(), tokens.float(), {"coarse": 4, "fine": 64}))


def test_strided_tokens_are_pooled_as_others() -> None:
    tokens = torch.randn(2, 41, 4, generator=torch.Generator().manual_seed(4))[:, 5:]
    check(tokens, tokens, pooled(tokens, tokens, {"coarse": 4, "fine": 64}))


@pytest.mark.parametrize(
    ("dino", "siglip", "options", "name"),
    [
        (35, 49, {}, "DINOv3 tokens"),
        (36, 50, {}, "SigLIP tokens"),
        (36, 49, {"coarse_tokens": 3}, "coarse_tokens"),
        (36, 49, {"fine_tokens": 0}, "fine_tokens"),
    ],
)
def test_other_counts_are_refused(
    dino: int, siglip: int, options: dict[str, int], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} must form a square grid"):
        pool_features(torch.zeros(1, dino, 2), torch.zeros(1, siglip, 2), **options)
