"""Streams of one robot: what a session keeps, what a failed request leaves, what a retry gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine
from phyai.errors import (
    RequestError,
    SessionClosed,
    SessionEvicted,
    SessionUnknown,
)
from phyai.types import ActionChunk, Observation
from tests.minicpm.track_engines import (
    Stream,
    cpu_config,
    engine_of,
    pictures,
    tiny_tensors,
    update,
    write_tiny,
)

ATOL = 1e-5
OTHER = "Track the green robot"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), towers=True)


@pytest.fixture(scope="module", params=["exact", "static"])
def engine(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Engine]:
    static = request.param == "static"
    with engine_of(tiny, cpu_config(static_shapes=static)) as made:
        yield made


def waypoints(engine: Engine, request: Observation) -> np.ndarray:
    result = engine.step(request)
    assert isinstance(result, ActionChunk)
    return result.actions


def close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, atol=ATOL, rtol=0)


def counted(engine: Engine, request: Observation) -> dict[str, int]:
    counters = engine.core.services.profile.counters
    before = dict(counters)
    engine.step(request)
    return {name: n - before.get(name, 0) for name, n in counters.items() if n != before.get(name)}


# ---------------------------------------------------------------- equality


def test_frames_one_by_one_equal_their_whole_windows(engine: Engine) -> None:
    """From the first frame, which fills the window, until it has left it."""
    stream = Stream(12)
    for t in range(12):
        close(waypoints(engine, stream.step(t, "whole")), waypoints(engine, stream.window(t)))


def test_a_first_request_may_bring_a_history(engine: Engine) -> None:
    stream = Stream(14, seed=1)
    first = stream.row(2, 9, session_id="history", seq=0)  # 8 frames: one more than fit
    close(waypoints(engine, first), waypoints(engine, stream.window(9)))
    later = stream.row(10, 11, session_id="history", seq=1)
    close(waypoints(engine, later), waypoints(engine, stream.window(11)))


def test_images_one_by_one_equal_their_whole_windows(engine: Engine) -> None:
    frames = pictures(9)
    for t in range(9):
        options = {"session_id": "pictures", "seq": t}
        got = waypoints(engine, Observation({"front": frames[t]}, prompt=OTHER, options=options))
        whole = Observation({"front": frames[max(0, t - 6) : t + 1]}, prompt=OTHER)
        close(got, waypoints(engine, whole))


def test_interleaved_and_joined_sessions_do_not_disturb_each_other(engine: Engine) -> None:
    one, two = Stream(6, seed=2), Stream(6, seed=3)
    for t in range(5):
        rows = [one.step(t, "one"), two.step(t, "two", OTHER)]
        want = [one.window(t), two.window(t, prompt=OTHER)]
        # three rows of a batch of four: the window without a session stands between the streams
        apart = [rows[0], two.window(t), rows[1]]
        got = engine.step(apart)[::2] if t % 2 else [engine.step(row) for row in rows]
        for chunk, whole in zip(got, want, strict=True):
            close(chunk.actions, waypoints(engine, whole))
    alone = engine.step([one.step(5, "one"), two.window(4, prompt=OTHER)])
    close(alone[0].actions, waypoints(engine, one.window(5)))
    close(alone[1].actions, waypoints(engine, two.window(4, prompt=OTHER)))


def test_an_instruction_may_change_and_is_computed_when_it_does(engine: Engine) -> None:
    stream = Stream(6, seed=4)
    prompts = ["Follow the dog", "Follow the dog", OTHER, OTHER, "Follow the dog", "Follow the man"]
    computed = []
    for t, prompt in enumerate(prompts):
        done = counted(engine, stream.step(t, "words", prompt))
        computed.append("prompt_tokens" in done)
        retry = waypoints(engine, stream.step(t, "words", prompt))
        close(retry, waypoints(engine, stream.window(t, prompt=prompt)))
    assert computed == [True, False, True, False, True, True]


# ---------------------------------------------------------------- work


def test_a_step_computes_its_frame_and_its_window(engine: Engine) -> None:
    frames = pictures(10)

    def step(t: int) -> dict[str, int]:
        options = {"session_id": "work", "seq": t}
        return counted(engine, Observation({"front": frames[t]}, prompt=OTHER, options=options))

    first, *later = [step(t) for t in range(10)]
    config = engine.adapter.track  # type: ignore[attr-defined]
    wanted = {
        "vision_frames": 1,
        "projected_tokens": 4 + 16,
        "backbone_tokens": config.window_tokens,
    }
    for done in later:
        assert {name: done[name] for name in wanted} == wanted
        assert "prompt_tokens" not in done
    assert first["prompt_tokens"] == len(engine.adapter.tokenizer.encode(OTHER))  # type: ignore[attr-defined]
    whole = counted(engine, Observation({"front": frames[:7]}, prompt=OTHER))
    assert whole["vision_frames"] == 7
    assert whole["projected_tokens"] == 7 * 4 + 16


# ---------------------------------------------------------------- order and errors


def test_the_last_request_again_gives_its_result_and_computes_nothing(engine: Engine) -> None:
    stream = Stream(4, seed=5)
    engine.step(stream.step(0, "retry"))
    want = waypoints(engine, stream.step(1, "retry"))
    other = replace(stream.row(3, 3), options={**stream.row(3, 3).options, "session_id": "retry"})
    again = replace(other, options={**other.options, "seq": 1})
    assert counted(engine, again).get("backbone_tokens") is None
    assert np.array_equal(waypoints(engine, again), want)
    close(waypoints(engine, stream.step(2, "retry")), waypoints(engine, stream.window(2)))


def test_a_skipped_frame_is_an_error_and_the_next_one_works(engine: Engine) -> None:
    stream = Stream(4, seed=6)
    engine.step(stream.step(0, "skip"))
    for seq in (2, 7):
        wrong = stream.row(2, 2, session_id="skip", seq=seq)
        with pytest.raises(RequestError, match="seq"):
            engine.step(wrong)
    close(waypoints(engine, stream.step(1, "skip")), waypoints(engine, stream.window(1)))


BAD: dict[str, dict[str, Any]] = {
    "NaN": {"coarse_tokens": torch.full((4, 80), float("nan"))},
    "a feature of another width": {"fine_tokens": torch.zeros(16, 81)},
    "an unknown option": {"frame": 3},
    "no fine tokens": {"fine_tokens": None},
}


@pytest.mark.parametrize("what", BAD)
def test_a_failed_frame_leaves_its_session_as_it_was(what: str, engine: Engine) -> None:
    stream = Stream(4, seed=7)
    name = f"bad {what}"
    for t in range(2):
        engine.step(stream.step(t, name))
    good = stream.step(2, name)
    with pytest.raises(RequestError):
        engine.step(replace(good, options={**good.options, **BAD[what]}))
    close(waypoints(engine, good), waypoints(engine, stream.window(2)))


def test_an_error_while_computing_leaves_the_session_as_it_was(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed instruction and the moved window of the failed request are forgotten, too."""
    stream = Stream(4, seed=8)
    for t in range(2):
        engine.step(stream.step(t, "broken"))
    head = engine.adapter.network  # type: ignore[attr-defined]

    def fail(control: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(head, "trajectory", fail)
        with pytest.raises(ValueError, match="on purpose"):
            engine.step(stream.step(2, "broken", OTHER))
    close(waypoints(engine, stream.step(2, "broken")), waypoints(engine, stream.window(2)))


def test_a_bad_image_leaves_the_session_as_it_was(engine: Engine) -> None:
    frames = pictures(3, seed=9)
    bad = np.zeros((3, 4), np.uint8)
    sent = [frames[0], frames[1], bad, frames[2]]
    for image, seq in zip(sent, (0, 1, 2, 2), strict=True):
        request = Observation(
            {"front": image}, prompt=OTHER, options={"session_id": "image", "seq": seq}
        )
        if image is bad:
            with pytest.raises(RequestError, match="camera 'front'"):
                engine.step(request)
        else:
            got = waypoints(engine, request)
    close(got, waypoints(engine, Observation({"front": frames}, prompt=OTHER)))


def test_lost_sessions_say_how_they_were_lost(tiny: Path) -> None:
    stream = Stream(3)
    with engine_of(tiny, cpu_config(max_sessions=2)) as engine:
        with pytest.raises(SessionUnknown):
            engine.step(stream.step(1, "never"))
        for name in "abc":
            engine.step(stream.step(0, name))
        with pytest.raises(SessionEvicted):
            engine.step(stream.step(1, "a"))
        engine.close_session("b")
        with pytest.raises(SessionClosed):
            engine.step(stream.step(1, "b"))
        engine.step(stream.step(1, "c"))
        engine.reset_session("c")
        close(waypoints(engine, stream.step(0, "c")), waypoints(engine, stream.window(0)))


def test_the_robots_own_names_of_a_stream_work(engine: Engine) -> None:
    stream = Stream(3, seed=10)
    for t in range(3):
        got = waypoints(engine, stream.row(t, t, stream_id="named", frame_index=t))
    close(got, waypoints(engine, stream.window(2)))
    again = counted(engine, stream.row(2, 2, stream_id="named", frame_index=2))
    assert "backbone_tokens" not in again
    with pytest.raises(RequestError, match="another name"):
        engine.step(stream.row(0, 0, stream_id="x", session_id="x", seq=0))


def test_a_weight_update_makes_instructions_anew(tiny: Path) -> None:
    stream = Stream(3, seed=11)
    name = "backbone.layers.0.self_attn.k_proj.weight"
    with engine_of(tiny) as engine:
        engine.step(stream.step(0, "update"))
        update(engine, {name: 2 * tiny_tensors()[name]})
        close(waypoints(engine, stream.step(1, "update")), waypoints(engine, stream.window(1)))
