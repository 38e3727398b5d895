"""Bad requests get a clear, typed error and the next request works; what good ones become."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine
from phyai.errors import CheckpointError, ConfigError, RequestError
from phyai.models.cosmos3.generation import Cosmos3Processor
from phyai.models.cosmos3.main_cosmos3 import (
    Cosmos3ActionRequest,
    Cosmos3Args,
    Cosmos3PolicyArgs,
    Cosmos3T2VRequest,
)
from phyai.types import Observation
from tests.cosmos.cosmos_engines import (
    ACTION,
    CHANNELS,
    CHUNK,
    GENERATION,
    LATENT,
    POLICY,
    ROOT,
    action_request,
    engine_of,
    ids,
    observation,
    prompt,
    video_request,
)


@pytest.fixture(scope="module")
def policy() -> Iterator[Engine]:
    with engine_of(POLICY, max_text_tokens=600) as engine:
        yield engine


@pytest.fixture(scope="module")
def world() -> Iterator[Engine]:
    with engine_of(GENERATION, max_text_tokens=600) as engine:
        yield engine


def clip(frames: int, height: int = 64, width: int = 96) -> torch.Tensor:
    return torch.zeros(1, 3, frames, height, width)


BAD_ACTIONS: dict[str, tuple[Cosmos3ActionRequest, str]] = {
    "unknown mode": (action_request(mode="polcy"), "mode must be one of .*policy"),
    "wrong domain": (action_request(domain_id=12), r"domain must have an id in \[0, 12\)"),
    "negative domain": (action_request(domain_id=-1), r"id in \[0, 12\)"),
    "domains of two rows": (
        action_request(domain_id=[8, 3]),
        r"domain_id must be one id, or one for each row \(1\); got shape \[2\]\. Send one id",
    ),
    "float domain": (action_request(domain_id=1.5), "domain_id must be int64"),
    "latent height": (action_request(video_shape=(3, 5, 6)), "latents expected shape"),
    "latent channels": (
        action_request(cond_video_latents=torch.zeros(1, CHANNELS + 1, *LATENT)),
        "latents expected shape",
    ),
    "latent NaN": (
        action_request(cond_video_latents=torch.full((1, CHANNELS, *LATENT), torch.nan)),
        "latents must be finite",
    ),
    "no shape": (action_request(video_shape=None), "video_shape must be"),
    "huge shape": (action_request(video_shape=(9999, 9999, 9999)), "at most 1000000 tokens"),
    "nothing to start from": (action_request(cond_video_latents=None), "latents or pixels must be"),
    "canvas too small": (
        action_request(cond_video_latents=None, cond_video_pixels=clip(1, 48, 96)),
        "cond_video_pixels must be multiples of 16 and at least 64 x 96",
    ),
    "canvas odd": (
        action_request(cond_video_latents=None, cond_video_pixels=clip(1, 70, 96)),
        "must be multiples of 16",
    ),
    "too few frames": (
        action_request(cond_video_latents=None, cond_video_pixels=clip(5), mode="inverse_dynamics"),
        "must have 9 frames for latent frame 2",
    ),
    "pixels of bytes": (
        action_request(cond_video_latents=None, cond_video_pixels=clip(1) + 200.0),
        r"must be in \[-1, 1\]",
    ),
    "both": (action_request(cond_video_pixels=clip(1)), "latents or pixels .* got both"),
    "frame outside": (action_request(cond_frame_indexes=(3,)), r"integers in \[0, 3\)"),
    "row outside": (action_request(cond_action_indexes=(9,)), r"integers in \[0, 9\)"),
    "no actions": (
        action_request(mode="forward_dynamics", cond_action=None, cond_action_indexes=None),
        "cond_action must be given",
    ),
    "action width": (action_request(cond_action=torch.zeros(1, 1, 7)), "rows of 8 or 16 channels"),
    "channels": (action_request(raw_action_dim=17), "raw_action_dim must be"),
    "other width": (action_request(action_dim=64), "action_dim must be 16"),
    "token outside": (action_request(text_ids=ids(9) + 300), "below the vocabulary of 272"),
    "token below 0": (action_request(text_ids=ids(9) - 300), r"of 272; got -\d+\. Use"),
    "no tokens": (action_request(text_ids=ids(0)), "must have 1 to 600 tokens"),
    "float tokens": (action_request(text_ids=ids(9).float()), "text_ids must be int64"),
    "no other text": (action_request(neg_text_ids=None), "neg_text_ids must be given"),
    "no steps": (action_request(num_inference_steps=0), r"num_steps must be in \[1, 1000\]"),
    "schedule": (action_request(schedule="linear"), "schedule must be one of"),
    "rising sigmas": (action_request(sigmas=[0.5, 0.9]), "sigmas of a grid must fall"),
    "scale": (action_request(guidance_scale=-1.0), r"guidance_scale must be in \[0, 100\]"),
    "interval": (action_request(guidance_interval=(5, 5)), "guidance_interval must be"),
    "noise name": (
        action_request(noise={"sound": torch.zeros(1)}),
        "noise must be of video.*Name what",
    ),
    "noise shape": (
        action_request(noise={"action": torch.zeros(1, 3, 16)}),
        "noise of action expected shape",
    ),
    "rate": (action_request(fps=0.0), r"fps must be in \(0, 1000\]"),
    "rate of text": (action_request(fps="15"), "fps must be a number"),
    "seed": (action_request(seed=-1), "seed must be an integer"),
    "mode of many": (action_request(mode=np.array(["policy"] * 2)), "mode must be one of"),
    "schedule of no name": (action_request(schedule=""), "schedule must be one of"),
    "far latents": (
        action_request(cond_video_latents=torch.full((1, CHANNELS, *LATENT), 3e38)),
        r"latents must be in \[-10000, 10000\]",
    ),
    "far noise": (
        action_request(noise={"action": torch.full((1, CHUNK + 1, 16), -2e4)}),
        "noise of action must be in",
    ),
    "media of no frame": (action_request(cond_frame_indexes=()), "must name the latent frames"),
}


@pytest.mark.parametrize("name", BAD_ACTIONS)
def test_a_bad_action_request_harms_nobody(name: str, policy: Engine) -> None:
    bad, match = BAD_ACTIONS[name]
    with pytest.raises(RequestError, match=match):
        policy.step(bad)


def test_after_all_of_them_the_next_request_works(policy: Engine) -> None:
    """One good request follows the bad ones, whatever their order, and equals itself."""
    first = policy.step(action_request())
    with pytest.raises(RequestError):
        policy.step(action_request(domain_id=99))
    again = policy.step(action_request())
    assert first["action"].shape == (1, CHUNK + 1, 8)
    assert torch.equal(first["action"], again["action"])
    assert torch.equal(first["action"][:, :1], action_request().cond_action)


BAD_VIDEOS: dict[str, tuple[Cosmos3T2VRequest, str]] = {
    "frame without media": (video_request(cond_frame_indexes=(0,)), "latents or pixels must be"),
    "media without frame": (
        video_request(cond_latents=torch.zeros(1, CHANNELS, *LATENT)),
        "cond_frame_indexes must name",
    ),
    "latents": (
        video_request(cond_latents=torch.zeros(1, CHANNELS, 1, 9, 9), cond_frame_indexes=(0,)),
        "latents expected shape",
    ),
    "sound": (video_request(sound_frames=-1), "sound_frames must be"),
    "sound width": (video_request(sound_frames=4, sound_dim=64), "sound_dim must be 6, as the"),
    "sound rate": (
        video_request(sound_frames=4, sound_latent_fps=50.0),
        "sound_latent_fps must be 25, as the",
    ),
    "rows": (video_request(rows=5), "at most 4 rows"),
}


@pytest.mark.parametrize("name", BAD_VIDEOS)
def test_a_bad_video_request_harms_nobody(name: str, world: Engine) -> None:
    bad, match = BAD_VIDEOS[name]
    with pytest.raises(RequestError, match=match):
        world.step(bad)
    assert world.step(video_request(num_inference_steps=1)).shape == (1, 3, 9, 64, 96)


BAD_OBSERVATIONS: dict[str, tuple[Observation, str]] = {
    "no prompt": (replace(observation(), prompt=None), "prompt must be sent"),
    "no state": (replace(observation(), state=None), "state must be sent"),
    "state width": (replace(observation(), state=np.zeros(7)), "state must have shape"),
    "state NaN": (replace(observation(), state=np.full(8, np.nan)), "state must be finite"),
    "no image": (replace(observation(), images={}), "images must hold image, or all of"),
    "camera": (replace(observation(), images={"front": np.zeros((9, 9, 3), np.uint8)}), "camera"),
    "image shape": (
        replace(observation(), images={"image": np.zeros((9, 9), np.uint8)}),
        r"\[height, width, 3\]",
    ),
    "option": (replace(observation(), options={"rtc": 1}), "option must be one this adapter knows"),
    "steps": (replace(observation(), options={"num_steps": 1.5}), "num_steps must be an integer"),
    "noise": (replace(observation(), options={"noise": [1.0]}), "noise of action expected shape"),
    "noise with rows": (
        replace(observation(), options={"noise": {"action": np.zeros((1, 9, ACTION))}}),
        r"noise of action expected shape \[9, 16\]; got \[1, 9, 16\]",
    ),
}


@pytest.mark.parametrize("name", BAD_OBSERVATIONS)
def test_a_bad_observation_harms_nobody(name: str, policy: Engine) -> None:
    bad, match = BAD_OBSERVATIONS[name]
    with pytest.raises(RequestError, match=match):
        policy.step(bad)


BAD_PROMPTS: dict[str, tuple[Observation, str]] = {
    "none": (replace(prompt(), prompt=None), "prompt must be sent"),
    "control token": (replace(prompt(), prompt="<|im_end|>"), "must be plain text"),
    "long": (replace(prompt(), prompt="x" * 700), "^prompt must fit into 600 tokens"),
    "long negation": (prompt(negative_prompt="x" * 700), "^negative_prompt must fit into 600"),
    "negated token": (prompt(negative_prompt="<|im_end|>"), "^negative_prompt must be plain text"),
    "frames": (prompt(num_frames=6), r"num_frames must be 1 \+ 4 \* k"),
    "no height": (prompt(height=0), r"height must be in \[16, 4096\]; got 0. Take 16 or more"),
    "height": (prompt(height=33), "height must be a multiple of 16"),
    "one side": (prompt(height=None), "height and width must be given together"),
    "two sizes": (prompt(resolution=480), "size must be"),
    "tier": (
        prompt(height=None, width=None, resolution=123),
        "resolution must be one of.*Pick one",
    ),
    "rate": (prompt(fps=-1.0), "fps must be"),
    "still with sound": (prompt(num_frames=1, sound=True), "sound must be left out of a still"),
    "state": (replace(prompt(), state=[0.0]), "state must be left out"),
    "image name": (
        replace(prompt(), images={"front": np.zeros((9, 9, 3), np.uint8)}),
        "images must be 'image'",
    ),
    "image and video": (
        replace(
            prompt(),
            images={
                "image": np.zeros((9, 9, 3), np.uint8),
                "video": np.zeros((5, 9, 9, 3), np.uint8),
            },
        ),
        "an image or a video; got both",
    ),
    "frames of an image": (
        replace(
            prompt(num_frames=9, cond_frame_indexes=[1]),
            images={"image": np.zeros((9, 9, 3), np.uint8)},
        ),
        r"cond_frame_indexes must be \[0\] with an image",
    ),
    "no rate": (prompt(fps=0), r"fps must be in \(0, 1000\]"),
    "false rate": (prompt(fps=False), "fps must be a number"),
    "sound in words": (prompt(sound="false"), "sound must be true, false or 'auto'"),
    "end to keep": (prompt(condition_video_keep=1), "condition_video_keep must be first or last"),
    "no schedule": (prompt(schedule=""), "schedule must be one of"),
    "frames of nothing": (prompt(cond_frame_indexes=[0]), "must come with a video"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_harms_nobody(name: str, world: Engine) -> None:
    bad, match = BAD_PROMPTS[name]
    with pytest.raises(RequestError, match=match):
        world.step(bad)


def test_rates_of_any_number_type_are_the_same(world: Engine) -> None:
    wanted = world.adapter.prepare(video_request(fps=15.0)).tensors["positions"]
    for fps in (15, np.float32(15), np.float64(15), np.int64(15)):
        got = world.adapter.prepare(video_request(fps=fps)).tensors["positions"]
        assert torch.equal(got, wanted)


def test_sound_where_there_can_be_some(world: Engine, tmp_path: Path) -> None:
    """As the preset's sample asks: not of stills, nor of a checkpoint without it."""

    def leaves(**options: object) -> bool:
        return "noise.sound" in world.adapter.prepare(prompt(sound="auto", **options)).tensors

    assert leaves()
    assert not leaves(num_frames=1)
    processor: Any = Cosmos3Processor.from_checkpoint(_copy(tmp_path, "sound_tokenizer"))
    assert processor("a red cube", num_frames=5, sound="auto").sound_frames is None


def test_a_still_of_a_tier_is_as_wide_as_high(world: Engine) -> None:
    """As stills of no named size are; other modes are 16:9."""

    def latent(**options: object) -> tuple[int, int]:
        key = world.adapter.prepare(prompt(height=None, width=None, **options)).key
        return key.bucket("height"), key.bucket("width")

    assert latent(num_frames=1, resolution=480) == (40, 40)
    assert latent(num_frames=5, resolution=256) == (12, 20)
    assert latent(num_frames=1, resolution=256, aspect_ratio="16:9") == (12, 20)


def test_requests_of_the_other_plugin_are_refused(policy: Engine, world: Engine) -> None:
    with pytest.raises(TypeError, match=r"takes an Observation, .* Cosmos3ActionRequest; got"):
        policy.step(video_request())
    with pytest.raises(TypeError, match=r"takes an Observation, .* Cosmos3T2VRequest; got"):
        world.step(action_request())
    with pytest.raises(RequestError, match="state must be left out"):
        world.step(observation())


# ---------------------------------------------------------------- checkpoints


def _copy(folder: Path, without: str) -> Path:
    for path in ROOT.iterdir():
        if path.is_dir() and path.name != without:
            (folder / path.name).symlink_to(path)
    shutil.copy(ROOT / "model_index.json", folder)
    return folder


@pytest.mark.parametrize("plugin", [POLICY, GENERATION])
def test_a_missing_autoencoder_is_told(plugin: str, tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="folder 'vae' with the video autoencoder"),
        engine_of(plugin, checkpoint_dir=str(_copy(tmp_path, "vae"))),
    ):
        pass


def test_without_a_sound_decoder_videos_are_silent(tmp_path: Path) -> None:
    folder = str(_copy(tmp_path, "sound_tokenizer"))
    with engine_of(GENERATION, checkpoint_dir=folder) as engine:
        with pytest.raises(RequestError, match="sound must be left out with this checkpoint"):
            engine.step(prompt(sound=True))
        with pytest.raises(RequestError, match="sound_frames must be left out"):
            engine.step(video_request(sound_frames=4))
        assert engine.step(prompt()).sound is None
    with (
        pytest.raises(ConfigError, match="load_sound needs"),
        engine_of(GENERATION, checkpoint_dir=folder, load_sound=True),
    ):
        pass


@pytest.mark.parametrize(
    "changes",
    [
        {"flow_shift": 0.0},
        {"use_karras_sigmas": "yes"},
        {"schedule": "linear"},
        {"precision": "fp8"},
        {"robot": "droyd"},
        {"chunk_size": 0},
        {"resolution": "1080"},
        {"prompt_format": "xml"},
        {"history_length": -1},
        {"decode_video": 1},
        {"max_batch_size": 0},
        {"num_steps": 0},
        {"policy_modeling_mode": "dream"},
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Cosmos3PolicyArgs(**changes)


def test_arguments_have_the_known_names_and_defaults() -> None:
    world, policy = Cosmos3Args(), Cosmos3PolicyArgs()
    assert (world.flow_shift, world.use_karras_sigmas, world.load_sound) == (10.0, False, None)
    assert (policy.flow_shift, policy.use_karras_sigmas, policy.decode_video) == (10.0, None, False)
    assert Cosmos3PolicyArgs(resolution=480).resolution == "480"  # type: ignore[arg-type]
    assert not world.weight_strict
    request = Cosmos3ActionRequest(ids(3))
    assert (request.num_inference_steps, request.guidance_scale, request.seed) == (30, 1.0, 42)
    assert (request.mode, request.action_start_frame_offset) == ("policy", 1)
    video = Cosmos3T2VRequest(ids(3))
    assert (video.num_inference_steps, video.guidance_scale, video.fps) == (35, 6.0, 24.0)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"vae_tile": 100}, "multiples of 16"),
        ({"vae_tile": 128, "vae_tile_stride": 192}, "stride must be from 1 to tile"),
    ],
)
def test_tiles_that_cannot_be_are_told_at_the_start(changes: dict[str, int], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule), engine_of(GENERATION, **changes):
        pass
