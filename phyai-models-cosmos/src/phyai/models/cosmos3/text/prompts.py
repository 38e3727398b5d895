"""Prompts of generation: the user's text and what the model is told about the clip it makes."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from phyai.errors import RequestError
from phyai.models.cosmos3.processing.canvas import aspect_label
from phyai.models.cosmos3.processing.checks import check_fps, check_integer

SYSTEM_VIDEO = "You are a helpful assistant who will generate videos from a give prompt."
SYSTEM_IMAGE = "You are a helpful assistant who will generate images from a give prompt."
"""Spelled as the models were trained on them."""
MAX_PROMPT_CHARS = 1_000_000
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def check_prompt(value: Any, name: str = "prompt", *, empty: bool = False) -> str:
    """Return the text.  empty: whether a text without a word is allowed.

    Raises: RequestError.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, str):
        raise RequestError(
            f"{name} must be a string; got {type(value).__name__}. Send the task as text."
        )
    if not empty and not value.strip():
        raise RequestError(f"{name} must not be empty; got {value!r}. Send the task as text.")
    if len(value) > MAX_PROMPT_CHARS:
        raise RequestError(
            f"{name} must have at most {MAX_PROMPT_CHARS:,} characters; got {len(value):,}. "
            "Shorten it."
        )
    if not value.isascii() and _LONE_SURROGATE.search(value):
        raise RequestError(
            f"{name} must be valid Unicode text; got a lone surrogate. Decode it with the right "
            "encoding."
        )
    return value


def system_prompt(frames: int) -> str:
    """Return the system turn of generation: of stills for one frame, else of videos."""
    return SYSTEM_IMAGE if frames == 1 else SYSTEM_VIDEO


def generation_prompt(
    prompt: Any, *, frames: int, fps: float | None, height: int, width: int
) -> str:
    """Return the user text of the conditional branch.

    Plain text gets sentences on duration (frames / fps seconds), frame rate and size in pixels; a
    still, ``frames`` 1, on its size alone. A prompt that is a JSON object gets them as fields, over
    what it says itself.
    Raises: RequestError.

    >>> generation_prompt("A lamp.", frames=1, fps=None, height=48, width=64)
    'A lamp. This image is of 48x64 resolution.'
    """
    text = check_prompt(prompt)
    frames = check_integer("num_frames", frames)
    rate = None if frames == 1 else check_fps(fps)
    fields = _json_object(text)
    if fields is None:
        return _told(text, _sentences(frames, rate, height, width, ""))
    facts: dict[str, Any] = {
        "resolution": {"H": int(height), "W": int(width)},
        "aspect_ratio": aspect_label(height, width),
    }
    if rate is None:
        fields.pop("duration", None)
        fields.pop("fps", None)
    else:
        facts = {"duration": f"{int(frames / rate)}s", "fps": rate, **facts}
    fields.update(facts)
    return json.dumps(fields)


def negative_prompt(prompt: Any, *, frames: int, fps: float | None, height: int, width: int) -> str:
    """Return the user text of the unconditional branch: the same sentences, negated.

    prompt: None or "" leaves the sentences alone; text in JSON is text like any other.
    Raises: RequestError.

    >>> negative_prompt("blurry", frames=1, fps=None, height=48, width=64)
    'blurry. This image is not of 48x64 resolution.'
    """
    text = "" if prompt is None else check_prompt(prompt, "negative_prompt", empty=True)
    frames = check_integer("num_frames", frames)
    rate = None if frames == 1 else check_fps(fps)
    return _told(text, _sentences(frames, rate, height, width, "not "))


def _sentences(frames: int, fps: float | None, height: int, width: int, no: str) -> list[str]:
    size = f"{int(height)}x{int(width)} resolution."
    if fps is None:
        return [f"This image is {no}of {size}"]
    return [
        f"The video is {no}{frames / fps:.1f} seconds long and is {no}of {fps:.0f} FPS.",
        f"This video is {no}of {size}",
    ]


def _told(text: str, sentences: list[str]) -> str:
    for sentence in sentences:
        text = text.rstrip(".")
        text = f"{text}. {sentence}" if text else sentence
    return text


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the fields of a prompt that is a JSON object, None for any other text."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
