"""Canvas and generation frames: tiers, padding, resizing, clips, and their refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai.errors import RequestError
from phyai.models.cosmos3.processing.actions import fill_clip
from phyai.models.cosmos3.processing.aspects import fits
from phyai.models.cosmos3.processing.canvas import (
    TIERS,
    Canvas,
    aspect_label,
    canvas_of,
    fit,
    resize,
    tier_sizes,
)
from phyai.models.cosmos3.processing.conditions import (
    check_indexes,
    check_keep,
    cover,
    given_frames,
)
from phyai.models.cosmos3.processing.frames import clip_of, frame_of, to_signed


def ramp(height: int, width: int) -> np.ndarray:
    y, x, c = np.mgrid[:height, :width, :3]
    return ((3 * x + 7 * y + 50 * c) % 256).astype(np.uint8)


# ---------------------------------------------------------------- canvas


@pytest.mark.parametrize("tier", list(TIERS))
def test_every_size_of_a_tier_is_its_own_canvas(tier: str) -> None:
    for size in TIERS[tier]:
        canvas = canvas_of(*size, tier)
        assert canvas.image_size == (*size, *size)
        assert size[0] % 16 == size[1] % 16 == 0
        assert canvas_of(*size, int(tier)) == canvas
    image = ramp(32, 40)
    assert np.array_equal(fit(image, Canvas(32, 40, 32, 40)), image)


@pytest.mark.parametrize(
    ("size", "tier", "want", "label"),
    [
        ((540, 640), 480, (544, 736, 540, 640), "4,3"),
        ((480, 640), 480, (544, 736, 480, 640), "4,3"),
        ((480, 832), 480, (480, 832, 480, 832), "16,9"),
        ((360, 640), 480, (480, 832, 360, 640), "16,9"),
        ((720, 1280), 480, (480, 832, 468, 832), "16,9"),
        ((1280, 720), 480, (832, 480, 832, 468), "9,16"),
        ((640, 640), 480, (640, 640, 640, 640), "1,1"),
        ((250, 310), 256, (256, 320, 250, 310), "4,3"),
        ((48, 64), 256, (256, 320, 48, 64), "4,3"),
        ((720, 1280), 720, (720, 1280, 720, 1280), "16,9"),
        ((720, 1280), 704, (704, 1280, 704, 1252), "16,9"),
        ((1500, 1000), 480, (768, 512, 768, 512), "2,3"),
        ((1, 8000), 256, (192, 320, 1, 320), "16,9"),
    ],
)
def test_canvas_choice(size: tuple[int, int], tier: int, want: tuple[int, ...], label: str) -> None:
    canvas = canvas_of(*size, tier)
    assert canvas.image_size == want
    assert canvas.aspect == label


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from(list(TIERS)))
@settings(deadline=None, max_examples=200)
def test_content_fits_and_is_never_enlarged(height: int, width: int, tier: str) -> None:
    canvas = canvas_of(height, width, tier)
    assert 1 <= canvas.content_height <= min(canvas.height, height)
    assert 1 <= canvas.content_width <= min(canvas.width, width)
    tall, wide = canvas.latent_size()
    assert 1 <= tall <= canvas.height // 16
    assert 1 <= wide <= canvas.width // 16


def test_padding_is_a_reflection_and_edges_where_it_would_not_reach() -> None:
    image = ramp(5, 6)
    placed = fit(image, Canvas(7, 9, 5, 6))
    assert np.array_equal(placed[:5, :6], image)
    assert np.array_equal(placed[5:, :6], image[[3, 2]])
    assert np.array_equal(placed[:5, 6:], image[:, [4, 3, 2]])
    assert np.array_equal(placed[6, 8], image[2, 2])
    edges = fit(image, Canvas(10, 9, 5, 6))  # below: as much as there is
    assert np.array_equal(edges[:5, 6:], np.repeat(image[:, 5:], 3, axis=1))
    assert np.array_equal(edges[5:, :6], np.repeat(image[4:], 5, axis=0))


def test_padding_is_that_of_torch() -> None:
    image = ramp(12, 10)
    tensor = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    for below, right, mode in ((5, 9, "reflect"), (12, 1, "replicate"), (30, 30, "replicate")):
        want = torch.nn.functional.pad(tensor, (0, right, 0, below), mode=mode)
        made = fit(image, Canvas(12 + below, 10 + right, 12, 10))
        assert np.array_equal(made, want[0].permute(1, 2, 0).byte().numpy())


def test_clips_fit_frame_by_frame() -> None:
    clip = np.stack([ramp(720, 1280), ramp(720, 1280)[::-1]])
    canvas = canvas_of(720, 1280, 256)
    placed = fit(clip, canvas)
    assert placed.shape == (2, 192, 320, 3)
    assert np.array_equal(placed[1], fit(clip[1], canvas))


def test_shrinking_is_bicubic_with_rounding() -> None:
    image = ramp(96, 128)
    made = resize(image, (48, 64))
    levels = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    want = torch.nn.functional.interpolate(
        levels, size=(48, 64), mode="bicubic", align_corners=False, antialias=True
    )
    want = want.round().clamp(0, 255)[0].permute(1, 2, 0)
    assert np.array_equal(made, want.byte().numpy())
    assert resize(np.full((50, 40, 3), 255, np.uint8), (5, 4)).min() == 255  # no wrap-around


@pytest.mark.parametrize("tier", [None, 481, "480p", 480.0, True, "", [480]])
def test_unknown_tiers_are_refused_with_the_known_ones(tier: Any) -> None:
    with pytest.raises(RequestError, match="one of 256, 480, 704, 720, 768"):
        tier_sizes(tier)


def test_labels_of_other_sizes_are_the_nearest() -> None:
    assert aspect_label(480, 854) == "16,9"
    assert aspect_label(100, 100) == "1,1"
    assert aspect_label(64, 48) == "3,4"
    assert aspect_label(1000, 100) == "9,16"


def test_aspect_ratios_fit_within_two_percent() -> None:
    assert fits((540, 640), (540, 640))
    assert fits((270, 320), (540, 640))
    assert fits((545, 640), (540, 640))  # 0.9 %
    assert not fits((560, 640), (540, 640))  # 3.6 %
    assert not fits((540, 660), (540, 640))


# ---------------------------------------------------------------- frames


def test_signed_pixels() -> None:
    clip = np.stack([np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 255, np.uint8)])
    clip[0, 0, 1] = (51, 102, 204)
    made = to_signed(clip)
    assert made.shape == (3, 2, 2, 2)
    assert made.dtype == torch.float32
    assert made.is_contiguous()
    assert made[:, 0, 0, 1].tolist() == pytest.approx([-0.6, -0.2, 0.6])
    assert made[:, 1].min() == 1.0
    assert made[:, 0, 1].max() == -1.0


def test_clips_of_any_form() -> None:
    clip = np.stack([ramp(4, 6), ramp(4, 6)[::-1]])
    assert np.array_equal(clip_of("video", list(clip)), clip)
    as_float = clip.astype(np.float32) / 255
    assert np.array_equal(clip_of("video", as_float), clip)
    assert np.array_equal(clip_of("video", as_float.transpose(0, 3, 1, 2)), clip)
    assert np.array_equal(clip_of("video", torch.from_numpy(clip)), clip)
    assert clip_of("video", ramp(4, 6)[None]).shape == (1, 4, 6, 3)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (ramp(4, 6), r"video must be \[T, height, width, 3\]"),
        (np.zeros((0, 4, 6, 3), np.uint8), "sides in|shape"),
        ([ramp(4, 6), ramp(4, 5)], "array of one shape|shape"),
        (np.zeros((2, 4, 6, 3), np.int32), "must be uint8, or float"),
        (np.zeros((2, 4, 6, 1), np.uint8), "RGB"),
        (np.broadcast_to(np.uint8(0), (2, 9000, 2, 3)), "sides in"),
        (None, "must be uint8"),
        (object(), "must be uint8"),
    ],
)
def test_bad_clips_are_refused(value: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        clip_of("video", value)


def test_pillow_images_are_frames() -> None:
    from PIL import Image

    image = ramp(4, 6)
    assert np.array_equal(frame_of("image", Image.fromarray(image)), image)
    with pytest.raises(RequestError, match="drop alpha"):
        frame_of("image", Image.fromarray(image).convert("RGBA"))


# ---------------------------------------------------------------- what generation starts from


@pytest.mark.parametrize(
    ("have", "want"),
    [((720, 1280), (480, 832)), ((100, 100), (48, 64)), ((31, 77), (48, 64)), ((48, 64), (48, 64))],
)
def test_covering_keeps_the_middle(have: tuple[int, int], want: tuple[int, int]) -> None:
    made = cover(ramp(*have), want)
    assert made.shape == (*want, 3)
    plain = cover(np.full((*have, 3), 93, np.uint8), want)
    assert (plain == 93).all()


def test_covering_is_antialiased_bilinear_with_a_rounded_middle() -> None:
    image = ramp(75, 100)
    # Width decides: 100 -> 64 is 0.64, 75 -> 48 exactly; height decides for 49 lines.
    levels = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    want = torch.nn.functional.interpolate(
        levels, size=(49, 66), mode="bilinear", align_corners=False, antialias=True
    )
    want = want[0, :, :, 1:65].round().clamp(0, 255).permute(1, 2, 0)
    assert np.array_equal(cover(image, (49, 64)), want.byte().numpy())


def test_frames_of_a_clip_to_start_from() -> None:
    clip = np.arange(9, dtype=np.uint8).reshape(9, 1, 1, 1)

    def taken(*args: Any, **options: Any) -> list[int]:
        return given_frames(clip, *args, **options).ravel().tolist()

    assert taken((0, 1)) == [0, 1, 2, 3, 4]
    assert taken((0, 1), keep="last") == [4, 5, 6, 7, 8]
    assert taken((0,)) == [0]
    assert taken((0,), keep="last") == [8]
    assert taken((0, 1, 2)) == list(range(9))
    assert taken((2,), keep="last") == list(range(9))
    assert given_frames(clip[:3], (0, 1)).ravel().tolist() == [0, 1, 2, 2, 2]
    assert given_frames(clip[:3], (0, 1), keep="last").ravel().tolist() == [0, 1, 2, 2, 2]
    with pytest.raises(RequestError, match="first or last"):
        check_keep("middle")
    with pytest.raises(RequestError, match="first or last"):
        check_keep(np.array(["first", "last"]))
    assert check_keep("last") == "last"


def test_clips_are_filled_or_cut() -> None:
    clip = np.arange(3, dtype=np.uint8).reshape(3, 1, 1, 1)
    assert fill_clip(clip, 2).ravel().tolist() == [0, 1]
    assert fill_clip(clip, 5).ravel().tolist() == [0, 1, 2, 2, 2]


def test_indexes_of_given_latents() -> None:
    assert check_indexes(None, 9) == (0, 1)
    assert check_indexes(None, 1) == (0,)
    assert check_indexes([2, 0, 2], 3) == (0, 2)
    for bad in ([], [3], [-1], [0.0], [True], "01", 0, [[0]]):
        with pytest.raises(RequestError, match="cond_frame_indexes must be integers in"):
            check_indexes(bad, 3)
