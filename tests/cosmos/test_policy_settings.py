"""Settings of a robot that arguments and options change, and sound beside actions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine
from phyai.deployment.values import decode, encode
from phyai.errors import ConfigError, RequestError
from phyai.models.cosmos3.main_cosmos3 import Cosmos3PolicyArgs, Cosmos3PolicyProcessor
from phyai.models.cosmos3.policy_adapter import OPTIONS
from phyai.models.cosmos3.policy_plugin import phyai_adapter
from phyai.unipc import sigma_at
from tests.cosmos.cosmos_engines import (
    POLICY,
    ROOT,
    SOUND,
    action_request,
    engine_of,
    observation,
)


@pytest.fixture(scope="module")
def policy() -> Iterator[Engine]:
    with engine_of(POLICY, load_sound=True, robot_shift=7.0, fps=10.0, domain="umi") as engine:
        yield engine


def key_of(engine: Engine, **options: Any) -> Any:
    return engine.adapter.prepare(observation(options={"num_steps": 2, **options})).key


def test_arguments_replace_the_robots_settings(policy: Engine) -> None:
    prepared = policy.adapter.prepare(observation())
    assert prepared.key.grid == "native:7.0"
    assert prepared.tensors["domain"].tolist() == [6]
    chunk = policy.step(observation())
    assert chunk.control_hz == 10.0
    assert "of 10 FPS" in chunk.info["prompt"]
    usual = Cosmos3PolicyProcessor.from_checkpoint(ROOT).robot
    assert (usual.fps, usual.domain, usual.flow_shift) == (15.0, "droid_lerobot", 5.0)


def test_the_positions_follow_the_rate(policy: Engine) -> None:
    """Frames of 4 ticks lie 4 / 10 s apart, a base frame of 24 Hz 1 / 24 s, in units of 4."""
    positions = policy.adapter.prepare(observation()).tensors["positions"][0, 0]
    frames: torch.Tensor = torch.unique(positions[:-9])
    assert torch.allclose(frames, torch.tensor([0.0, 2.4, 4.8]))


def test_options_change_shift_schedule_and_the_guided_interval(policy: Engine) -> None:
    assert key_of(policy, flow_shift=2.5).grid == "native:2.5"
    assert key_of(policy, schedule="karras").grid.startswith("karras:")
    assert key_of(policy, schedule="diffusers_flow", flow_shift=3).grid == "diffusers_flow:3.0"
    assert key_of(policy).guidance_interval is None
    low, high = key_of(policy, guidance_interval=[400, 960]).guidance_interval
    assert low < sigma_at(401)
    assert high == sigma_at(960)
    for same in ([400.0, 960.0], np.array([400, 960]), torch.tensor([400.0, 960.0])):
        assert key_of(policy, guidance_interval=same).guidance_interval == (low, high)


def test_outside_the_interval_one_branch_is_evaluated(policy: Engine) -> None:
    """Two steps at shift 7: timesteps 999 and 874."""
    counters = policy.core.services.profile.counters
    before = dict(counters)
    options = {"num_steps": 2, "guidance_interval": [960, 1001]}
    policy.step(observation(options=options))
    made = {
        n: counters[f"evaluations.{n}"] - before.get(f"evaluations.{n}", 0)
        for n in ("cond", "uncond")
    }
    assert made == {"cond": 2, "uncond": 1}


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"flow_shift": -1.0}, "flow_shift must be in"),
        ({"flow_shift": "5"}, "flow_shift must be a number"),
        ({"schedule": "euler"}, "schedule must be one of"),
        ({"guidance_interval": [5]}, "guidance_interval must be two timesteps"),
        ({"guidance_interval": [9.5, 20]}, "guidance_interval must be two timesteps"),
        ({"guidance_interval": [float("nan"), 20]}, "guidance_interval must be two timesteps"),
        ({"guidance_interval": [0, float("inf")]}, "guidance_interval must be two timesteps"),
        ({"guidance_interval": [20, 9]}, "guidance_interval must be two timesteps"),
        ({"guidance_interval": [[0], [9]]}, "guidance_interval must be two timesteps"),
        ({"shift": 5.0}, "option"),
    ],
)
def test_bad_options_are_refused(policy: Engine, options: dict[str, Any], rule: str) -> None:
    with pytest.raises(RequestError, match=rule):
        policy.step(observation(options=options))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"robot": "droit"}, "robot must be one of .* Did you mean 'droid'. Pick one"),
        ({"resolution": "500"}, "resolution must be one of .*; got '500'.* Pick one of them"),
        ({"chunk_size": 0}, "chunk_size must be an integer in .* Give one"),
        ({"fps": 0.0}, "fps must be in"),
        ({"fps": "15"}, "fps must be a number"),
        ({"domain": "umii"}, "domain must be an id or one of"),
        ({"domain": -1}, "domain must have an id"),
        ({"domain": True}, "domain must be an id or one of"),
        ({"robot_shift": 0.0}, "flow_shift must be in"),
        ({"load_sound": 1}, "load_sound must be true or false"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Cosmos3PolicyArgs(**changes)


def test_the_manifest_lists_the_options() -> None:
    listed = phyai_adapter().capabilities
    assert [*listed["options"], *listed["own_options"]] == list(OPTIONS)


def test_a_task_knows_its_options(policy: Engine) -> None:
    make = policy.adapter.processor.task  # type: ignore[attr-defined]
    task: dict[str, Any] = {
        "image": np.zeros((64, 96, 3), np.uint8),
        "domain": "av",
        "resolution_tier": 256,
    }
    assert make("push", **task, num_inference_steps=3).num_inference_steps == 3
    for name, meant in (("resolution", "resolution_tier"), ("num_steps", "num_inference_steps")):
        rule = rf"option of a task must be one of .*{meant}.*; got '{name}'. Did you mean '{meant}'"
        with pytest.raises(RequestError, match=rule):
            make("push", **task, **{name: 256})


def test_indexes_of_any_sequence_travel(policy: Engine) -> None:
    one: dict[str, Any] = {"mode": "forward_dynamics", "cond_action": torch.zeros(1, 9, 8)}
    asked = action_request(**one, cond_action_indexes=range(9))
    body, buffers = encode(asked)
    assert decode(body, buffers).cond_action_indexes == tuple(range(9))
    assert torch.equal(policy.step(asked)["action"], torch.zeros(1, 9, 8))


def test_sound_can_be_made_beside_actions(policy: Engine) -> None:
    silent = policy.step(action_request())
    both = policy.step(action_request(sound_frames=5))
    assert "sound_latents" not in silent
    assert both["sound_latents"].shape == (1, SOUND, 5)
    assert both["sound_latents"].isfinite().all()
    # The actions attend to it.
    assert (both["action"] - silent["action"]).abs().max() > 1e-4
    noise = {"sound": torch.ones(1, SOUND, 5)}
    other = policy.step(action_request(sound_frames=5, noise=noise))
    assert not torch.equal(other["sound_latents"], both["sound_latents"])


def test_sound_needs_its_head(policy: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy.adapter, "sound", False)
    with pytest.raises(RequestError, match="load_sound is off"):
        policy.step(action_request(sound_frames=5))
