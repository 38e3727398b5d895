"""Observations through the engine: contracts, options, and what a chunk says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine, EngineArgs
from phyai.errors import RequestError
from phyai.models.minicpm_robot.main_minicpm_robot import MiniCPMRobotArgs
from phyai.models.minicpm_robot.presets.builders import sample_observation, tiny_minicpm_robot
from phyai.types import Observation, RTCOptions
from tests.minicpm.minicpm_engines import PLUGIN, cpu_config

MAX_ROWS = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_minicpm_robot(tmp_path_factory.mktemp("presets"))


@pytest.fixture(scope="module")
def engine(tiny: dict[str, Any]) -> Iterator[Engine]:
    args = MiniCPMRobotArgs(**tiny, max_batch_size=MAX_ROWS)
    with Engine(EngineArgs(PLUGIN, args, cpu_config())) as made:
        yield made


def sample(tiny: dict[str, Any], contract: str = "libero", **options: Any) -> Observation:
    made = sample_observation({**tiny, "contract": contract})
    return with_options(made, **{"seed": 1, "contract": contract, **options})


def with_options(row: Observation, **options: Any) -> Observation:
    return replace(row, options={**row.options, **options})


def test_a_chunk_says_what_its_columns_are(engine: Engine, tiny: dict[str, Any]) -> None:
    chunk = engine.step(sample(tiny))
    assert chunk.names == ("x", "y", "z", "rx", "ry", "rz", "gripper")
    assert chunk.units[:3] == ("m", "m", "m")
    assert chunk.control_hz == 20.0
    assert chunk.actions.shape == (len(chunk.mask), 7)
    assert chunk.model_actions.shape[1] == 80
    assert set(np.unique(chunk.actions[:, 6])) <= {-1.0, 1.0}
    assert chunk.info["contract"] == "libero"


def test_rows_of_several_robots_in_one_request(engine: Engine, tiny: dict[str, Any]) -> None:
    """Their images, prompts, embodiments and channels differ; each equals its result alone."""
    rows = [sample(tiny, name) for name in ("libero", "robotwin", "raw", "calvin")]
    together = engine.step(rows)
    widths = [chunk.actions.shape[1] for chunk in together]
    assert len(set(widths)) == 3
    assert [chunk.control_hz for chunk in together] == [20.0, 15.0, None, 10.0]
    for row, chunk in zip(rows, together, strict=True):
        alone = engine.step(row)
        np.testing.assert_allclose(chunk.model_actions, alone.model_actions, atol=2e-5)


def test_options_choose_embodiment_noise_steps_and_seed(
    engine: Engine, tiny: dict[str, Any]
) -> None:
    def model(**options: Any) -> np.ndarray:
        out: np.ndarray = engine.step(sample(tiny, **options)).model_actions
        return out

    want = model()
    assert np.array_equal(model(), want)
    others = [model(seed=2), model(embodiment_id=1), model(num_steps=2)]
    assert all(not np.allclose(other, want, atol=1e-4) for other in others)
    noise = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    assert np.array_equal(model(seed=None, noise=noise), want)


def test_the_arguments_embodiment_is_the_rows_default(tiny: dict[str, Any]) -> None:
    args = MiniCPMRobotArgs(**tiny, embodiment_id=1)
    row = sample(tiny)
    with Engine(EngineArgs(PLUGIN, args, cpu_config())) as engine:
        chosen = engine.step(row).model_actions
        named = engine.step(with_options(row, embodiment_id=1))
        assert np.array_equal(chosen, named.model_actions)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rtc": RTCOptions(np.zeros((3, 80), np.float32))}, "no real-time chunking"),
        ({"embodiment_id": 10**6}, "embodiment_id"),
        ({"embodiment_id": "four"}, "embodiment_id"),
        ({"contract": "no_such"}, "contract"),
        ({"noise": np.zeros((2, 2), np.float32)}, "noise"),
        ({"session_id": "a"}, "session_id"),
        ({"num_steps": 0}, "num_steps"),
    ],
)
def test_options_it_cannot_fulfil(
    options: dict[str, Any], said: str, engine: Engine, tiny: dict[str, Any]
) -> None:
    want = engine.step(sample(tiny)).actions
    with pytest.raises(RequestError, match=said):
        engine.step(with_options(sample(tiny), **options))
    assert np.array_equal(engine.step(sample(tiny)).actions, want)


def test_rows_of_one_request_have_one_number_of_steps(engine: Engine, tiny: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="num_steps"):
        engine.step([sample(tiny, num_steps=2), sample(tiny, num_steps=3)])


def test_a_foreign_request_names_what_is_taken(engine: Engine) -> None:
    with pytest.raises(TypeError, match=r"Observation.*MiniCPMRobotRequest"):
        engine.step(object())


def test_control_hz_of_the_arguments_wins(tiny: dict[str, Any]) -> None:
    args = MiniCPMRobotArgs(**tiny, control_hz=7.5)
    with Engine(EngineArgs(PLUGIN, args, cpu_config())) as engine:
        assert engine.step(sample(tiny)).control_hz == 7.5
