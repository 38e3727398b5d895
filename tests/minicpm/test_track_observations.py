"""What robots send: images in every form, features, instructions; and what they get back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine
from phyai.errors import RequestError
from phyai.models.minicpm_robot_track import MiniCPMRobotTrackRequest
from phyai.models.minicpm_robot_track.presets.tiny_checkpoint import CONFIG
from phyai.models.minicpm_robot_track.prompts import PromptTokenizer
from phyai.types import ActionChunk, Observation
from tests.minicpm.track_engines import (
    PROMPT,
    Stream,
    engine_of,
    pictures,
    random_windows,
    request_of,
    write_tiny,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), towers=True)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with engine_of(tiny) as made:
        yield made


def seen(image: Any, prompt: Any = PROMPT, **options: Any) -> Observation:
    return Observation({"front": image}, prompt=prompt, options=options)


def step(engine: Engine, request: Observation) -> ActionChunk:
    result = engine.step(request)
    assert isinstance(result, ActionChunk)
    return result


# ---------------------------------------------------------------- results


def test_waypoints_have_names_units_and_a_rate(engine: Engine) -> None:
    chunk = step(engine, seen(pictures(1)[0]))
    assert chunk.actions.shape == (8, 3)
    assert chunk.names == ("x", "y", "yaw")
    assert chunk.units == ("m", "m", "rad")
    assert chunk.control_hz == 10.0
    assert np.abs(chunk.actions).max() <= 2.0
    velocity = chunk.info["base_velocity"]
    np.testing.assert_allclose(list(velocity.values()), chunk.actions[1] / 0.1, rtol=1e-6)
    assert chunk.info["prompt"] == PROMPT


def test_velocity_limits_clip_the_velocity_alone(tiny: Path, engine: Engine) -> None:
    request = seen(pictures(1)[0])
    free = step(engine, request)
    with engine_of(tiny, velocity_limits=(0.15, 0.3)) as limited:
        chunk = step(limited, request)
    assert np.array_equal(chunk.actions, free.actions)
    for name, most in (("x", 0.15), ("y", 0.15), ("yaw", 0.3)):
        want = float(np.clip(free.info["base_velocity"][name], -most, most))
        assert chunk.info["base_velocity"][name] == pytest.approx(want)


def test_every_input_matters(engine: Engine) -> None:
    frames = pictures(3)
    before = step(engine, seen(frames)).actions
    changed = [
        seen(frames[::-1].copy()),
        seen(np.concatenate([255 - frames[:1], frames[1:]])),
        seen(np.concatenate([frames[:2], 255 - frames[2:]])),
        seen(frames, "Follow the woman"),
    ]
    for request in changed:
        assert np.abs(step(engine, request).actions - before).max() > 1e-3


# ---------------------------------------------------------------- images


def test_forms_of_one_picture_are_one(engine: Engine) -> None:
    frame = pictures(1)[0]
    want = step(engine, seen(frame)).actions
    floating = (frame / 255).astype(np.float32)
    for image in (
        frame[None],
        torch.from_numpy(frame),
        floating,
        floating.transpose(2, 0, 1),
        floating.transpose(2, 0, 1)[None],
        frame.tolist() and np.asarray(frame, order="F"),
    ):
        assert np.array_equal(step(engine, seen(image)).actions, want)


def test_frames_of_other_sizes_are_resized(engine: Engine) -> None:
    small = np.random.default_rng(3).integers(0, 256, (2, 48, 64, 3), dtype=np.uint8)
    assert np.isfinite(step(engine, seen(small)).actions).all()


def test_features_of_the_same_frames_give_the_same(engine: Engine) -> None:
    frames = pictures(4)
    towers = engine.adapter.towers  # type: ignore[attr-defined]
    with torch.no_grad():
        coarse, fine = towers(torch.from_numpy(frames).permute(0, 3, 1, 2))
    given = Observation(prompt=PROMPT, options={"coarse_tokens": coarse, "fine_tokens": fine[-1]})
    want = step(engine, seen(frames)).actions
    np.testing.assert_allclose(step(engine, given).actions, want, atol=1e-5, rtol=0)


BAD_IMAGES: dict[str, tuple[Any, str]] = {
    "flat": (np.zeros((4,), np.uint8), "RGB"),
    "no array": ("image.png", "uint8, or float"),
    "alpha": (np.zeros((8, 8, 4), np.uint8), "RGB"),
    "too many": (np.zeros((9, 8, 8, 3), np.uint8), "1 to 8 frames"),
    "no frame": (np.zeros((0, 8, 8, 3), np.uint8), "1 to 8 frames"),
    "int": (np.zeros((8, 8, 3), np.int32), "uint8, or float"),
    "NaN": (np.full((8, 8, 3), np.nan, np.float32), "finite"),
    "255 as float": (np.full((8, 8, 3), 255.0, np.float32), r"\[0, 1\]"),
    "a line": (np.zeros((1, 900, 3), np.uint8), "sides in"),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_images_that_are_none_are_refused(case: str, engine: Engine) -> None:
    image, message = BAD_IMAGES[case]
    with pytest.raises(RequestError, match=message):
        engine.step(seen(image))


def test_only_what_this_model_takes_is_taken(engine: Engine) -> None:
    good = seen(pictures(1)[0])
    images = {**good.images, "wrist": pictures(1)[0]}
    features = {"coarse_tokens": torch.zeros(1, 4, 80), "fine_tokens": torch.zeros(16, 80)}
    bad: list[tuple[Observation, str]] = [
        (replace(good, images=images), "camera must be 'front'"),
        (replace(good, images={}), "must hold camera 'front'"),
        (replace(good, state=[0.0]), "state must be left out"),
        (replace(good, options=features), "got both"),
        (replace(good, images=[1]), "mapping"),  # type: ignore[arg-type]
        (
            Observation(prompt=PROMPT, options={"coarse_tokens": torch.zeros(1, 4, 80)}),
            "fine_tokens must be sent",
        ),
        (
            Observation(
                prompt=PROMPT, options={**features, "coarse_tokens": torch.zeros(9, 4, 80)}
            ),
            "1 to 8 frames",
        ),
    ]
    for request, message in bad:
        with pytest.raises(RequestError, match=message):
            engine.step(request)
    both = [good, Observation(prompt=PROMPT, options=features)]
    with pytest.raises(RequestError, match="all hold images, or all hold features"):
        engine.step(both)


def test_without_towers_images_are_refused_and_features_work(tiny: Path) -> None:
    with engine_of(tiny, dino_dir=None, siglip_dir=None) as engine:
        with pytest.raises(RequestError, match="dino_dir and siglip_dir"):
            engine.step(seen(pictures(1)[0]))
        assert step(engine, Stream(1).window(0)).actions.shape == (8, 3)


# ---------------------------------------------------------------- instructions


def test_instructions_begin_with_the_start_token(tiny: Path) -> None:
    tokenizer = PromptTokenizer(tiny, 640, 32)
    ids = tokenizer.encode("Follow the man")
    assert ids.tolist()[0] == 1
    assert len(ids) == 4
    settings = tiny / "tokenizer_config.json"
    text = settings.read_text()
    try:
        settings.write_text(text.replace('"add_bos_token": true', '"add_bos_token": false'))
        assert PromptTokenizer(tiny, 640, 32).encode("Follow the man").tolist() == ids.tolist()[1:]
    finally:
        settings.write_text(text)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "must be a string"),
        (17, "must be a string"),
        ("  ", "must not be empty"),
        ("go </s> stop", "control token"),
        ("go \ud800", "surrogate"),
        ("follow the man " * 20, "1 to 32 tokens"),
        ("x" * 100_000, "100,000 characters"),
    ],
)
def test_instructions_that_are_none_are_refused(prompt: Any, message: str, engine: Engine) -> None:
    with pytest.raises(RequestError, match=message):
        engine.step(seen(pictures(1)[0], prompt))


def test_the_limit_of_an_instruction_is_an_argument(tiny: Path) -> None:
    long = "follow the man " * 20  # 60 tokens and some
    with engine_of(tiny, max_text_tokens=80) as engine:
        assert np.isfinite(step(engine, Stream(1).row(0, 0, long)).actions).all()


# ---------------------------------------------------------------- model requests

GOOD = request_of(random_windows(CONFIG, [5, 3]))
BAD_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "ids": ({"input_ids": torch.full((2, 5), 640)}, "input_ids must be in"),
    "float ids": ({"input_ids": torch.zeros(2, 5)}, "input_ids must be int64"),
    "no text": ({"attention_mask": torch.tensor([[1] * 5, [0] * 5])}, "row 1: .*1 to 32 tokens"),
    "long text": (
        {"input_ids": torch.ones(2, 33, dtype=torch.int64), "attention_mask": None},
        "1 to 32 tokens",
    ),
    "mask": ({"attention_mask": torch.full((2, 5), 2)}, "attention_mask must hold 0 and 1"),
    "coarse": ({"coarse_tokens": torch.zeros(2, 24, 80)}, "coarse_tokens expected shape"),
    "NaN": ({"fine_tokens": torch.full((2, 16, 80), float("nan"))}, "fine_tokens must be finite"),
    "times": ({"coarse_time_indices": torch.arange(28).expand(2, -1)}, "equal for the 4 tokens"),
    "one time": (
        {"coarse_time_indices": torch.zeros(2, 28, dtype=torch.int64)},
        "differ between neighbouring",
    ),
    "far": ({"fine_time_indices": torch.full((2, 16), 64)}, r"in \[0, 64\)"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_model_requests_that_do_not_fit_are_refused(case: str, engine: Engine) -> None:
    changes, message = BAD_REQUESTS[case]
    with pytest.raises(RequestError, match=message):
        engine.step(replace(GOOD, **changes))
    assert engine.step(GOOD).shape == (2, 8, 3)


def test_too_many_rows_and_foreign_requests_are_refused(engine: Engine) -> None:
    rows = random_windows(CONFIG, [3] * 5)
    with pytest.raises(RequestError, match="at most 4 rows"):
        engine.step(request_of(rows))
    with pytest.raises(TypeError, match=MiniCPMRobotTrackRequest.__name__):
        engine.step(object())
