"""Real-time chunking in a closed loop: queue, engine and processor together, on the tiny pi0.5."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from phyai import ActionChunk, Engine, Observation
from phyai.action_queue import ActionQueue
from phyai.errors import RequestError
from phyai.models.pi.adapter import PiAdapter
from phyai.types import RTCOptions
from tests.pi.tiny_requests import GOLDEN, engine_of, pi_config

FRAME = np.random.default_rng(0).integers(0, 256, (56, 56, 3), np.uint8)
STATE = np.array([0.1, -0.2, 0.3, 0.4, 0.5], np.float32)
DELAY, PERIOD, HORIZON = 3, 5, 10
Rows = NDArray[np.float32]


def observe(*, seed: int, state: Rows = STATE, rtc: RTCOptions | None = None) -> Observation:
    options = {"seed": seed, "num_steps": 5, "rtc": rtc}
    return Observation({"base_0_rgb": FRAME}, state, "pick up the cup", options)


def open_engine(processors: Path, **config: Any) -> Any:
    return engine_of(
        "pi05",
        config=pi_config("pi05", **config),
        tokenizer=GOLDEN / "pi05" / "tokenizer",
        processor_dir=processors,
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A checkpoint that was trained for delays of up to six periods; guided RTC works too."""
    with open_engine(GOLDEN / "pi05" / "processors_abs", rtc_training_max_delay=6) as made:
        yield made


def relative_processors(folder: Path) -> Path:
    """Return processor files with relative actions for all but the last of five dims."""
    shutil.copytree(GOLDEN / "pi05" / "processors_abs", folder, dirs_exist_ok=True)
    names = ["j0", "j1", "j2", "j3", "gripper.pos"]
    for file, norm, relative in (
        ("policy_preprocessor.json", "normalizer_processor", "relative_actions_processor"),
        ("policy_postprocessor.json", "unnormalizer_processor", "absolute_actions_processor"),
    ):
        data = json.loads((folder / file).read_text())
        steps = {step["registry_name"]: step for step in data["steps"]}
        steps[relative]["config"]["enabled"] = True
        if "action_names" in steps[relative]["config"]:
            steps[relative]["config"]["action_names"] = names
        steps[norm]["config"]["features"]["action"]["shape"] = [5]
        edge = np.linspace(1.0, 2.0, 5, dtype=np.float32)
        stats = {
            f"{feature}.{name}": sign * edge
            for feature in ("observation.state", "action")
            for name, sign in (("q01", -1), ("q99", 1))
        }
        save_file(stats, folder / steps[norm]["state_file"])
        (folder / file).write_text(json.dumps(data))
    return folder


@pytest.fixture(scope="module")
def relative_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = relative_processors(tmp_path_factory.mktemp("relative"))
    with open_engine(folder, rtc_training_max_delay=6) as made:
        yield made


def close(got: Rows, want: Rows) -> float:
    return float(np.abs(got - want).mean())


# ---------------------------------------------------------------- absolute actions


def test_guided_chunks_stay_close_to_what_is_left(engine: Engine) -> None:
    """Over several chunks: the committed rows move towards the left-over, the others less."""
    queue = ActionQueue()
    queue.merge(engine.step(observe(seed=0)), ticket=queue.begin_request())
    for round_ in range(1, 5):
        for _ in range(PERIOD - DELAY):
            assert queue.pop() is not None
        ticket = queue.begin_request()
        rtc = ticket.rtc_options(inference_delay=DELAY, mode="guided")
        left = ticket.left_over()
        assert rtc is not None
        assert left is not None
        free: ActionChunk = engine.step(observe(seed=round_))
        guided: ActionChunk = engine.step(observe(seed=round_, rtc=rtc))
        committed = guided.model_actions[:DELAY]
        far = close(free.model_actions[:DELAY], left[:DELAY])
        assert close(committed, left[:DELAY]) < 0.2 * far
        executed = [queue.pop() for _ in range(DELAY)]
        assert queue.merge(guided, ticket=ticket, real_delay=DELAY)
        assert len(queue) == HORIZON - DELAY
        # the seam: the row before it was executed, its twin in the new chunk is close to it
        last = executed[-1]
        assert last is not None
        assert close(guided.actions[DELAY - 1], last) < close(free.actions[DELAY - 1], last)


def test_padding_the_left_over_does_not_change_the_guided_rows(engine: Engine) -> None:
    """The execution horizon ends where the left-over really ends."""
    queue = ActionQueue()
    queue.merge(engine.step(observe(seed=0)), ticket=queue.begin_request())
    for _ in range(4):
        queue.pop()
    ticket = queue.begin_request()
    exact = ticket.rtc_options(inference_delay=2, execution_horizon=6, mode="guided")
    padded = ticket.rtc_options(inference_delay=2, execution_horizon=6, mode="guided", length=10)
    one, two = (engine.step(observe(seed=1, rtc=rtc)) for rtc in (exact, padded))
    assert np.array_equal(one.model_actions, two.model_actions)


def test_trained_chunks_begin_with_what_is_executed(engine: Engine) -> None:
    queue, executed, planned = ActionQueue(), [], []
    queue.merge(engine.step(observe(seed=0)), ticket=queue.begin_request())
    for round_ in range(1, 5):
        executed += [queue.pop() for _ in range(PERIOD - DELAY)]
        ticket = queue.begin_request()
        rtc = ticket.rtc_options(inference_delay=DELAY, mode="trained")
        left = ticket.left_over()
        assert left is not None
        chunk: ActionChunk = engine.step(observe(seed=round_, rtc=rtc))
        assert np.array_equal(chunk.model_actions[:DELAY], left[:DELAY])
        during = [queue.pop() for _ in range(DELAY)]
        assert np.array_equal(np.stack(during), chunk.actions[:DELAY])
        executed += during
        planned.append(chunk)
        assert queue.merge(chunk, ticket=ticket, real_delay=DELAY)
    assert all(action is not None for action in executed)
    # each chunk's rows up to the next merge are what the robot did, without a gap
    track = np.stack([action for action in executed if action is not None])
    for number, chunk in enumerate(planned[:-1]):
        start = (number + 1) * PERIOD - DELAY
        assert np.array_equal(track[start : start + PERIOD], chunk.actions[:PERIOD])


def test_a_slow_trained_request_is_refused_and_the_queue_goes_on(engine: Engine) -> None:
    queue = ActionQueue()
    queue.merge(engine.step(observe(seed=0)), ticket=queue.begin_request())
    ticket = queue.begin_request()
    rtc = ticket.rtc_options(inference_delay=7, mode="trained")
    with pytest.raises(RequestError, match="inference_delay must be at most 6"):
        engine.step(observe(seed=1, rtc=rtc))
    assert len(queue) == HORIZON
    assert queue.pop() is not None


# ---------------------------------------------------------------- relative actions


def adapter_of(engine: Engine) -> PiAdapter:
    adapter = engine.adapter
    assert isinstance(adapter, PiAdapter)
    return adapter


def test_left_over_is_expressed_against_the_current_state(relative_engine: Engine) -> None:
    adapter = adapter_of(relative_engine)
    queue = ActionQueue()
    queue.merge(relative_engine.step(observe(seed=0)), ticket=queue.begin_request())
    for _ in range(4):
        queue.pop()
    ticket, moved = queue.begin_request(), STATE + np.float32(0.25)
    robot, model = ticket.left_over("robot"), ticket.left_over("model")
    assert robot is not None
    assert model is not None
    rtc = ticket.rtc_options(inference_delay=2, space="robot", mode="guided")
    prepared = adapter.prepare(observe(seed=1, state=moved, rtc=rtc))
    prev = prepared.tensors["rtc.prev"][0].numpy()[: len(robot)]
    row = adapter.processor.row(observe(seed=1, state=moved))
    np.testing.assert_allclose(prev, adapter.processor.model_space(robot, row))
    # back in robot units they are the commands that were left: a round trip
    np.testing.assert_allclose(adapter.processor.actions(prev, row), robot, atol=1e-5)
    # the four relative dims moved by the state's change, in normalised units; the gripper did not
    scale = np.linspace(1.0, 2.0, 5, dtype=np.float32)
    shift = np.tile(0.25 / scale[:4], (len(robot), 1))
    np.testing.assert_allclose(model[:, :4] - prev[:, :4], shift, atol=1e-5)
    np.testing.assert_allclose(model[:, 4], prev[:, 4], atol=1e-5)
    assert not prev[:, 5:].any()
    # without a change of state nothing moves
    rtc = ticket.rtc_options(inference_delay=2, space="robot", mode="guided")
    same = adapter.prepare(observe(seed=1, rtc=rtc)).tensors["rtc.prev"][0].numpy()
    np.testing.assert_allclose(same[: len(robot), :5], model[:, :5], atol=1e-5)


def test_relative_seam_has_no_jump(relative_engine: Engine) -> None:
    """Left-overs in model space would be off by the drift of the state; absolute ones are not."""
    queue = ActionQueue()
    queue.merge(relative_engine.step(observe(seed=0)), ticket=queue.begin_request())
    state = STATE
    for round_ in range(1, 4):
        for _ in range(PERIOD - DELAY):
            assert queue.pop() is not None
        state = state + np.float32(0.2)
        ticket = queue.begin_request()
        chunks = {
            space: relative_engine.step(
                observe(
                    seed=round_,
                    state=state,
                    rtc=ticket.rtc_options(
                        inference_delay=DELAY,
                        space="robot" if space == "robot" else "model",
                        mode="trained",
                    ),
                )
            )
            for space in ("robot", "model")
        }
        during = np.stack([action for _ in range(DELAY) if (action := queue.pop()) is not None])
        np.testing.assert_allclose(chunks["robot"].actions[:DELAY], during, atol=1e-5)
        drift = chunks["model"].actions[:DELAY] - during
        np.testing.assert_allclose(drift[:, :4], 0.2, atol=1e-5)
        queue.merge(chunks["robot"], ticket=ticket, real_delay=DELAY)
