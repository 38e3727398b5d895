"""Padding changes no valid token: rows together or alone, exact shapes or buckets, any layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phyai.backbones.qwen3_vl import TextLayout, VisionLayout, text_layout, vision_layout
from phyai.errors import CapacityError, RequestError
from tests.backbones.golden_backbone import CASES, Backbone, Case, backbone, case, layouts, run

MIXED = next(path for path in CASES if path.stem == "case_b2_2cam_pad_4steps")
CLOSE = {"rtol": 0, "atol": 2e-5}


@pytest.fixture(scope="module")
def model() -> Backbone:
    return backbone()


@pytest.fixture(scope="module")
def mixed(model: Backbone) -> Case:
    return case(MIXED, model)


def features(
    model: Backbone, patches: Tensor, vision: VisionLayout, text: TextLayout
) -> tuple[Tensor, Tensor]:
    seen = run(model, patches, vision, text)
    return seen["vision.merged"], seen["backbone.features"][: text.tokens]


def test_each_row_equals_its_solo_result(model: Backbone, mixed: Case) -> None:
    patches = mixed.tensors["in.pixel_values"]
    vision, text = layouts(mixed, model)
    assert not vision.dense
    assert not text.dense
    _, together = features(model, patches, vision, text)
    at = first = 0
    for row, grids in zip(mixed.rows, mixed.grids, strict=True):
        count = sum(t * h * w for t, h, w in grids)
        alone = Case(mixed.tensors, [row], [grids])
        parts = layouts(alone, model)
        assert parts[1].dense
        _, solo = features(model, patches[at : at + count], *parts)
        torch.testing.assert_close(solo, together[first : first + len(row)], **CLOSE)
        at, first = at + count, first + len(row)


def padded_patches(patches: Tensor, count: int) -> Tensor:
    """Rows of a bucket; what stands behind the batch's own is not zero."""
    return torch.cat([patches, torch.full((count - len(patches), patches.shape[1]), 7.0)])


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_bucket_equals_exact_shapes(path: object, model: Backbone) -> None:
    found = case(path, model)  # type: ignore[arg-type]
    patches = found.tensors["in.pixel_values"]
    vision, text = layouts(found, model)
    merged, want = features(model, patches, vision, text)
    count, frames = len(patches) + 24, vision.frames + 2
    wide = vision.padded(count, frames, vision.longest + 8)
    long = text.padded(text.tokens + 30, count // 4, text.rows + 1, text.longest + 20)
    assert (wide.dense, long.dense) == (False, False)
    assert [len(long.tensors()[n]) for n in ("order", "cos")] == [text.tokens + 30] * 2
    got_merged, got = features(model, padded_patches(patches, count), wide, long)
    torch.testing.assert_close(got_merged[: len(merged)], merged, **CLOSE)
    torch.testing.assert_close(got, want, **CLOSE)


def test_a_bucket_of_one_row_moves_nothing(model: Backbone) -> None:
    found = case(CASES[0], model)
    patches = found.tensors["in.pixel_values"]
    vision, text = layouts(found, model)
    _, want = features(model, patches, vision, text)
    long = text.padded(text.tokens + 9, text.image_tokens, 1, text.tokens + 9)
    more = vision.padded(2 * vision.longest, 2, vision.longest)
    assert (long.dense, more.dense) == (True, True)
    long = long.padded(text.tokens + 9, len(patches) // 4 * 2, 1, text.tokens + 9)
    _, got = features(model, padded_patches(patches, 2 * len(patches)), more, long)
    torch.testing.assert_close(got, want, **CLOSE)


def test_dense_layouts_equal_scattered_ones(model: Backbone) -> None:
    found = case(CASES[0], model)
    vision, text = layouts(found, model)
    assert vision.dense
    assert text.dense
    patches = found.tensors["in.pixel_values"]
    _, want = features(model, patches, vision, text)
    _, got = features(model, patches, replace(vision, dense=False), replace(text, dense=False))
    torch.testing.assert_close(got, want, **CLOSE)


def test_frames_of_one_image_do_not_see_each_other(model: Backbone) -> None:
    patches = torch.randn(32, 1536, generator=torch.Generator().manual_seed(1))
    both = vision_layout([(2, 4, 4)], model.vision_config)
    one = vision_layout([(1, 4, 4)], model.vision_config)
    assert both.frames == 2
    with torch.no_grad():
        merged, _ = model.vision(patches, both)
        first, _ = model.vision(patches[:16], one)
    torch.testing.assert_close(merged[:4], first, **CLOSE)


def test_a_prompt_without_images(model: Backbone) -> None:
    text = text_layout([torch.tensor([5, 6, 7])], [[]], model.text_config, image_token_id=261)
    empty = vision_layout([], model.vision_config)
    assert (empty.patches, empty.frames, text.image_tokens) == (0, 0, 0)
    with torch.no_grad():
        want = model.text(model.text.inputs(text), text)
        bucket, room = text.padded(8, 4, 1, 8), torch.ones(4, 64)
        x = model.text.inputs(bucket, room)
        got = model.text(x, bucket, [room] * 3)
    torch.testing.assert_close(got[:3], want, **CLOSE)
    assert empty.padded(16, 1, 16).key_mask.sum() == 0


def test_keys_and_values_are_handed_out(model: Backbone, mixed: Case) -> None:
    _, text = layouts(mixed, model)
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    x = torch.randn(text.tokens, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model.text(x, text, keep_kv=lambda layer, k, v: kept.update({layer: (k, v)}))
    assert sorted(kept) == list(range(len(model.text.layers)))
    assert kept[0][0].shape == kept[0][1].shape == (text.tokens, 2, 16)
    layer = model.text.layers[0]
    n = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.norm1.weight
    layer.qkv.unpack()
    want = n @ layer.qkv.weight[96:].T
    torch.testing.assert_close(kept[0][1].flatten(1), want, rtol=1e-4, atol=1e-5)


def test_isolated_tokens_only_pass_the_mlps(model: Backbone) -> None:
    """As the stack does with attention that gives zeros."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    layout = text_layout([torch.tensor([1, 2, 3])], [[]], model.text_config, image_token_id=261)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for layer in model.text.layers:
            patch.setattr(layer, "_attention", lambda q, k, v, scale: torch.zeros_like(q))
        want = model.text(x, layout)
    with torch.no_grad():
        got = model.text.isolated(x)
        assert not torch.allclose(got, model.text(x, layout), atol=1e-2)
    torch.testing.assert_close(got, want, **CLOSE)


def test_a_bucket_that_is_too_small_is_refused(model: Backbone, mixed: Case) -> None:
    vision, text = layouts(mixed, model)
    with pytest.raises(CapacityError, match="images must fit the bucket of 8 patches"):
        vision.padded(8, 9, 9999)
    with pytest.raises(CapacityError, match="Use a larger bucket"):
        text.padded(text.tokens, text.image_tokens, 1, text.longest)


@pytest.mark.parametrize("grid", [(1, 3, 4), (1, 4, 0), (0, 4, 4)])
def test_grids_that_cannot_be_merged_are_refused(model: Backbone, grid: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="multiples of 2; got"):
        vision_layout([grid], model.vision_config)  # type: ignore[list-item]


def test_image_tokens_must_be_those_of_the_images(model: Backbone) -> None:
    ids = torch.tensor([1, 261, 261, 2, 261, 261])
    for grids, message in (
        ([(1, 4, 4), (1, 2, 4)], "got 4 for images of"),
        ([(1, 4, 4)], "side by side"),
    ):
        with pytest.raises(RequestError, match=message):
            text_layout([ids], [grids], model.text_config, image_token_id=261)
