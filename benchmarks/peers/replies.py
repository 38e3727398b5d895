"""What a reply must hold, field by field: a worker may be anybody's program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number.

    least: the smallest.  above: whether it must be larger than ``least``.
    """

    least: float = 0.0
    above: bool = False
    whole: bool = False
    optional: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        return f"{kind} {'above' if self.above else 'of at least'} {self.least:g}"

    def holds(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if not math.isfinite(value) or (self.whole and value != int(value)):
            return False
        return value > self.least if self.above else value >= self.least


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is not empty."""

    optional: bool = False

    def __str__(self) -> str:
        return "a text"

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and bool(value)


@dataclass(frozen=True, slots=True)
class Table:
    """An object whose values all keep a rule."""

    rule: Number | Text
    optional: bool = False

    def __str__(self) -> str:
        return f"an object of which every value is {self.rule}"

    def holds(self, value: Any) -> bool:
        return isinstance(value, dict) and all(self.rule.holds(entry) for entry in value.values())


Rule = Number | Text | Table

RULES: Mapping[str, Mapping[str, Rule]] = {
    "hello": {"name": Text(), "versions": Table(Text()), "computes": Text()},
    "estimate": {"bytes": Number(whole=True)},
    "load": {"seconds": Number(optional=True)},
    "inputs": {
        "prefix_positions": Number(1, whole=True),
        "compile_s": Number(optional=True),
    },
    "run": {"seconds": Number(above=True), "stages": Table(Number(), optional=True)},
    "result": {"peak_rss_bytes": Number(whole=True), "first_call_s": Number(above=True)},
}


def problem(op: str, reply: Mapping[str, Any]) -> str:
    """Return what is wrong with the reply to a request, or nothing.

    The text follows "must answer 'op' with".
    """
    for name, rule in RULES.get(op, {}).items():
        if name not in reply:
            if rule.optional:
                continue
            return f"{name!r}; got {sorted(reply)}"
        if not rule.holds(reply[name]):
            return f"{name!r} as {rule}; got {reply[name]!r}"
    return ""
