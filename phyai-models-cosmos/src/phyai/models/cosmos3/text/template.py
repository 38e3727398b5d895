"""The chat layout around a prompt, and the check that a checkpoint's template has this layout.

A template is a program that came with a checkpoint and is not run: its layout is fixed here, and
what its string literals say must agree with it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from phyai.errors import CheckpointError
from phyai.json_files import read_json_object

TEMPLATE = "chat_template.jinja"
START, END, VISION_START = "<|im_start|>", "<|im_end|>", "<|vision_start|>"
ANSWER = f"{START}assistant\n"
_JSON_FILES = ("chat_template.json", "tokenizer_config.json")
_MAX_CHARS = 32_000
# A system turn whose text the template itself brings: letters right behind the turn's opening.
_SYSTEM_TEXT = re.compile(r"<\|im_start\|>\s*system\s+[^\W\d_]")
_TAG = re.compile(r"\{([%{#])[-+]?(.*?)[-+]?[%}#]\}", re.DOTALL)
_STRING = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_ASKED = re.compile(r"\{%[-+]?\s*if\s+add_generation_prompt\s*[-+]?%\}")


def chat_text(prompt: str, system: str | None = None) -> str:
    """Return a request's turns with the opening of the answer.

    >>> print(chat_text("go", "Be brief."), end="")
    <|im_start|>system
    Be brief.<|im_end|>
    <|im_start|>user
    go<|im_end|>
    <|im_start|>assistant
    """
    first = "" if system is None else f"{START}system\n{system}{END}\n"
    return f"{first}{START}user\n{prompt}{END}\n{ANSWER}"


def check_template(folder: Path) -> None:
    """Raise CheckpointError when a folder's chat template says another layout than ``chat_text``.

    A folder without a template passes: the layout is the one these checkpoints were trained on.
    """
    for where, template in _templates(folder):
        try:
            _check(template)
        except CheckpointError as error:
            raise CheckpointError(f"chat template in {where} {error}") from error


def _templates(folder: Path) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    path = folder / TEMPLATE
    if path.is_file():
        try:
            found.append((path, path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} must be a readable text file; got {error}. Download it again."
            ) from error
    for name in _JSON_FILES:
        if (folder / name).is_file():
            template = _default(read_json_object(folder / name).get("chat_template"))
            if template is not None:
                found.append((folder / name, template))
    return found


def _default(value: Any) -> str | None:
    """Return the template, of several named ones the default."""
    if isinstance(value, list):
        pairs = (entry for entry in value if isinstance(entry, dict))
        value = {entry.get("name"): entry.get("template") for entry in pairs}
    if isinstance(value, dict):
        value = value.get("default")
    return value if isinstance(value, str) else None


def _check(template: str) -> None:
    if len(template) > _MAX_CHARS:
        raise _other(f"be at most {_MAX_CHARS} characters long", str(len(template)))
    shown = template.replace("\\n", "\n")
    if START not in shown or END not in shown:
        raise _other(f"frame turns with {START} and {END}", "another frame")
    if found := _SYSTEM_TEXT.search(shown):
        raise _other("add no system turn of its own", repr(found.group(0)))
    answer = _answer(shown)
    if answer.strip() != ANSWER.strip():
        raise _other(f"open the answer with {ANSWER!r} alone", repr(answer[:80]))


def _answer(shown: str) -> str:
    """Return every text written under ``if add_generation_prompt``, whatever it depends on."""
    openings = list(_ASKED.finditer(shown))
    out: list[str] = []
    depth, at = 1, openings[-1].end() if openings else len(shown)
    for tag in _TAG.finditer(shown, at):
        kind, body = tag.group(1), tag.group(2).strip()
        out.append(shown[at : tag.start()])
        at = tag.end()
        if kind == "{":
            out.extend(a or b for a, b in _STRING.findall(body))
        elif kind == "%" and body:
            depth += {"if": 1, "endif": -1}.get(body.split(maxsplit=1)[0], 0)
        if not depth:
            return "".join(out)
    raise _other(
        "open the answer under `if add_generation_prompt`", "no such condition, or no end of it"
    )


def _other(rule: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"must {rule}; got {got}. Templates are read, not run: use the checkpoint's own text "
        "tokenizer, or send model requests with token ids."
    )
