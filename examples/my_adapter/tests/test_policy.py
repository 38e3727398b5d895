"""The policy does what it was trained for, and says clearly what it cannot do."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from phyai import Engine, EngineArgs
from phyai.errors import CheckpointError, RequestError

from my_policy import task
from my_policy.adapter import PolicyArgs
from my_policy.presets import sample_observation, trained

SCENES = 30


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    args = PolicyArgs(**trained(None, None), max_batch_size=3)  # type: ignore[arg-type]
    with Engine(EngineArgs("my_policy", args)) as opened:
        yield opened


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def test_actions_drive_to_the_square_of_the_named_colour(engine: Engine) -> None:
    """Scenes the training never saw; all three prompts on one image are one request."""
    random = np.random.default_rng(12345)
    towards, ends = [], []
    for number in range(SCENES):
        scene = task.draw_scene(random)
        rows = [scene.observation(colour, seed=number) for colour in task.COLOURS]
        for colour, chunk in zip(task.COLOURS, engine.step(rows), strict=True):
            expert = scene.expert(colour).mean(axis=0)
            towards.append(cosine(chunk.actions.mean(axis=0), expert))
            ends.append(float(np.linalg.norm(chunk.actions.mean(axis=0) - expert)))
    assert np.mean(towards) > 0.9
    assert np.quantile(towards, 0.1) > 0.7
    assert np.median(ends) < 0.15  # m/s, of speeds up to 2


def test_another_state_changes_the_direction(engine: Engine) -> None:
    scene = task.draw_scene(np.random.default_rng(1))
    square = scene.squares["blue"]
    for side in (-0.6, 0.6):
        state = np.array([square[0] + side, square[1]], np.float32)
        chunk = engine.step(replace(scene, state=state).observation("blue", seed=0))
        assert np.sign(chunk.actions[0, 0]) == -np.sign(side)


def test_chunk_is_in_robot_units(engine: Engine) -> None:
    chunk = engine.step(sample_observation({}))
    assert chunk.actions.shape == (8, 2)
    assert chunk.units == ("m/s", "m/s")
    assert chunk.control_hz == 10.0


def test_unknown_word_is_refused_by_name(engine: Engine) -> None:
    first = sample_observation({})
    with pytest.raises(RequestError, match="'purple'"):
        engine.step(replace(first, prompt="go to the purple square"))
    assert engine.step(first).actions.shape == (8, 2)


@pytest.mark.parametrize(
    ("change", "told"),
    [({"widht": 64}, "'width'"), ({"type": "other"}, "type"), ({"width": 65}, "multiple")],
)
def test_damaged_config_is_refused(tmp_path, change, told) -> None:  # type: ignore[no-untyped-def]
    import json

    from my_policy.config import PolicyConfig

    task.CONFIG.save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError, match=told):
        PolicyConfig.from_folder(tmp_path)
