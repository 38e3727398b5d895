"""Prompts: recorded texts exactly, the rules one by one, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from phyai.errors import RequestError
from phyai.models.cosmos3.text.action_prompts import (
    DROID_VIEWS,
    VIEWPOINTS,
    framing_text,
    json_prompt,
    plain_prompt,
)
from phyai.models.cosmos3.text.prompts import (
    check_prompt,
    generation_prompt,
    negative_prompt,
    system_prompt,
)
from phyai.models.cosmos3.text.template import chat_text

GOLDEN = Path(__file__).parents[1] / "golden/cosmos3"


def recorded() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(GOLDEN.glob("case_*.safetensors")):
        with safe_open(path, "pt") as file:
            raw = file.metadata() or {}
        yield path.stem, {name: _value(text) for name, text in raw.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


CASES = dict(recorded())
GENERATED = [n for n, m in CASES.items() if "text_cond" in m and "action" not in m]
ACTIONS = [n for n, m in CASES.items() if "text_cond" in m and "action" in m]
CLIP = {"frames": 9, "fps": 24.0, "height": 48, "width": 64}


# ---------------------------------------------------------------- recorded


def test_there_are_recorded_prompts() -> None:
    assert len(GENERATED) >= 4
    assert len(ACTIONS) >= 3


@pytest.mark.parametrize("name", GENERATED)
def test_recorded_generation_prompts(name: str) -> None:
    case = CASES[name]
    frames = case["num_frames"]
    clip = {"height": case["height"], "width": case["width"], "fps": case.get("fps")}
    system = system_prompt(frames)
    cond = generation_prompt(case["prompt"], frames=frames, **clip)
    uncond = negative_prompt(case.get("negative_prompt"), frames=frames, **clip)
    assert chat_text(cond, system) + "<|im_end|><|vision_start|>" == case["text_cond"]
    assert chat_text(uncond, system) + "<|im_end|><|vision_start|>" == case["text_uncond"]


@pytest.mark.parametrize("name", ACTIONS)
def test_recorded_action_prompts(name: str) -> None:
    case = CASES[name]
    action = case["action"]
    cond = json_prompt(
        case["prompt"],
        frames=action["chunk_size"] + 1,
        fps=case["fps"],
        height=256,
        width=320,
        framing=framing_text(action["view_point"]),
    )
    assert chat_text(cond) + "<|im_end|><|vision_start|>" == case["text_cond"]
    assert chat_text("") + "<|im_end|><|vision_start|>" == case["text_uncond"]


def test_recorded_droid_prompts() -> None:
    case = CASES["case_droid_preprocess"]
    clip = {"frames": 33, "fps": 15.0, "height": 544, "width": 736}
    framing = framing_text("concat_view", DROID_VIEWS)
    assert plain_prompt(case["instruction"], framing=framing, **clip) == case["prompt_plain"]
    made = json_prompt(case["instruction"], framing=framing, **clip)
    assert json.loads(made) == case["prompt_json"]
    with safe_open(GOLDEN / "case_droid_preprocess.safetensors", "pt") as file:
        assert made == file.metadata()["prompt_json"]
    tiny = CASES["case_droid_e2e_tiny"]
    clip = {"frames": tiny["chunk"] + 1, "fps": tiny["fps"], "height": 256, "width": 320}
    assert plain_prompt(tiny["instruction"], framing=framing, **clip) == tiny["prompt"]


# ---------------------------------------------------------------- generation rules


def test_final_dots_of_a_prompt_are_dropped_before_the_sentences() -> None:
    want = "Go. The video is 0.4 seconds long and is of 24 FPS. This video is of 48x64 resolution."
    for prompt in ("Go", "Go.", "Go..."):
        assert generation_prompt(prompt, **CLIP) == want
    assert generation_prompt("Go!", **CLIP).startswith("Go!. The video is")


def test_durations_are_rounded_and_rates_whole() -> None:
    made = generation_prompt("Go", frames=189, fps=23.976, height=720, width=1280)
    assert "is 7.9 seconds long and is of 24 FPS. This video is of 720x1280" in made


@pytest.mark.parametrize("empty", [None, "", "."])
def test_an_empty_negative_prompt_leaves_the_sentences(empty: str | None) -> None:
    assert negative_prompt(empty, **CLIP) == (
        "The video is not 0.4 seconds long and is not of 24 FPS. "
        "This video is not of 48x64 resolution."
    )
    still = negative_prompt(empty, frames=1, fps=None, height=48, width=64)
    assert still == "This image is not of 48x64 resolution."


def test_a_json_prompt_gets_fields_and_no_sentences() -> None:
    prompt = json.dumps({"duration": "99s", "subjects": ["a räven"], "fps": 3, "extra": {"b": 1}})
    made = generation_prompt(prompt, frames=189, fps=24, height=720, width=1280)
    assert made == json.dumps(
        {
            "duration": "7s",
            "subjects": ["a räven"],
            "fps": 24.0,
            "extra": {"b": 1},
            "resolution": {"H": 720, "W": 1280},
            "aspect_ratio": "16,9",
        }
    )
    still = json.loads(generation_prompt(prompt, frames=1, fps=None, height=960, width=960))
    assert "duration" not in still
    assert "fps" not in still
    assert still["aspect_ratio"] == "1,1"


@pytest.mark.parametrize("text", ["[1, 2]", "12", '"quoted"', "{broken", "{" * 5000, "{'a': 1}"])
def test_other_json_and_broken_json_is_plain_text(text: str) -> None:
    assert generation_prompt(text, **CLIP).startswith(f"{text}. The video is")


def test_a_negative_prompt_in_json_stays_text() -> None:
    assert negative_prompt('{"a": 1}', **CLIP).startswith('{"a": 1}. The video is not')


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt": ""}, "prompt must not be empty"),
        ({"prompt": " \n"}, "prompt must not be empty"),
        ({"prompt": None}, "prompt must be a string"),
        ({"prompt": b"go"}, "prompt must be a string"),
        ({"prompt": ["go"]}, "prompt must be a string"),
        ({"prompt": "\udcff"}, "lone surrogate"),
        ({"prompt": "x" * 1_000_001}, "at most 1,000,000 characters"),
        ({"fps": 0}, "fps must be in"),
        ({"fps": -24}, "fps must be in"),
        ({"fps": float("nan")}, "fps must be in"),
        ({"fps": float("inf")}, "fps must be in"),
        ({"fps": 10**400}, "fps must be in"),
        ({"fps": None}, "fps must be a number"),
        ({"fps": "24"}, "fps must be a number"),
        ({"fps": True}, "fps must be a number"),
        ({"frames": 0}, "num_frames must be in"),
        ({"frames": 2.0}, "num_frames must be an integer"),
    ],
)
def test_bad_generation_values_are_refused(changes: dict[str, Any], match: str) -> None:
    values: dict[str, Any] = {"prompt": "go", **CLIP, **changes}
    with pytest.raises(RequestError, match=match):
        generation_prompt(values.pop("prompt"), **values)


def test_a_still_needs_no_rate() -> None:
    assert generation_prompt("A lamp", frames=1, fps=None, height=48, width=64) == (
        "A lamp. This image is of 48x64 resolution."
    )


def test_prompts_may_come_as_numpy_text() -> None:
    import numpy as np

    assert check_prompt(np.array("go")) == "go"
    assert check_prompt(np.str_("go")) == "go"


# ---------------------------------------------------------------- action rules


@pytest.mark.parametrize(
    ("frames", "fps", "said"), [(33, 15, "2.0"), (9, 15, "0.0"), (17, 5, "3.0"), (31, 15, "2.0")]
)
def test_plain_durations_are_whole_seconds(frames: int, fps: float, said: str) -> None:
    made = plain_prompt("go", frames=frames, fps=fps, height=544, width=736)
    assert f"The video is {said} seconds long and is of {fps} FPS." in made


def test_pieces_are_joined_by_a_sentence_end() -> None:
    clip: dict[str, Any] = {"frames": 33, "fps": 15, "height": 544, "width": 736}
    assert plain_prompt("go.", **clip).startswith("go. The video")
    assert plain_prompt("go", **clip).startswith("go. The video")
    assert plain_prompt("go!", **clip).startswith("go!. The video")
    framed = plain_prompt("go", framing=VIEWPOINTS["wrist_view"], **clip)
    assert framed.startswith("go. This video is captured from a wrist-mounted camera. The video")


def test_json_times_round_and_durations_cut() -> None:
    clip: dict[str, Any] = {"height": 544, "width": 736}
    made = json.loads(json_prompt("go?", frames=1801, fps=15, **clip))
    assert made["actions"] == [{"time": "0:00-2:00", "description": "go?"}]
    assert made["duration"] == "120s"
    made = json.loads(json_prompt(" go ", frames=19, fps=10, **clip))
    assert made["actions"] == [{"time": "0:00-0:02", "description": "go."}]
    assert made["duration"] == "1s"
    assert "cinematography" not in made
    assert list(made) == ["actions", "duration", "fps", "resolution", "aspect_ratio"]


def test_unknown_viewpoints_are_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"concat_view, ego_view.*Did you mean 'ego_view'"):
        framing_text("ego_vew")
    with pytest.raises(RequestError, match="viewpoint must be one of"):
        framing_text(["ego_view"])  # type: ignore[arg-type]
    assert framing_text(None) == ""
    assert framing_text(None, "A note.") == "A note."
