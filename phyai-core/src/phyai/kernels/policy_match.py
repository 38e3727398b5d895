"""The ``match`` of a policy rule: facts, comparisons and combinators, parsed and evaluated."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from phyai.config_fields import DTYPE_NAMES
from phyai.errors import ConfigError, did_you_mean
from phyai.kernels.facts import ALIASES, FACTS, NAMESPACES, OP_ALIASES, Kind

COMBINATORS = ("all_of", "any_of", "none_of", "when")

_COMPARISON = re.compile(r"(<=|>=|==|!=|<|>)\s*(.*)", re.DOTALL)
_ARCH = re.compile(r"sm_?(\d{2,3})[a-z]?")
_VERSION = re.compile(r"\d+(\.\d+)*")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_NARROW = ("int8", "uint8", "int4", "float8_e4m3fn", "float8_e5m2")
_DTYPES = {
    **DTYPE_NAMES,
    **{name: name for name in _NARROW},
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


@dataclass(frozen=True)
class Condition:
    """One fact and the values it may have: ``(operator, operand)`` pairs, any of which will do.

    A fact that is not known fulfils nothing but the literal ``null``.
    """

    fact: str
    kind: Kind
    choices: tuple[tuple[str, Any], ...]

    def problem(self, facts: Mapping[str, Any]) -> str | None:
        """Return why the facts do not fulfil the condition, or None."""
        value = facts.get(self.fact)
        if any(_holds(self.kind, value, operator, wanted) for operator, wanted in self.choices):
            return None
        needed = " or ".join(
            f"{'' if op == '==' else op}{_written(self.kind, wanted)}"
            for op, wanted in self.choices
        )
        known = "is not known here" if value is None else f"is {value}"
        return f"{self.fact} {known}; needs {needed}"


@dataclass(frozen=True)
class Matcher:
    """A conjunction of conditions and combinators over flat conjunctions."""

    conditions: tuple[Condition, ...] = ()
    all_of: tuple[Matcher, ...] = ()
    any_of: tuple[Matcher, ...] = ()
    none_of: tuple[Matcher, ...] = ()
    when: tuple[Matcher, Matcher] | None = None
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def problem(self, facts: Mapping[str, Any]) -> str | None:
        """Return the first reason why the facts do not match, or None when they do."""
        needed: tuple[Condition | Matcher, ...] = (*self.conditions, *self.all_of)
        for part in needed:
            if (why := part.problem(facts)) is not None:
                return why
        if self.any_of:
            reasons = [part.problem(facts) for part in self.any_of]
            if None not in reasons:
                return f"nothing of any_of holds ({'; '.join(str(why) for why in reasons)})"
        for index, part in enumerate(self.none_of):
            if part.problem(facts) is None:
                return f"none_of[{index}] holds"
        if self.when is not None and self.when[0].problem(facts) is None:
            return self.when[1].problem(facts)
        return None

    def named_ops(self) -> frozenset[str] | None:
        """Return the op names that the conditions on ``op`` leave, or None without a condition."""
        named = [
            frozenset(wanted for _, wanted in condition.choices)
            for condition in self._conjunction()
            if condition.fact == "op"
        ]
        return frozenset.intersection(*named) if named else None

    def all_conditions(self) -> Iterator[Condition]:
        """Yield every condition, those inside combinators included."""
        yield from self.conditions
        pair = self.when or ()
        for part in (*self.all_of, *self.any_of, *self.none_of, *pair):
            yield from part.all_conditions()

    def _conjunction(self) -> Iterator[Condition]:
        yield from self.conditions
        for part in self.all_of:
            yield from part.conditions


def parse_match(
    data: object, where: str, *, facts: Collection[str] = (), combinators: bool = True
) -> Matcher:
    """Return the matcher written in ``data``.

    where: dotted path that starts every message.  facts: names known besides ``FACTS``.
    Raises: ConfigError for unknown facts, values of the wrong kind and misplaced combinators.
    """
    if not isinstance(data, Mapping) or not data:
        raise ConfigError(f"{where} must be a mapping of facts that is not empty; got {data!r}.")
    conditions: dict[str, Condition] = {}
    parts: dict[str, tuple[Matcher, ...]] = {}
    when: tuple[Matcher, Matcher] | None = None
    for key, value in data.items():
        if not isinstance(key, str):
            raise ConfigError(f"{where} must have string keys; got {key!r}.")
        if key in COMBINATORS:
            if not combinators:
                raise ConfigError(
                    f"{where}.{key} must stand at the top level of match; got it inside another "
                    "combinator. Write a rule for each case."
                )
            if key == "when":
                when = _parse_when(value, f"{where}.when", facts)
            else:
                parts[key] = _parse_list(value, f"{where}.{key}", facts)
            continue
        for name, path, literal in _flatten(key, value, where):
            condition = _condition(name, literal, path, facts)
            if condition.fact in conditions:
                raise ConfigError(
                    f"{path} must be given once; got {condition.fact} twice. Use all_of for two "
                    "conditions on one fact."
                )
            conditions[condition.fact] = condition
    return Matcher(tuple(conditions.values()), when=when, source=data, **parts)


def _parse_list(value: object, where: str, facts: Collection[str]) -> tuple[Matcher, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"{where} must be a list of matches that is not empty; got {value!r}.")
    return tuple(
        parse_match(item, f"{where}[{i}]", facts=facts, combinators=False)
        for i, item in enumerate(value)
    )


def _parse_when(value: object, where: str, facts: Collection[str]) -> tuple[Matcher, Matcher]:
    if not isinstance(value, Mapping) or set(value) != {"if", "then"}:
        raise ConfigError(f"{where} must be a mapping with `if` and `then`; got {value!r}.")
    first, second = (
        parse_match(value[key], f"{where}.{key}", facts=facts, combinators=False)
        for key in ("if", "then")
    )
    return first, second


def _flatten(key: str, value: object, where: str) -> Iterator[tuple[str, str, object]]:
    """Yield (dotted fact, path, literal) of one entry; nested mappings become dotted names."""
    path = f"{where}.{key}"
    if not isinstance(value, Mapping):
        yield key, path, value
        return
    if key not in NAMESPACES:
        raise ConfigError(
            f"{path} must be a value, as {key!r} is no namespace ({', '.join(NAMESPACES)}); got "
            f"{value!r}.{did_you_mean(key, NAMESPACES)}"
        )
    if not value:
        raise ConfigError(f"{path} must not be empty; got {value!r}.")
    for name, item in value.items():
        if name in COMBINATORS:
            raise ConfigError(
                f"{path}.{name} must stand at the top level of match; got it inside {key!r}."
            )
        if isinstance(item, Mapping):
            raise ConfigError(f"{path}.{name} must be a value; got {item!r}.")
        yield f"{key}.{name}", f"{path}.{name}", item


def _condition(name: str, value: object, path: str, extra: Collection[str]) -> Condition:
    fact = ALIASES.get(name, name)
    if fact not in FACTS and fact not in extra:
        known = (*FACTS, *extra)
        raise ConfigError(
            f"{path} must be a known fact; got {name!r}.{did_you_mean(name, known)} "
            f"Known facts: {', '.join(sorted(known))}."
        )
    kind = FACTS.get(fact, "any")
    items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise ConfigError(f"{path} must not be an empty list.")
    choices = tuple(_choice(kind, item, path) for item in items)
    return Condition(fact, kind, choices)


def _choice(kind: Kind, value: object, path: str) -> tuple[str, Any]:
    """Return the (operator, operand) of one value."""
    if value is None:
        return "==", None
    found = _COMPARISON.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return "==", _operand(kind, value, path, literal=True)
    operator, text = found[1], found[2].strip()
    if kind == "op":
        raise ConfigError(f"{path} must name ops; got {value!r}. Write a name or a list of names.")
    if kind in ("text", "dtype") and operator not in ("==", "!="):
        raise ConfigError(f"{path} must be compared with == or != only; got {value!r}.")
    return operator, _operand(kind, text, path, literal=False)


def _operand(kind: Kind, value: object, path: str, *, literal: bool) -> Any:
    text = value if isinstance(value, str) else None
    if kind == "number":
        if text is not None and not literal and _NUMBER.fullmatch(text):
            return float(text)
        if type(value) in (int, float):
            return value
        raise ConfigError(f"{path} must be a number or a comparison such as '<=64'; got {value!r}.")
    if kind == "any":  # booleans, numbers and words
        if text is not None and not literal and _NUMBER.fullmatch(text):
            return float(text)
        if type(value) in (bool, int, float, str) and value != "":
            return value
        raise ConfigError(f"{path} must be a plain value; got {value!r}.")
    if kind == "version" and type(value) is float:  # YAML reads 2.10 as 2.1
        raise ConfigError(f"{path} must be text; got {value!r}. Put quotes around the version.")
    if kind == "version" and type(value) is int:
        text = str(value)
    if text is None or not text:
        raise ConfigError(f"{path} must be text; got {value!r}.")
    if kind == "arch":
        number = arch_number(text)
        if number is None and not literal:
            raise ConfigError(f"{path} must compare with an arch such as sm90; got {value!r}.")
        return text.lower() if number is None else number
    if kind == "version":
        if not _VERSION.match(text):
            raise ConfigError(f"{path} must be a version such as '2.6' or '>=2.6'; got {value!r}.")
        return version_tuple(text)
    if kind == "dtype":
        if text not in _DTYPES:
            raise ConfigError(
                f"{path} must be a dtype ({', '.join(sorted(_DTYPES))}); got {value!r}."
                f"{did_you_mean(text, _DTYPES)}"
            )
        return _DTYPES[text]
    return text


def _holds(kind: Kind, value: Any, operator: str, wanted: Any) -> bool:
    if value is None or wanted is None:
        return value is None and wanted is None
    if isinstance(value, tuple):  # such as the features of a CPU
        inside = wanted in value
        return inside if operator == "==" else not inside
    if kind == "arch":
        number = arch_number(str(value))
        value = str(value).lower() if number is None else number
        if isinstance(value, str) != isinstance(wanted, str):
            return operator == "!="
    elif kind == "version":
        value = version_tuple(str(value))
        width = max(len(value), len(wanted))
        value, wanted = (v + (0,) * (width - len(v)) for v in (value, wanted))
    elif kind == "dtype":
        value = _DTYPES.get(str(value), str(value))
    elif kind == "op":
        wanted = value if OP_ALIASES.get(wanted) == value else wanted
    elif any(isinstance(value, plain) != isinstance(wanted, plain) for plain in (bool, str)):
        return operator == "!="
    return _COMPARE[operator](value, wanted)


def arch_number(text: str) -> int | None:
    """Return 90 for ``sm90``, ``sm_90`` and ``sm90a``, None for other architectures."""
    found = _ARCH.fullmatch(text.strip().lower())
    return int(found[1]) if found else None


def version_tuple(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of ``2.13.0+cpu``."""
    found = _VERSION.match(text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _written(kind: Kind, wanted: Any) -> str:
    if wanted is None:
        return "none"
    if kind == "arch" and isinstance(wanted, int):
        return f"sm{wanted}"
    if kind == "version":
        return ".".join(str(part) for part in wanted)
    if kind == "number":
        return f"{wanted:g}"
    return str(wanted)
