"""The image tower: the golden case, other sizes against transformers' classes, and its layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.minicpmv4_6 import configuration_minicpmv4_6 as peer_config
from transformers.models.minicpmv4_6 import modeling_minicpmv4_6 as peer
from transformers.vision_utils import get_vision_nearest_position_ids

from phyai.errors import CapacityError, RequestError
from phyai.models.minicpm_robot.config import HeadSizes, MiniCPMRobotConfig, TextSizes, VisionSizes
from phyai.models.minicpm_robot.network.vision import ImageTower
from phyai.models.minicpm_robot.network.vision_layout import VisionLayout, vision_layout
from phyai.timers import Profile
from tests.minicpm.head_runs import (
    ROOT,
    fill,
    golden_config,
    golden_tensors,
    placement,
    random_tensors,
)

ATOL = 2e-5
Grids = Sequence[tuple[int, int]]
CONFIG = MiniCPMRobotConfig(
    vision=VisionSizes(60, 88, 5, 5, image_size=18 * 14, insert_layer_id=2),
    text=TextSizes(hidden_size=36),
    head=HeadSizes(cross_attention_dim=36),
)
GRIDS: dict[str, Grids] = {
    "one": [(4, 8)],
    "three alike": [(8, 4)] * 3,
    "mixed": [(12, 4), (4, 4), (4, 4), (8, 20)],
    "larger than the table": [(24, 20)],
}


def tower_of(config: MiniCPMRobotConfig, seed: int = 0) -> ImageTower:
    tower = ImageTower(config, placement(), Profile())
    fill(tower, random_tensors(tower, seed))
    return tower


def patches_of(grids: Grids, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    count = sum(rows * columns for rows, columns in grids)
    return torch.rand(count, 588, generator=random) * 2 - 1


def run(tower: ImageTower, patches: Tensor, layout: VisionLayout) -> Tensor:
    with torch.no_grad():
        return tower(patches, layout)[: layout.image_tokens]


@pytest.fixture(scope="module")
def tower() -> ImageTower:
    return tower_of(CONFIG)


# ---------------------------------------------------------------- golden


def test_golden_case_with_every_intermediate() -> None:
    want, config = load_file(ROOT / "case_vision.safetensors"), golden_config()
    tower = ImageTower(config, placement(), Profile())
    fill(tower, golden_tensors(("vlm.vpm.", "vlm.vit_merger.", "vlm.resampler.")))
    strip = want.pop("pixel_values")
    patches = strip[0].unflatten(2, (-1, 14)).permute(2, 0, 1, 3).flatten(1)
    grids = [(int(h), int(w)) for h, w in want.pop("target_sizes")]
    told: dict[str, Tensor] = {}
    with torch.no_grad():
        tower(patches, vision_layout(grids, config), told.__setitem__)
    assert set(told) == {name.removeprefix("act.") for name in want}
    for name, value in want.items():
        got = told[name.removeprefix("act.")]
        torch.testing.assert_close(got, value.view(got.shape), atol=ATOL, rtol=0)


# ---------------------------------------------------------------- against transformers


@dataclass
class Peer:
    """The classes of the package transformers, with our tower's weights."""

    vision: Any
    merger: Any

    def __call__(self, patches: Tensor, grids: Grids, use_merger: bool) -> Tensor:
        strip = patches.view(-1, 3, 14, 14).permute(1, 2, 0, 3).flatten(2)[None]
        sizes = torch.tensor(list(grids), dtype=torch.int32)
        with torch.no_grad():
            hidden = self.vision(strip, target_sizes=sizes, use_vit_merger=use_merger)
            if use_merger:
                sizes = sizes // 2
            return torch.cat(self.merger(hidden.last_hidden_state, sizes))


def peer_of(config: MiniCPMRobotConfig, tensors: dict[str, Tensor]) -> Peer:
    sizes = {name: getattr(config.vision, name) for name in VisionSizes.__slots__}
    whole = peer_config.MiniCPMV4_6Config(
        text_config={"model_type": "qwen3_5_text", "hidden_size": config.text.hidden_size},
        vision_config=sizes,
        insert_layer_id=config.vision.insert_layer_id,
    )
    whole.vision_config._attn_implementation = "eager"
    vision = peer.MiniCPMV4_6VisionModel(whole.vision_config).eval()
    merger = peer.MiniCPMV4_6Merger(whole).eval()
    renamed = {
        name.removeprefix("vlm.").removeprefix("vpm."): value
        for name, value in tensors.items()
        if ".resampler." not in name
    }
    vision.load_state_dict(renamed)
    last = {
        name.removeprefix("vlm.resampler.")
        .replace("mlp.0.mlp.0.", "mlp.0.linear_1.")
        .replace("mlp.0.mlp.2.", "mlp.0.linear_2."): value
        for name, value in tensors.items()
        if ".resampler." in name
    }
    merger.load_state_dict(last)
    return Peer(vision, merger)


@pytest.fixture(scope="module")
def official() -> Peer:
    return peer_of(CONFIG, random_tensors(ImageTower(CONFIG, placement(), Profile())))


@pytest.mark.parametrize("name", GRIDS)
def test_image_tokens_equal_transformers(name: str, tower: ImageTower, official: Peer) -> None:
    grids = GRIDS[name]
    patches = patches_of(grids)
    got = run(tower, patches, vision_layout(grids, CONFIG))
    torch.testing.assert_close(got, official(patches, grids, True), atol=ATOL, rtol=0)


def test_mode_4x_leaves_the_window_merger_out(official: Peer) -> None:
    config = replace(CONFIG, downsample_mode="4x")
    grids = [(2, 6), (4, 4), (6, 2)]
    patches, layout = patches_of(grids), vision_layout(grids, config)
    got = run(tower_of(config), patches, layout)
    assert got.shape == (3 + 4 + 3, 36)
    torch.testing.assert_close(got, official(patches, grids, False), atol=ATOL, rtol=0)


@pytest.mark.parametrize("side", [10, 70])
def test_position_entries_equal_transformers(side: int) -> None:
    """Patches on a boundary of the table: float32 rounding decides."""
    config = replace(CONFIG, vision=replace(CONFIG.vision, image_size=side * 14))
    for count in range(4, 144, 4):
        layout = vision_layout([(count, 4)], config)
        want = get_vision_nearest_position_ids(torch.tensor([[count, 4]]), side)
        assert torch.equal(layout.official()["position_ids"], want)


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("mode", ["16x", "4x"])
@pytest.mark.parametrize("name", GRIDS)
def test_a_bucket_changes_nothing(name: str, mode: str) -> None:
    config, grids = replace(CONFIG, downsample_mode=mode), GRIDS[name]
    tower, patches, layout = tower_of(config), patches_of(grids), vision_layout(grids, config)
    padded = layout.padded(layout.patches + 32, layout.images + 2, layout.longest + 16)
    assert padded.runs is None
    want, got = run(tower, patches, layout), run(tower, patches, padded)
    torch.testing.assert_close(got, want, atol=ATOL, rtol=0)


def test_a_full_bucket_of_equal_images_needs_no_mask(tower: ImageTower) -> None:
    grids = [(8, 4), (4, 8), (8, 4)]
    patches, layout = patches_of(grids), vision_layout(grids, CONFIG)
    even = layout.padded(96, 3, 32, even=True)
    assert even.runs == layout.runs == ((3, 32),)
    assert torch.equal(run(tower, patches, even), run(tower, patches, layout))
    with pytest.raises(CapacityError, match="exactly 4 images"):
        layout.padded(128, 4, 32, even=True)


def test_images_that_do_not_fit_are_refused() -> None:
    layout = vision_layout([(8, 8), (4, 4)], CONFIG)
    for sizes in ((64, 2, 64), (96, 1, 64), (96, 2, 48), (90, 2, 64)):
        with pytest.raises(CapacityError):
            layout.padded(*sizes)


def test_patches_may_lie_apart(tower: ImageTower) -> None:
    grids = [(4, 8), (4, 4)]
    patches, layout = patches_of(grids), vision_layout(grids, CONFIG)
    at = torch.cat([torch.arange(32) + 5, torch.arange(16) + 60])
    spread = torch.full((80, 588), float("nan"))
    spread[at] = patches
    want = run(tower, patches, layout)
    for moved in (layout.placed(at), layout.padded(64, 3, 48).placed(at)):
        torch.testing.assert_close(run(tower, spread, moved), want, atol=ATOL, rtol=0)
        assert moved.official().keys() == layout.official().keys()
        for name, value in layout.official().items():
            assert torch.equal(moved.official()[name], value)


def test_images_do_not_see_each_other(tower: ImageTower) -> None:
    grids = GRIDS["mixed"]
    patches = patches_of(grids)
    together, first, done = run(tower, patches, vision_layout(grids, CONFIG)), 0, 0
    for rows, columns in grids:
        count, tokens = rows * columns, rows * columns // 16
        alone = run(tower, patches[first : first + count], vision_layout([(rows, columns)], CONFIG))
        torch.testing.assert_close(together[done : done + tokens], alone, atol=ATOL, rtol=0)
        first, done = first + count, done + tokens


def test_listening_tells_only_of_the_images_there_are(tower: ImageTower) -> None:
    grids = GRIDS["mixed"]
    patches, layout = patches_of(grids), vision_layout(grids, CONFIG)
    exact: dict[str, Tensor] = {}
    padded: dict[str, Tensor] = {}
    with torch.no_grad():
        tower(patches, layout, exact.__setitem__)
        tower(patches, layout.padded(320, 5, 192), padded.__setitem__)
    assert exact.keys() == padded.keys()
    for name, value in exact.items():
        torch.testing.assert_close(padded[name], value, atol=ATOL, rtol=0)


def test_patches_are_counted_and_run_once() -> None:
    tower = tower_of(CONFIG)
    grids = GRIDS["mixed"]
    run(tower, patches_of(grids), vision_layout(grids, CONFIG))
    counters = tower.profile.counters
    assert (counters["vision_calls"], counters["vision_patches"]) == (1, 240)


def test_no_image_makes_no_token(tower: ImageTower) -> None:
    assert run(tower, torch.zeros(0, 588), vision_layout([], CONFIG)).shape == (0, 36)


@pytest.mark.parametrize("grid", [(0, 4), (4, 6), (-4, 4)])
def test_a_grid_that_cannot_be_merged_is_refused(grid: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match="multiples of 4"):
        vision_layout([(4, 4), grid], CONFIG)


def test_bfloat16_stays_close(official: Peer) -> None:
    grids = GRIDS["mixed"]
    tower = ImageTower(CONFIG, placement(torch.bfloat16), Profile())
    fill(tower, random_tensors(ImageTower(CONFIG, placement(), Profile())))
    patches = patches_of(grids)
    got = run(tower, patches, vision_layout(grids, CONFIG))
    assert got.dtype == torch.bfloat16
    want = official(patches, grids, True)
    assert float(torch.cosine_similarity(got.float(), want).min()) > 0.99
