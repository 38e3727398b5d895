"""Observations of several embodiments through one engine on the tiny preset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phyai import Engine, EngineArgs
from phyai.errors import RequestError
from phyai.models.gr00t.main_gr00t import GrootArgs
from phyai.models.gr00t.presets.builders import sample_observation, tiny_gr00t
from phyai.types import Observation, RTCOptions
from tests.groot.groot_engines import cpu_config


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {**tiny_gr00t(tmp_path_factory.mktemp("presets")), "max_batch_size": 4}


@pytest.fixture(scope="module")
def engine(preset: dict[str, Any]) -> Iterator[Engine]:
    with Engine(EngineArgs("gr00t_n17", GrootArgs(**preset), cpu_config())) as made:
        yield made


def seen(preset: dict[str, Any], tag: str | None = None, **options: Any) -> Observation:
    args = preset if tag is None else {**preset, "embodiment": tag}
    made = sample_observation(args)
    named = {} if tag is None else {"embodiment": tag}
    return replace(made, options={**made.options, "seed": 1, **named, **options})


def tags(engine: Engine) -> tuple[str, ...]:
    adapter: Any = engine.adapter
    return tuple(adapter.processor.tags())


def test_mixed_embodiments_equal_their_rows_alone(engine: Engine, preset: dict[str, Any]) -> None:
    rows = [seen(preset, tag) for tag in tags(engine)]
    assert len(rows) >= 3
    together = engine.step(rows)
    for row, chunk in zip(rows, together, strict=True):
        [alone] = engine.step([row])
        assert chunk.names == alone.names
        assert chunk.info["embodiment"] == row.options["embodiment"]
        np.testing.assert_allclose(chunk.model_actions, alone.model_actions, atol=2e-5)
        assert len(chunk.actions) == len(chunk.mask) == len(chunk.model_actions)
        assert chunk.actions.shape[1] == len(chunk.names)


def test_an_unknown_embodiment_lists_the_known_ones(engine: Engine, preset: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        engine.step(seen(preset, None, embodiment="gr1_unfied"))
    assert all(tag in str(caught.value) for tag in tags(engine))
    assert len(engine.step(seen(preset)).actions)


def test_missing_camera_wrong_state_and_long_text_are_refused(
    engine: Engine, preset: dict[str, Any]
) -> None:
    fine = seen(preset)
    first = next(iter(fine.images))
    bad = (
        replace(fine, images={k: v for k, v in fine.images.items() if k != first}),
        replace(fine, images={**fine.images, first: np.zeros((4, 4), np.uint8)}),
        replace(fine, state=np.zeros(99, np.float32)),
        replace(fine, prompt="pick it up " * 400),
        replace(fine, prompt=None),
    )
    for observation in bad:
        with pytest.raises(RequestError):
            engine.step(observation)
        assert len(engine.step(fine).actions)


def test_a_left_over_in_robot_units_is_that_in_model_space(
    engine: Engine, preset: dict[str, Any]
) -> None:
    """Commands a clip has not touched come back as the model's own numbers."""
    chunk = engine.step(seen(preset))
    small = np.clip(chunk.model_actions, -0.9, 0.9)[4:]
    adapter: Any = engine.adapter
    row = adapter.processor.row(seen(preset))
    width = chunk.actions.shape[1]
    padded = np.zeros_like(small)
    padded[:, :width] = small[:, :width]
    robot, _ = adapter.processor.decode(padded, row)
    count = min(len(robot), len(padded))
    results = [
        engine.step(seen(preset, None, rtc=RTCOptions(rest[:count], 2, space=space)))
        for rest, space in ((padded, "model"), (robot, "robot"))
    ]
    np.testing.assert_allclose(results[0].model_actions, results[1].model_actions, atol=1e-4)
    assert not np.allclose(results[0].model_actions, chunk.model_actions, atol=1e-3)
