"""Robot ``droid_midtrain``: end-effector steps in the model, poses on the robot's side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine
from phyai.errors import RequestError
from phyai.models.cosmos3.processing.midtrain import (
    DROID_STATISTICS,
    EefState,
    eef_actions,
    eef_rows,
)
from phyai.models.cosmos3.processing.normalizers import Normalizer
from phyai.models.cosmos3.robots import ROBOTS
from phyai.types import Observation
from tests.cosmos.cosmos_engines import CHUNK, POLICY, engine_of, observation

ROBOT = "droid_midtrain"
SCALING = Normalizer.of("quantile", DROID_STATISTICS)


def states(ticks: int) -> np.ndarray:
    """Return poses of a moving hand: position, quaternion of any length, gripper."""
    random = np.random.default_rng(5)
    return random.uniform(0.1, 1.0, size=(ticks, 8)).astype(np.float32)


def seen(ticks: int, **changes: Any) -> Observation:
    return observation(**{"state": states(ticks), **changes})


def eef(state: np.ndarray) -> EefState:
    return EefState.of(state[:, :3], state[:, 3:7], state[:, 7])


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of(POLICY, robot=ROBOT, history_length=3) as engine:
        yield engine


def test_the_state_becomes_steps_and_a_pose(engine: Engine) -> None:
    batch = engine.adapter.prepare(seen(4))
    mask, values = (batch.tensors[f"known.action.{name}"][0] for name in ("mask", "value"))
    want = torch.from_numpy(eef_rows(eef(states(4)), 3, SCALING))
    assert torch.equal(values[:3, :10], want)
    assert mask[:3].all()
    assert not mask[3:, :10].any()
    assert mask[:, 10:].all()
    assert engine.adapter.expects()["state_dim"] == 8


def test_commands_are_poses_that_start_from_the_state(engine: Engine) -> None:
    chunk = engine.step(seen(3))
    assert chunk.names == ROBOTS[ROBOT].names
    assert chunk.units == ("m", "m", "m", "1", "1", "1", "1", "1")
    assert chunk.actions.shape == (CHUNK, 8)
    lengths = np.linalg.norm(chunk.actions[:, 3:7], axis=1)
    assert lengths == pytest.approx(1.0, abs=1e-5)
    model = np.concatenate([np.zeros((3, chunk.model_actions.shape[1])), chunk.model_actions])
    want = eef_actions(model.astype(np.float32), eef(states(3)), 3, SCALING)
    assert np.array_equal(chunk.actions, want)
    moved = states(3)
    moved[:, :3] += 1.0
    other = engine.step(seen(3, state=moved))
    steps = np.diff(other.actions[:, :3], axis=0)
    assert steps == pytest.approx(np.diff(chunk.actions[:, :3], axis=0), abs=0.5)
    assert not np.allclose(other.actions[0, :3], chunk.actions[0, :3], atol=0.5)


def test_bad_poses_harm_nobody(engine: Engine) -> None:
    flat = states(3)
    flat[-1, 3:7] = 0.0
    for bad, rule in (
        (replace(seen(3), state=None), "state must be sent; got none. Send x, y, z, qx"),
        (seen(3, state=np.zeros((3, 7))), "state must have shape"),
        (seen(2), "must have 3 rows"),
        (seen(3, state=flat), "eef_quat must have a length above zero"),
    ):
        with pytest.raises(RequestError, match=rule):
            engine.step(bad)
    assert np.isfinite(engine.step(seen(3)).actions).all()


def test_a_model_that_sees_no_state_still_starts_from_it() -> None:
    with engine_of(POLICY, robot=ROBOT, history_length=0) as engine:
        assert engine.adapter.expects()["state_dim"] == 8
        assert engine.adapter.prepare(seen(1)).key.bucket("actions") == CHUNK
        chunk = engine.step(seen(1))
        assert np.array_equal(
            chunk.actions, eef_actions(chunk.model_actions, eef(states(1)), 0, SCALING)
        )
        with pytest.raises(RequestError, match="state must be sent"):
            engine.step(replace(seen(1), state=None))
        with pytest.raises(RequestError, match="length above zero"):
            engine.step(seen(1, state=np.zeros((1, 8))))
