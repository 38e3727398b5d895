"""Cuts a chat template's text into pieces and tells what each would show; runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["text", "show", "do"]

_OPENING = re.compile(r"\{[#%{]")
_CLOSING = {"{#": "#}", "{%": "%}", "{{": "}}"}
_STRING = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_SUBSCRIPT = re.compile(r"\[\s*(['\"])(\w+)\1\s*\]")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}
# Conditions that fail for one user turn without tools.
_NEVER = re.compile(r"tools\b(?!.*\bor\b)|(?!.*(\bor\b|\bnot\b|!=)).*role\s*==\s*['\"]system['\"]")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a template. kind: "text" outside of tags, "show" ``{{ }}``, "do" ``{% %}``."""

    kind: Kind
    body: str

    @property
    def word(self) -> str:
        """Return the first word of a "do" piece, "" for others."""
        return self.body.split(maxsplit=1)[0] if self.kind == "do" and self.body else ""

    def literals(self) -> list[str]:
        """Return the strings written in the piece."""
        return [_unescaped(found) for found in _STRING.finditer(_attributes(self.body))]

    def shown(self) -> str:
        """Return the text it shows: ``{role}`` for a turn's role, ``{}`` for other values."""
        if self.kind != "show":
            return self.body if self.kind == "text" else ""
        body, out, at = _attributes(self.body), [], 0
        for found in [*_STRING.finditer(body), None]:
            between = body[at : found.start() if found else len(body)].strip(" +~()\r\n\t")
            if between:
                out.append("{role}" if between.split(".")[-1] == "role" else "{}")
            if found is not None:
                out.append(_unescaped(found))
                at = found.end()
        return "".join(out)


def parts(template: str) -> Iterator[Part]:
    """Yield the pieces, with white space removed as templates are read in practice.

    That is: no line end behind a ``{% %}``, no indentation before one, and no white space on the
    side of a minus sign in a tag.
    """
    at, strip_left, after_block = 0, False, False
    for found in [*_tags(template), None]:
        text = template[at : found[0] if found else len(template)]
        tag = template[slice(*found)] if found else ""
        block = tag[:2] in ("{%", "{#")
        line_start = at == 0
        if strip_left:
            text = text.lstrip()
        elif after_block and text.startswith(("\n", "\r\n")):
            text, line_start = text.split("\n", 1)[1], True
        if tag[2:3] == "-":
            text = text.rstrip()
        elif block and tag[2:3] != "+":
            text = re.sub(r"(?<=\n)[ \t]+$", "", text)
            text = "" if line_start and not text.strip(" \t") else text
        if text:
            yield Part("text", text)
        if found is None:
            return
        at, strip_left, after_block = found[1], tag[-3] == "-", block
        if tag[:2] != "{#":
            yield Part("do" if block else "show", tag[2:-2].strip("-+ \t\r\n"))


def _tags(template: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of every tag, in one pass: nothing is sought twice that is not there."""
    endless: set[str] = set()
    at = 0
    while found := _OPENING.search(template, at):
        kind, at = found.group(0), found.start() + 1
        end = -1 if kind in endless else template.find(_CLOSING[kind], found.end())
        if end < 0:
            endless.add(kind)
        else:
            at = end + 2
            yield found.start(), at


def reachable(pieces: Sequence[Part]) -> list[bool]:
    """Return which pieces one user turn without tools may come to.

    False only where a condition around the piece surely fails.
    """
    out: list[bool] = []
    open_ifs: list[bool] = []
    for part in pieces:
        if part.word == "if":
            open_ifs.append(not _NEVER.match(part.body[2:].strip(" (")))
        elif part.word == "elif" and open_ifs:
            open_ifs[-1] = not _NEVER.match(part.body[4:].strip(" ("))
        elif part.word == "else" and open_ifs:
            open_ifs[-1] = True
        elif part.word == "endif" and open_ifs:
            open_ifs.pop()
        out.append(all(open_ifs))
    return out


def _attributes(body: str) -> str:
    """Return an expression with subscripts by name written as attributes."""
    return _SUBSCRIPT.sub(r".\2", body)


def _unescaped(literal: re.Match[str]) -> str:
    body = literal.group(1) if literal.group(1) is not None else literal.group(2)
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found.group(1), found.group(1)), body)
