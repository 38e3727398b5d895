"""Prompts of the action modes: the instruction, the cameras' viewpoint and facts of the clip."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

from phyai.errors import RequestError, did_you_mean
from phyai.models.cosmos3.processing.canvas import aspect_label
from phyai.models.cosmos3.processing.checks import check_fps, check_integer
from phyai.models.cosmos3.text.prompts import check_prompt

VIEWPOINTS = MappingProxyType(
    {
        "ego_view": (
            "This video is captured from a first-person perspective looking at the scene."
        ),
        "third_person_view": (
            "This video is captured from a third-person perspective looking towards the agent "
            "from the front."
        ),
        "wrist_view": "This video is captured from a wrist-mounted camera.",
        "concat_view": (
            "This video contains concatenated views from multiple camera perspectives."
        ),
    }
)
DROID_VIEWS = (
    "The top row is from the wrist-mounted camera. The bottom row contains two horizontally "
    "concatenated third-person perspective views of the scene from opposite sides, with the robot "
    "visible."
)
"""What the composed image of the DROID cameras shows."""
_ENDS = (".", "!", "?")


def framing_text(viewpoint: str | None, note: str = "") -> str:
    """Return the sentence of a viewpoint and a note on the views behind it; "" for None without.

    Raises: RequestError listing the viewpoints.

    >>> framing_text("wrist_view")
    'This video is captured from a wrist-mounted camera.'
    """
    if viewpoint is not None and (not isinstance(viewpoint, str) or viewpoint not in VIEWPOINTS):
        raise RequestError(
            f"viewpoint must be one of {', '.join(sorted(VIEWPOINTS))}; got {viewpoint!r}."
            f"{did_you_mean(str(viewpoint), VIEWPOINTS)} Rename it."
        )
    sentence = "" if viewpoint is None else VIEWPOINTS[viewpoint]
    return f"{sentence} {note.rstrip()}".strip()


def plain_prompt(
    instruction: Any, *, frames: int, fps: float, height: int, width: int, framing: str = ""
) -> str:
    """Return the sentences of an action request, as NVIDIA's DROID server says them.

    frames: of the clip, one more than actions.  height, width: of the canvas, in pixels.
    framing: of ``framing_text``.
    The duration counts whole seconds only: 33 frames at 15 Hz are "2.0 seconds".
    Raises: RequestError.

    >>> plain_prompt("go", frames=33, fps=15, height=544, width=736)
    'go. The video is 2.0 seconds long and is of 15 FPS. This video is of 544x736 resolution.'
    """
    text = check_prompt(instruction)
    seconds = _seconds(frames, fps)
    pieces = (
        framing,
        f"The video is {int(seconds):.1f} seconds long and is of {fps:.0f} FPS.",
        f"This video is of {int(height)}x{int(width)} resolution.",
    )
    for piece in pieces:
        if piece:
            text += f" {piece}" if text.endswith(".") else f". {piece}"
    return text


def json_prompt(
    instruction: Any, *, frames: int, fps: float, height: int, width: int, framing: str = ""
) -> str:
    """Return the same facts as a JSON object with keys in the order of training.

    Arguments as in ``plain_prompt``. Raises: RequestError.

    >>> json_prompt("go", frames=9, fps=5, height=256, width=320)[:58]
    '{"actions": [{"time": "0:00-0:02", "description": "go."}],'
    """
    text = check_prompt(instruction).strip()
    seconds = _seconds(frames, fps)
    minutes, rest = divmod(round(seconds), 60)
    fields: dict[str, Any] = {"cinematography": {"framing": framing}} if framing else {}
    fields["actions"] = [
        {
            "time": f"0:00-{minutes}:{rest:02d}",
            "description": text if text.endswith(_ENDS) else f"{text}.",
        }
    ]
    fields["duration"] = f"{int(seconds)}s"
    fields["fps"] = float(fps)
    fields["resolution"] = {"H": int(height), "W": int(width)}
    fields["aspect_ratio"] = aspect_label(height, width)
    return json.dumps(fields)


def _seconds(frames: int, fps: float) -> float:
    return check_integer("num_frames", frames) / check_fps(fps)
