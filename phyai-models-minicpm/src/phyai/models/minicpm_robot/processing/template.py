"""Reads from a chat template which text a request becomes, without running the template.

A template is a program that came with a checkpoint, so it is only looked at. What it says about
one user turn of images and text, followed by the opening of the answer, is read from its string
literals; a template in which that cannot be told is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phyai.errors import CheckpointError
from phyai.json_files import read_json_object
from phyai.models.minicpm_robot.processing.template_parts import Part, parts, reachable

TEMPLATE = "chat_template.jinja"
IMAGE = "<|image_pad|>"
START, END = "<|im_start|>", "<|im_end|>"
_JSON_FILES = ("chat_template.json", "processor_config.json", "tokenizer_config.json")
_MAX_CHARS = 200_000
_TRIMMED = re.compile(
    r"(?:(?<!\w)(?:message\.|item\.)?(?:content|text)|render_content\([^()]*\))\s*\|\s*trim\b"
)
_SYSTEM_TEXT = re.compile(r"<\|im_start\|>\s*system\s+[^\W\d_]")
_THINKING = {
    "enable_thinking": False,
    "not enable_thinking": True,
    "enable_thinking is defined": False,
    "enable_thinking is not defined": True,
    "enable_thinking is true": False,
    "enable_thinking is false": False,
}
"""Conditions of templates with a thinking mode, for a request that does not mention it."""


@dataclass(frozen=True, slots=True)
class ChatLayout:
    """The text around a request's images and instruction.

    image: what one image becomes before it is expanded.  answer: opening of the model's turn.
    trim: white space around the turn's content is dropped.
    """

    image: str = IMAGE
    before: str = f"{START}user\n"
    after: str = f"{END}\n"
    answer: str = f"{START}assistant\n"
    trim: bool = False

    def text(self, images: Sequence[str], instruction: str) -> str:
        """Return one request's text; ``images`` are their expanded placeholders, in order.

        >>> ChatLayout().text(["<image>"], "go")
        '<|im_start|>user\\n<image>go<|im_end|>\\n<|im_start|>assistant\\n'
        """
        content = "".join(self.image.replace(IMAGE, image) for image in images) + instruction
        return f"{self.before}{content.strip() if self.trim else content}{self.after}{self.answer}"


def read_layout(folder: Path) -> ChatLayout | None:
    """Return the layout of a folder's chat template, None when it holds no template.

    Raises: CheckpointError for a template of another layout and for broken files.
    """
    found = _find(folder)
    if found is None:
        return None
    where, template = found
    try:
        return parse_layout(template)
    except CheckpointError as error:
        raise CheckpointError(f"chat template in {where} {error}") from error


def parse_layout(template: str) -> ChatLayout:
    """Return the layout a template's text describes.

    Raises: CheckpointError saying what could not be told.

    >>> template = (
    ...     "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}<|image_pad|>"
    ...     "{{ m.text + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}ok{% endif %}"
    ... )
    >>> layout = parse_layout(template)
    >>> layout.image, layout.after, layout.answer
    ('<|image_pad|>', '<|im_end|>', 'ok')
    """
    if len(template) > _MAX_CHARS:
        raise _unread(f"be at most {_MAX_CHARS} characters long", str(len(template)))
    pieces = list(parts(template))
    shown = [part.shown() for part in pieces]
    for text, comes in zip(shown, reachable(pieces), strict=True):
        if comes and (found := _SYSTEM_TEXT.search(text)):
            raise _unread("add no system turn of its own", repr(found.group(0)))
    before, after = _turn("".join(shown))
    trim = bool(_TRIMMED.search(template))
    return ChatLayout(_image(pieces, shown), before, after, _answer(pieces), trim)


# ---------------------------------------------------------------- files


def _find(folder: Path) -> tuple[Path, str] | None:
    path = folder / TEMPLATE
    if path.is_file():
        try:
            return path, path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} must be a readable text file; got {error}. Download it again."
            ) from error
    for name in _JSON_FILES:
        if (folder / name).is_file():
            template = _default(read_json_object(folder / name).get("chat_template"))
            if template is not None:
                return folder / name, template
    return None


def _default(value: Any) -> str | None:
    """Return the template, of several named ones the default."""
    if isinstance(value, list):
        pairs = (entry for entry in value if isinstance(entry, dict))
        value = {entry.get("name"): entry.get("template") for entry in pairs}
    if isinstance(value, dict):
        value = value.get("default")
    return value if isinstance(value, str) else None


# ---------------------------------------------------------------- reading


def _turn(shown: str) -> tuple[str, str]:
    """Return what opens and what closes the user's turn."""
    opened = re.search(r"<\|im_start\|>(?:\{role\}|user)(\n?)", shown)
    closed = re.search(r"<\|im_end\|>(\n?)", shown)
    if opened is None or closed is None:
        raise _unread(f"frame the user's turn with {START} and {END}", "another frame")
    return f"{START}user{opened.group(1)}", f"{END}{closed.group(1)}"


def _image(pieces: Sequence[Part], shown: Sequence[str]) -> str:
    """Return the text of one image: what is shown with the placeholder in it."""
    found = {text for text in shown if IMAGE in text}
    if not found:  # kept in a variable
        found = {
            text
            for part in pieces
            if part.word == "set"
            for text in part.literals()
            if IMAGE in text
        }
    text = next(iter(found), "")
    if len(found) != 1 or text.count(IMAGE) != 1 or any(sign in text for sign in ("{", START, END)):
        raise _unread(f"show every image as one text with one {IMAGE}", repr(sorted(found)))
    return text


def _answer(pieces: Sequence[Part]) -> str:
    """Return what is added behind the turn when an answer is asked for."""
    asked = [at for at, part in enumerate(pieces) if part.body == "if add_generation_prompt"]
    if not asked:
        if any(part.kind != "text" and "add_generation_prompt" in part.body for part in pieces):
            raise _unread("open the answer under `if add_generation_prompt`", "another condition")
        return ""
    if any(part.word == "set" and "enable_thinking" in part.body for part in pieces):
        raise _unread("leave enable_thinking as it is given", "a template that sets it")
    # Per open `if`: whether its present branch counts; None when an earlier branch did.
    taken: list[bool | None] = [True]
    out: list[str] = []
    for part in pieces[asked[-1] + 1 :]:
        if part.word == "if":
            # Conditions in a branch that does not count may be of any form.
            taken.append(_holds(part.body[2:]) if all(taken) else None)
        elif part.word == "elif":
            taken[-1] = None if taken[-1] is not False else _holds(part.body[4:])
        elif part.word == "else":
            taken[-1] = None if taken[-1] is not False else True
        elif part.word == "endif":
            taken.pop()
            if not taken:
                return "".join(out)
        elif all(taken):
            text = part.shown()
            if part.kind == "do" or (part.kind == "show" and "{" in text):
                raise _unread("open the answer with plain text", repr(part.body))
            out.append(text)
    raise _unread("close its `if add_generation_prompt`", "no endif")


def _holds(condition: str) -> bool:
    """Return whether a condition holds for a request that does not mention thinking."""
    words = " ".join(condition.split()).strip("()")
    if words in _THINKING:
        return _THINKING[words]
    if words.startswith("enable_thinking is defined and "):
        return False
    if words.startswith("enable_thinking is not defined or "):
        return True
    raise _unread("open the answer under conditions on enable_thinking alone", repr(words))


def _unread(rule: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"must {rule}; got {got}. Templates are read, not run: use the checkpoint's own, or send "
        "model requests with input_ids."
    )
