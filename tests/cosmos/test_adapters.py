"""What the adapters do with a request: branches, schedules, progress, known parts, decoding."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine
from phyai.models.cosmos3.decoding import decode_frames, decode_pixels, tiling
from phyai.models.cosmos3.main_cosmos3 import (
    Cosmos3Args,
    Cosmos3GenerationPostProcessor,
    pixel_to_latent_shape,
)
from phyai.models.cosmos3.vae import RankTiling, SpatialTiling
from phyai.parallel import Group
from phyai.types import Media
from tests.cosmos.cosmos_engines import (
    CHANNELS,
    CHUNK,
    GENERATION,
    LATENT,
    POLICY,
    SOUND,
    action_request,
    engine_of,
    ids,
    observation,
    prompt,
    video_request,
)
from tests.cosmos.direct_media import case, worst


@pytest.fixture(scope="module")
def policy() -> Iterator[Engine]:
    with engine_of(POLICY) as engine:
        yield engine


@pytest.fixture(scope="module")
def world() -> Iterator[Engine]:
    with engine_of(GENERATION) as engine:
        yield engine


def key_of(engine: Engine, request: Any) -> Any:
    return engine.adapter.prepare(request).key


def evaluations(engine: Engine) -> dict[str, int]:
    counters = engine.core.services.profile.counters
    return {name: counters[f"evaluations.{name}"] for name in ("cond", "uncond")}


# ---------------------------------------------------------------- keys


def test_guidance_one_asks_for_one_branch(policy: Engine) -> None:
    assert key_of(policy, action_request()).branches == ("cond", "uncond")
    alone = action_request(guidance_scale=1.0, neg_text_ids=None)
    assert key_of(policy, alone).branches == ("cond",)
    before = evaluations(policy)
    policy.step(alone)
    after = evaluations(policy)
    assert after["cond"] > before["cond"]
    assert after["uncond"] == before["uncond"]


def test_the_guided_interval_is_strict_in_timesteps(policy: Engine) -> None:
    """Of timesteps 999, 937, 833, 624 only those strictly inside are guided."""
    request = action_request(num_inference_steps=4, guidance_interval=(833, 999))
    policy.step(request)
    before = evaluations(policy)
    policy.step(request)
    after = evaluations(policy)
    cond, uncond = (after[name] - before[name] for name in ("cond", "uncond"))
    assert (cond, uncond) == (4, 1)  # 937 alone
    edge = action_request(num_inference_steps=4, guidance_interval=(960, 1001))
    assert not torch.equal(policy.step(edge)["action"], policy.step(request)["action"])


@pytest.mark.parametrize(
    ("args", "changes", "grid"),
    [
        ({}, {}, "native:10.0"),
        ({"flow_shift": 3.0}, {}, "native:3.0"),
        ({"use_karras_sigmas": None}, {}, "karras:0.147:200.0:7.0"),
        ({"use_karras_sigmas": True}, {}, "karras:0.147:200.0:7.0"),
        ({"schedule": "diffusers_flow"}, {}, "diffusers_flow:10.0"),
        ({}, {"schedule": "karras"}, "karras:0.147:200.0:7.0"),
        ({}, {"flow_shift": 5.0}, "native:5.0"),
        ({}, {"sigmas": [0.9, 0.5]}, "sigmas:0.9,0.5"),
    ],
)
def test_schedules_are_chosen_by_request_and_arguments(
    args: dict[str, Any], changes: dict[str, Any], grid: str, world: Engine
) -> None:
    from phyai.models.cosmos3.request_rows import sampling_of

    adapter: Any = world.adapter
    assert (
        sampling_of(video_request(**changes), Cosmos3Args(**args), adapter.scheduler).grid == grid
    )


def test_rows_of_one_length_are_told_to_the_key(policy: Engine) -> None:
    assert dict(key_of(policy, action_request(rows=2)).extra)["even"] == ("cond", "uncond")
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    ragged = action_request(rows=2, text_mask=mask)
    assert dict(key_of(policy, ragged).extra)["even"] == ("uncond",)
    both = policy.step(ragged)["action"]
    one = {"text_ids": ragged.text_ids[1:, :6], "neg_text_ids": ragged.neg_text_ids[1:]}
    given = {n: getattr(ragged, n)[1:] for n in ("cond_video_latents", "cond_action")}
    noise = policy.adapter.prepare(ragged).tensors
    leaves = {leaf: noise[f"noise.{leaf}"][1:] for leaf in ("video", "action")}
    alone = policy.step(replace(ragged, **one, **given, text_mask=None, noise=leaves))["action"]
    torch.testing.assert_close(both[1:], alone, atol=1e-4, rtol=0)


# ---------------------------------------------------------------- modes


def test_forward_dynamics_keeps_the_actions_and_inverse_dynamics_the_video(policy: Engine) -> None:
    actions = torch.randn(1, CHUNK, 8, generator=torch.Generator().manual_seed(1))
    common = {"action_chunk": CHUNK, "action_start_frame_offset": 1, "cond_action_indexes": None}
    ahead = action_request(**common, mode="forward_dynamics", cond_action=actions)
    got = policy.step(ahead)
    assert torch.equal(got["action"], actions)
    given = ahead.cond_video_latents
    assert torch.equal(got["video_latents"][:, :, 0], given[:, :, 0])
    assert not torch.equal(got["video_latents"][:, :, 1], given[:, :, 1])
    back = policy.step(replace(ahead, mode="inverse_dynamics", cond_action=None))
    assert torch.equal(back["video_latents"], given)
    assert back["action"].shape == (1, CHUNK, 8)


def test_a_batch_may_mix_domains(policy: Engine) -> None:
    mixed = policy.step(action_request(rows=2, domain_id=[8, 3]))["action"]
    same = policy.step(action_request(rows=2, domain_id=8))["action"]
    torch.testing.assert_close(mixed[0], same[0], atol=1e-5, rtol=0)
    assert not torch.allclose(mixed[1], same[1], atol=1e-3)


def test_history_rows_come_before_the_actions() -> None:
    with engine_of(POLICY, history_length=3) as engine:
        states = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
        batch = engine.adapter.prepare(observation(state=states))
        assert batch.key.bucket("actions") == CHUNK + 3
        assert batch.tensors["known.action.mask"][0, :3].all()
        assert not batch.tensors["known.action.mask"][0, 3:, :8].any()
        values = batch.tensors["known.action.value"][0, :3, :8]
        want = torch.from_numpy(states).clone()
        want[:, 7] = 1 - want[:, 7]  # oldest first, the gripper inverted
        assert torch.equal(values, want)
        # Six positions a second at 15 Hz; the present state, the third row, is at frame 0.
        time = batch.tensors["positions"][0, 0]
        rows = torch.arange(-2.0, CHUNK + 1.0) / 15.0 * 6.0
        torch.testing.assert_close(time[-(CHUNK + 3) :], rows, atol=1e-6, rtol=0)
        frames = len(time) - (CHUNK + 3)
        assert torch.equal(time[: frames // LATENT[0]], torch.zeros(frames // LATENT[0]))
        assert float(time[frames - 1]) == pytest.approx(CHUNK / 15.0 * 6.0)
        assert engine.step(observation(state=states)).actions.shape == (CHUNK, 8)


# ---------------------------------------------------------------- generation


def test_an_image_stays_the_first_frame_and_a_clip_the_beginning(world: Engine) -> None:
    image = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    batch = world.adapter.prepare(replace(prompt(num_frames=9), images={"image": image}))
    assert batch.tensors["pixels"].shape == (1, 3, 1, 32, 48)
    assert batch.tensors["known.video.mask"][0, 0, :, 0, 0].tolist() == [True, False, False]
    video = np.stack([image] * 7)
    batch = world.adapter.prepare(replace(prompt(num_frames=9), images={"video": video}))
    assert batch.tensors["pixels"].shape == (1, 3, 5, 32, 48)
    assert batch.tensors["known.video.mask"][0, 0, :, 0, 0].tolist() == [True, True, False]
    with world.core.services.profile.recorder.recording(["vae.latents", "result.video"]) as seen:
        made = world.step(replace(prompt(num_frames=9), images={"image": image}))
    assert made.data.shape == (9, 32, 48, 3)
    assert torch.equal(seen["result.video"][0][:, :, 0], seen["vae.latents"][0][:, :, 0])


def test_the_sound_is_as_long_as_the_video(world: Engine) -> None:
    """The golden decoder has 1000 samples a second."""
    media = world.step(prompt(num_frames=9, fps=12.0, sound=True))
    assert media.sound.kind == "sound"
    assert media.sound.rate == 1000.0
    assert media.sound.data.shape == (750, 2)
    raw = world.step(video_request(sound_frames=5))
    assert raw["sound"].shape == (1, 2, 200)
    assert raw["sample_rate"] == 1000
    (again,) = Cosmos3GenerationPostProcessor()(raw, fps=24.0)
    assert (again.kind, again.rate, again.sound.data.shape) == ("video", 24.0, (200, 2))


def test_a_still_is_an_image(world: Engine) -> None:
    media = world.step(prompt(num_frames=1))
    assert isinstance(media, Media)
    assert (media.kind, media.data.shape, media.rate) == ("image", (32, 48, 3), None)


def test_noise_may_be_given(world: Engine) -> None:
    shape = (CHANNELS, 2, 2, 3)
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    one, two = (world.step(prompt(seed, noise=noise)).data for seed in (0, 1))
    assert np.array_equal(one, two)
    sound = torch.zeros(SOUND, 6)
    batch = world.adapter.prepare(prompt(sound=True, noise={"sound": sound, "video": noise}))
    assert torch.equal(batch.tensors["noise.sound"][0], sound)


def test_progress_is_told_and_a_request_can_be_stopped(world: Engine) -> None:
    told: list[tuple[int, int]] = []
    world.submit(prompt(num_steps=4), lambda done, total: told.append((done, total))).result()
    assert [step for step in told if step[0]] == [(n, 4) for n in range(1, 5)]
    submitted = Event()

    def stop(done: int, total: int) -> None:
        if done == 2:
            submitted.wait(30)
            assert future.cancel()

    before = evaluations(world)["cond"]
    future = world.submit(prompt(num_steps=40), stop)
    submitted.set()
    with pytest.raises(CancelledError):
        future.result()
    assert world.step(prompt()).data.shape == (5, 32, 48, 3)
    assert evaluations(world)["cond"] - before < 40


@pytest.mark.slow
def test_precision_bf16_is_near(world: Engine) -> None:
    """The last latents, by their largest difference; single evaluations are within 2e-2."""
    request = video_request()

    def latents(engine: Engine) -> torch.Tensor:
        with engine.core.services.profile.recorder.recording(["result.video"]) as seen:
            engine.step(request)
        return seen["result.video"][0]

    want = latents(world)
    with engine_of(GENERATION, precision="bf16") as engine:
        got = latents(engine)
    assert 0.0 < float((got - want).abs().max()) < 2e-2 * float(want.abs().max())


# ---------------------------------------------------------------- decoding


def _adapter(world: int, **args: Any) -> Any:
    group = Group("world", tuple(range(world)))
    parallel = SimpleNamespace(world=group, tp=group, cfg=Group("cfg"))
    return SimpleNamespace(services=SimpleNamespace(parallel=parallel), args=Cosmos3Args(**args))


def test_large_frames_are_shared_by_the_ranks_and_small_ones_are_not() -> None:
    assert tiling(_adapter(1), 45, 80) is None
    assert isinstance(tiling(_adapter(4), 45, 80), RankTiling)
    assert tiling(_adapter(4), 30, 40) is None
    assert tiling(_adapter(4, vae_rank_tiles=False), 45, 80) is None
    tiled = tiling(_adapter(1, vae_tile=256), 45, 80)
    assert isinstance(tiled, SpatialTiling)


@pytest.mark.slow
def test_pixels_and_frames_are_decoded_in_the_tiles_of_the_arguments() -> None:
    golden = case("case_vae")
    want = golden["decoded_tiled_32_16"]
    with engine_of(GENERATION, vae_tile=32, vae_tile_stride=16) as engine:
        adapter: Any = engine.adapter
        latents = adapter.vae.normalise(golden["latent_raw"])
        both = torch.cat([latents, latents.flip(2)])
        pixels = decode_pixels(adapter, both)
        assert pixels.shape == (2, *want.shape[1:])
        assert worst(pixels[:1], (want + 1) / 2) <= 1e-4
        assert torch.equal(pixels[1:], decode_pixels(adapter, both[1:]))
        frames = torch.from_numpy(decode_frames(adapter, both))
        levels = (want.permute(0, 2, 3, 4, 1) + 1) * 127.5
        assert worst(frames[:1], levels) <= 0.51
        assert not torch.equal(frames[0], frames[1])
        request = video_request(video_shape=tuple(latents.shape[2:]), num_inference_steps=1)
        with engine.core.services.profile.recorder.recording(["result.video"]) as seen:
            made = engine.step(request)
    with engine_of(GENERATION) as engine:
        whole: Any = engine.adapter
        latents = seen["result.video"][0]
        tiled = whole.vae.decode(whole.vae.denormalise(latents), tiling=SpatialTiling(32, 16))
        assert worst(made, (tiled + 1) / 2) <= 1e-6
        assert worst(made, decode_pixels(whole, latents)) > 1e-2  # tiles of so few pixels are seen


def test_a_picture_is_digested_once_for_both_branches(policy: Engine) -> None:
    counters = policy.core.services.profile.counters
    before = counters["clip_digests"]
    policy.step(observation(seed=11))
    assert counters["clip_digests"] == before + 1
    policy.step(observation(seed=12))
    assert counters["clip_digests"] == before + 2


def test_latent_shapes() -> None:
    assert pixel_to_latent_shape(33, 480, 832) == (9, 30, 52)
    assert ids(3).shape == (1, 3)
    assert LATENT[0] == 3
