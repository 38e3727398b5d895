"""Positions, rotary tables and time features against the golden case; limits of what is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.errors import RequestError
from phyai.kernels import KernelTable
from phyai.layers import Placement
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.network.positions import (
    action_positions,
    media_positions,
    sound_positions,
    text_positions,
    video_positions,
)
from phyai.models.cosmos3.network.rope import MRope
from phyai.models.cosmos3.network.time_embedding import time_features
from tests.cosmos.direct_network import ROOT, read_case

CONFIG = Cosmos3Config.from_folder(ROOT)
TEXT = 23


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return read_case("case_rope_time")[0]


def behind_text(positions: Tensor) -> Tensor:
    """Add text and margin to the time, as encode does."""
    out = positions.clone()
    out[0] += TEXT + CONFIG.margin
    return out


BUILT = {
    "video": lambda: video_positions(CONFIG, (4, 2, 3), 15.0),
    "video24": lambda: video_positions(CONFIG, (4, 2, 3), 24.0),
    "image": lambda: video_positions(CONFIG, (1, 2, 3), None),
    "action_off0": lambda: action_positions(CONFIG, 6, 15.0, 0),
    "action_off1": lambda: action_positions(CONFIG, 6, 15.0, 1),
    "sound": lambda: sound_positions(CONFIG, 6),
}


def test_every_builder_of_the_case_is_known(golden: dict[str, Tensor]) -> None:
    assert {f"ids.{name}" for name in BUILT} == {k for k in golden if k.startswith("ids.")}


@pytest.mark.parametrize("name", BUILT)
def test_positions_are_exact(name: str, golden: dict[str, Tensor]) -> None:
    built = behind_text(BUILT[name]())
    assert built.dtype == torch.float32
    assert torch.equal(built, golden[f"ids.{name}"])


def test_rotary_tables_are_the_golden_ones(golden: dict[str, Tensor]) -> None:
    rope = MRope(CONFIG, Placement(KernelTable(), torch.device("cpu"), torch.float32))
    cos, sin = rope(golden["position_ids"])
    assert float((cos - golden["cos"]).abs().max()) < 1e-5
    assert float((sin - golden["sin"]).abs().max()) < 1e-5


def test_time_features_are_the_golden_ones(golden: dict[str, Tensor]) -> None:
    features = time_features(golden["time.t"], CONFIG.timestep_scale)
    assert float((features - golden["time.freq"]).abs().max()) < 1e-5
    rounded = time_features(golden["time.t"].bfloat16(), CONFIG.timestep_scale)
    assert float((rounded - golden["time.freq"]).abs().max()) > 1e-4


@pytest.mark.parametrize(
    "case", ["policy_state", "policy_nostate", "forward_dynamics", "t2v", "v2v", "t2v_sound", "t2i"]
)
def test_the_positions_of_a_whole_request_are_exact(case: str) -> None:
    tensors, about = read_case(f"case_tr_{case}")
    frames, height, width = about["grid"]
    media = media_positions(
        CONFIG,
        frames=frames,
        rows=-(-height // 2),
        columns=-(-width // 2),
        fps=about["fps"],
        actions=about["action_len"],
        action_start=about["action_start_frame_offset"],
        sound=about["sound_len"],
    )
    whole = torch.cat([text_positions(TEXT), behind_text(media)], dim=1)
    stored = tensors.get("position_ids", tensors.get("mid.position_ids"))
    assert stored is not None
    assert torch.equal(whole, stored)


def test_video_frame_and_every_fourth_action_share_a_time() -> None:
    video = video_positions(CONFIG, (9, 1, 1), 15.0)
    actions = action_positions(CONFIG, 33, 15.0, 0)
    assert float((video[0] - actions[0, ::4]).abs().max()) < 1e-5


def test_rows_from_before_lie_before_the_first_frame() -> None:
    actions = action_positions(CONFIG, 4, 12.0, -1)
    assert actions[0].tolist() == [-0.5, 0.0, 0.5, 1.0]


def test_single_rows_and_frames_and_switched_off_rates_count_in_whole_numbers() -> None:
    assert action_positions(CONFIG, 1, 15.0, 1)[0].tolist() == [1.0]
    assert video_positions(CONFIG, (1, 1, 1), 15.0)[0].tolist() == [0.0]
    plain = replace(CONFIG, enable_fps_modulation=False)
    assert video_positions(plain, (3, 1, 1), 15.0)[0].tolist() == [0.0, 1.0, 2.0]
    assert sound_positions(plain, 3)[0].tolist() == [0.0, 1.0, 2.0]


def test_the_clock_is_that_of_the_autoencoder() -> None:
    """With 8 frames in a latent one second is base_fps / 8 positions of time."""
    times = media_positions(CONFIG, frames=2, rows=1, columns=1, fps=12.0, actions=9, temporal=8)[0]
    assert times[:2].tolist() == [0.0, 2.0]  # eight frames later, at half the base rate
    assert times[2] == 0.0
    assert times[10] == times[1]


@pytest.mark.parametrize("fps", [0, -24.0, float("nan"), float("inf"), "24", True])
def test_an_impossible_rate_is_refused(fps: Any) -> None:
    with pytest.raises(RequestError, match="fps must be a positive number"):
        media_positions(CONFIG, frames=3, rows=1, columns=1, fps=fps)
