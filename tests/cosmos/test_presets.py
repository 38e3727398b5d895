"""The embedded presets: their files, NVIDIA's values, and that every input matters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from phyai import Engine, EngineArgs
from phyai.errors import ConfigError, RequestError
from phyai.manifest import AdapterManifest
from phyai.models.cosmos3 import plugin, policy_plugin
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.generation import Cosmos3Processor
from phyai.models.cosmos3.main_cosmos3 import Cosmos3Args, Cosmos3PolicyArgs, cost
from phyai.models.cosmos3.presets import builders
from phyai.models.cosmos3.robots import DROID, DROID_CAMERAS
from phyai.types import ActionChunk, Observation
from tests.cpu_engines import cpu_config

SMALL = {"resolution": "256", "chunk_size": 8}
"""Arguments that make the policy's preset quick: a small canvas, few actions."""


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("presets")


@pytest.fixture(scope="module")
def engine(cache_dir: Path) -> Iterator[Engine]:
    args = Cosmos3PolicyArgs(**{**builders.tiny_cosmos3_policy(cache_dir), **SMALL})
    with Engine(EngineArgs("cosmos3_policy", args, cpu_config())) as made:
        yield made


@pytest.fixture(scope="module")
def sample() -> Observation:
    made = builders.sample_observation({})
    return replace(made, options={"seed": 0, "num_steps": 2})


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("build", [builders.tiny_cosmos3, builders.tiny_cosmos3_policy])
def test_folders_have_the_released_layout(build: Any, cache_dir: Path) -> None:
    folder = Path(build(cache_dir)["checkpoint_dir"])
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    assert index["_class_name"] == "Cosmos3OmniPipeline"
    parts = {"transformer", "vae", "scheduler", "text_tokenizer"}
    sound = build is builders.tiny_cosmos3
    assert {p.name for p in folder.iterdir() if p.is_dir()} == parts | (
        {"sound_tokenizer"} if sound else set()
    )
    stored = json.loads(
        (folder / "transformer/diffusion_pytorch_model.safetensors.index.json").read_text("utf-8")
    )["weight_map"]
    assert len(set(stored.values())) == 2
    for file in set(stored.values()):
        with safe_open(folder / "transformer" / file, "pt") as held:
            assert set(held.keys()) == {name for name, where in stored.items() if where == file}
    assert Cosmos3Config.from_folder(folder).sound_gen is sound
    assert any(name.startswith("audio_") for name in stored) is sound


def test_bytes_are_the_same_every_time(tmp_path: Path, cache_dir: Path) -> None:
    def digests(folder: str) -> dict[str, str]:
        return {
            str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(Path(folder).rglob("*.safetensors"))
        }

    again = builders.tiny_cosmos3(tmp_path)["checkpoint_dir"]
    first = builders.tiny_cosmos3(cache_dir)["checkpoint_dir"]
    assert digests(again) == digests(first)
    assert Path(again).name == Path(first).name


# ---------------------------------------------------------------- values


def test_the_manifest_carries_nvidias_values() -> None:
    manifest = policy_plugin.phyai_adapter()
    robot = manifest.capabilities["robots"]["droid"]
    assert (robot["num_steps"], robot["guidance_scale"], robot["flow_shift"]) == (4, 3.0, 5.0)
    assert (robot["chunk_size"], robot["fps"], robot["resolution"]) == (32, 15.0, "480")
    assert robot["domain"] == "droid_lerobot"
    assert manifest.capabilities["horizon"] == 32
    assert manifest.capabilities["action_dim"] == 8
    for made, alias in ((manifest, "cosmos3_policy_wn"), (plugin.phyai_adapter(), "cosmos3_wn")):
        assert made.aliases == (alias,)
        assert set(made.capabilities["parallel"]) == {"tp", "cfg"}
        assert AdapterManifest.from_json(made.to_json()) == made


def test_a_robots_request_has_nvidias_values(cache_dir: Path, sample: Observation) -> None:
    """What the preset's engine gets from its own sample, at the released canvas."""
    args = Cosmos3PolicyArgs(**builders.tiny_cosmos3_policy(cache_dir))
    from phyai.models.cosmos3.policy import Cosmos3PolicyProcessor

    processor = Cosmos3PolicyProcessor.from_checkpoint(str(args.checkpoint_dir))
    request, row = processor.observation(sample)
    assert request.video_shape == (9, 33, 40)
    assert (request.num_inference_steps, request.guidance_scale) == (4, 3.0)
    assert (request.flow_shift, request.schedule, request.fps) == (5.0, "native", 15.0)
    assert (request.action_chunk, request.raw_action_dim, request.domain_id) == (33, 8, 8)
    assert request.cond_action_indexes == (0,)
    assert request.action_start_frame_offset == 0
    assert request.cond_video_pixels is not None
    assert request.cond_video_pixels.shape == (1, 3, 1, 544, 736)
    assert row.canvas.image_size == (544, 736, 540, 640)
    assert row.prompt.endswith("of 15 FPS. This video is of 544x736 resolution.")
    assert request.cond_action is not None
    assert request.cond_action[0, 0, 7] == pytest.approx(1.0 - builders.GRIPPER)


# ---------------------------------------------------------------- results


def test_a_chunk_has_names_rate_and_units(engine: Engine, sample: Observation) -> None:
    chunk = engine.step(sample)
    assert isinstance(chunk, ActionChunk)
    assert chunk.actions.shape == (8, 8)
    assert chunk.names == DROID.names
    assert chunk.control_hz == 15.0
    assert chunk.mask.all()
    assert "video" not in chunk.info
    state = np.asarray(sample.state, dtype=np.float32)
    assert chunk.model_actions.shape == (8, 64)
    np.testing.assert_allclose(chunk.actions[:, 7], 1.0 - chunk.model_actions[:, 7], atol=1e-6)
    assert not np.allclose(chunk.actions[0], state)


def _changed(sample: Observation, part: str) -> Observation:
    if part in DROID_CAMERAS:
        other = np.ascontiguousarray(sample.images[part][::-1])
        return replace(sample, images={**sample.images, part: other})
    if part == "prompt":
        return replace(sample, prompt="Open the drawer.")
    if part == "seed":
        return replace(sample, options={**sample.options, "seed": 1})
    if part == "guidance":
        return replace(sample, options={**sample.options, "guidance_scale": 1.5})
    state = np.array(sample.state)
    state[{"joint": 2, "gripper": 7}[part]] += 0.2
    return replace(sample, state=state)


@pytest.mark.parametrize("part", [*DROID_CAMERAS, "prompt", "joint", "gripper", "seed", "guidance"])
def test_every_input_matters(part: str, engine: Engine, sample: Observation) -> None:
    before = engine.step(sample).actions
    after = engine.step(_changed(sample, part)).actions
    assert np.abs(after - before).max() > 1e-4


def test_only_one_frame_is_encoded_and_nothing_decoded(engine: Engine, sample: Observation) -> None:
    counters = engine.core.services.profile.counters
    fresh = _changed(sample, "wrist_image_left")
    fresh = replace(fresh, images={k: np.roll(v, 3, axis=1) for k, v in fresh.images.items()})
    before = dict(counters)
    engine.step(fresh)
    assert counters["vae_encoded_frames"] - before.get("vae_encoded_frames", 0) == 1
    assert counters["vae_decoded_frames"] == 0
    assert engine.adapter.vae is not None  # type: ignore[attr-defined]
    assert engine.adapter.vae.decoder is None  # type: ignore[attr-defined]


def test_text_is_computed_once_per_prompt(engine: Engine, sample: Observation) -> None:
    """The empty prompt is never computed again, a new instruction once, and steps do none."""
    counters = engine.core.services.profile.counters
    engine.step(sample)
    before = counters["und_rows"]
    engine.step(replace(sample, options={"seed": 5, "num_steps": 3}))
    assert counters["und_rows"] == before
    engine.step(replace(sample, prompt="Close the lid."))
    assert counters["und_rows"] == before + 1


@pytest.mark.slow
def test_a_decoded_video_comes_with_the_chunk(cache_dir: Path, sample: Observation) -> None:
    given = {**builders.tiny_cosmos3_policy(cache_dir), **SMALL, "decode_video": True}
    with Engine(EngineArgs("cosmos3_policy", Cosmos3PolicyArgs(**given), cpu_config())) as engine:
        chunk = engine.step(sample)
    video = chunk.info["video"]
    assert video.dtype == np.uint8
    assert video.shape == (9, 256, 288, 3)  # 256 x 303 of content, in whole latents


# ---------------------------------------------------------------- sizes of generation


def test_prompts_without_a_size_have_the_presets(cache_dir: Path) -> None:
    args = builders.tiny_cosmos3(cache_dir)
    processor: Any = Cosmos3Processor.from_checkpoint(args.pop("checkpoint_dir"), **args)
    small = processor("a cup")
    assert (small.video_shape, small.num_inference_steps) == ((3, 4, 6), 4)
    assert processor("a cup", height=32, width=48, num_frames=5).video_shape == (2, 2, 3)
    assert processor("a cup", resolution=256).video_shape == (3, 12, 20)  # what is asked for wins
    assert processor("a cup", aspect_ratio="1:1").video_shape[1:] == (60, 60)
    with pytest.raises(RequestError, match="got both"):
        processor("a cup", height=32, width=48, resolution=256)
    released = Cosmos3Processor.from_checkpoint(builders.tiny_cosmos3(cache_dir)["checkpoint_dir"])
    assert released("a cup").video_shape == (48, 45, 80)


def test_what_a_file_cannot_say_is_refused_before_it_is_made(cache_dir: Path) -> None:
    args = builders.tiny_cosmos3(cache_dir)
    processor: Any = Cosmos3Processor.from_checkpoint(args.pop("checkpoint_dir"), **args)
    for options, match in (
        ({"fps": 0.005}, r"fps must be in \[0.01, 1000\]; got 0.005"),
        ({"sound": "maybe"}, "sound must be true, false or 'auto'; got 'maybe'"),
        ({"num_frames": 1, "sound": True}, "left out of a still.*Ask for more frames"),
    ):
        with pytest.raises(RequestError, match=match):
            processor("a cup", **options)
    for bad in ({"height": 64}, {"num_frames": 0}, {"height": 64, "width": 5000}):
        with pytest.raises(ConfigError):
            Cosmos3Args(**bad)


def test_a_first_frame_of_another_aspect_is_told(
    cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = builders.tiny_cosmos3(cache_dir)
    processor: Any = Cosmos3Processor.from_checkpoint(args.pop("checkpoint_dir"), **args)
    processor("a cup", image=np.zeros((32, 48, 3), np.uint8))
    assert not caplog.records
    for _ in range(2):
        processor("a cup", image=np.zeros((47, 47, 3), np.uint8))
    (record,) = caplog.records
    assert "of 64 x 96 within 2 %; got 47 x 47, which is cut at its edges. Ask" in record.message


# ---------------------------------------------------------------- cost


def test_cost_of_the_released_sizes() -> None:
    """Of the specification: 49 TFLOP per evaluation of a robot's request, 8 evaluations."""
    model = cost(Cosmos3PolicyArgs())
    stages = {stage.stage: stage for stage in model.stages(model.workload())}
    assert list(stages) == ["vae", "text", "loop"]
    assert stages["loop"].flops / 8 == pytest.approx(49e12, rel=0.02)
    assert stages["vae"].weight_bytes == pytest.approx(4 * 149.6e6, rel=0.01)
    assert model.published().figures
    world = cost(Cosmos3Args())
    assert [s.stage for s in world.stages(world.workload())] == ["text", "loop", "decode"]


def test_the_presets_cost_is_that_of_its_small_video(cache_dir: Path) -> None:
    model = cost(Cosmos3Args(**builders.tiny_cosmos3(cache_dir)))
    request = model.request(model.workload())
    assert (request.video_shape, request.num_inference_steps) == ((3, 4, 6), 4)


def test_the_cost_models_request_runs(cache_dir: Path) -> None:
    args = Cosmos3PolicyArgs(**{**builders.tiny_cosmos3_policy(cache_dir), **SMALL})
    args.max_batch_size = 2
    model = cost(args)
    workload = replace(model.workload(), rows=2, tokens=20, steps=1)
    with Engine(EngineArgs("cosmos3_policy", args, cpu_config())) as engine:
        result = engine.step(model.request(workload))
    assert result["action"].shape == (2, 9, 8)
    assert torch.isfinite(result["video_latents"]).all()
