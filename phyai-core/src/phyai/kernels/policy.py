"""Policy files (``phyai.kernel/v1``): rules that say which kernel an op uses, and when.

Order of a decision: the matching override of the highest priority, else the matching rule of the
highest priority, else the catalogue's order. A policy is read once and then bound to a table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phyai.config_mapping import check_keys
from phyai.config_yaml import load_yaml_mapping
from phyai.errors import ConfigError, did_you_mean
from phyai.kernels.facts import OP_ALIASES
from phyai.kernels.policy_match import Matcher, parse_match
from phyai.kernels.policy_quant import QuantPlan, parse_quantization

if TYPE_CHECKING:
    from phyai.kernels.rows import KernelRow

SCHEMA = "phyai.kernel/v1"
SCHEMAS = (SCHEMA, "v1", "1", 1)
PROFILES = ("static", "autotune")
FALLBACKS = ("reference", "error")

Profile = Literal["static", "autotune"]
Section = Literal["rules", "overrides"]

_TOP = ("schema", "profile", "defaults", "rules", "overrides", "quantization")
_CHOICES: dict[Section, str] = {"rules": "prefer", "overrides": "use"}


@dataclass(frozen=True)
class PolicyRule:
    """One entry of ``rules`` or ``overrides``.

    kernels: ids in order of preference; empty when ``glob`` restricts the catalogue instead.
    strict: an override; nothing else may stand in for its kernels.
    """

    id: str
    where: str
    match: Matcher
    kernels: tuple[str, ...] = ()
    glob: str | None = None
    priority: int = 0
    strict: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{'override' if self.strict else 'rule'} {self.id!r}"


@dataclass(frozen=True)
class KernelPolicy:
    """A checked policy. ``fingerprint`` is 16 hex digits over its meaning.

    >>> from phyai.kernels.policy import parse_policy
    >>> parse_policy({"schema": "v1"}).profile
    'static'
    """

    profile: Profile = "static"
    fallback: str = "reference"
    rules: tuple[PolicyRule, ...] = ()
    overrides: tuple[PolicyRule, ...] = ()
    quantization: QuantPlan = field(default_factory=QuantPlan)
    fingerprint: str = ""
    where: str = "policy"

    @property
    def entries(self) -> tuple[PolicyRule, ...]:
        """Return overrides and rules in the order they are asked, ties in the file's order."""
        ranked = [sorted(part, key=lambda r: -r.priority) for part in (self.overrides, self.rules)]
        return (*ranked[0], *ranked[1])


def load_policy(path: str | Path, *, facts: Collection[str] = ()) -> KernelPolicy:
    """Return the policy in a YAML file; see ``parse_policy``. Errors start with the file's name."""
    data = load_yaml_mapping(path)
    try:
        return parse_policy(data, facts=facts)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_policy(
    data: object, *, where: str = "policy", facts: Collection[str] = ()
) -> KernelPolicy:
    """Return the policy written in plain data.

    where: dotted path that starts every message.  facts: names known besides core's own.
    Raises: ConfigError for an unknown schema, key, fact or value. Ops and kernels are checked when
    the policy is bound to a table.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a mapping; got {data!r}.")
    check_keys(data, _TOP, where)
    schema = data.get("schema")
    if type(schema) not in (str, int) or schema not in SCHEMAS:
        hint = did_you_mean(schema, [SCHEMA]) if isinstance(schema, str) else ""
        raise ConfigError(f"{where}.schema must be {SCHEMA!r}; got {schema!r}.{hint}")
    profile = _choice(data.get("profile"), PROFILES, f"{where}.profile")
    defaults = data.get("defaults")
    if defaults is not None:
        if not isinstance(defaults, Mapping):
            raise ConfigError(f"{where}.defaults must be a mapping; got {defaults!r}.")
        check_keys(defaults, ("fallback",), f"{where}.defaults")
    fallback = _choice((defaults or {}).get("fallback"), FALLBACKS, f"{where}.defaults.fallback")
    rules = _entries(data, "rules", where, facts)
    overrides = _entries(data, "overrides", where, facts)
    _check_ids((*rules, *overrides))
    plan = parse_quantization(data.get("quantization"), f"{where}.quantization")
    meaning = {
        "profile": profile,
        "fallback": fallback,
        "rules": [_meaning(rule) for rule in rules],
        "overrides": [_meaning(rule) for rule in overrides],
        "quantization": repr(plan),
    }
    return KernelPolicy(
        "autotune" if profile == "autotune" else "static",
        fallback,
        rules,
        overrides,
        plan,
        fingerprint(meaning),
        where,
    )


def fingerprint(meaning: object) -> str:
    """Return 16 hex digits that change with plain data, not with the order of its keys."""
    text = json.dumps(meaning, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _meaning(rule: PolicyRule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "priority": rule.priority,
        "match": rule.match.source,
        "kernels": rule.kernels,
        "glob": rule.glob,
        "params": rule.params,
    }


def _choice(value: object, choices: Sequence[str], where: str) -> str:
    """Return a choice, the first one when left out."""
    if value is None:
        return choices[0]
    if isinstance(value, str) and value in choices:
        return value
    hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    raise ConfigError(f"{where} must be one of {', '.join(choices)}; got {value!r}.{hint}")


def _entries(
    data: Mapping[str, Any], section: Section, where: str, facts: Collection[str]
) -> tuple[PolicyRule, ...]:
    entries = data.get(section)
    if entries is None:
        return ()
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"{where}.{section} must be a list; got {entries!r}.")
    return tuple(
        _entry(entry, section, f"{where}.{section}[{i}]", facts) for i, entry in enumerate(entries)
    )


def _entry(data: object, section: Section, where: str, facts: Collection[str]) -> PolicyRule:
    choice = _CHOICES[section]
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a mapping; got {data!r}.")
    check_keys(data, ("id", "priority", "match", choice, "restrict_to", "params"), where)
    name = data.get("id")
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"{where}.id must be text; got {name!r}.")
    priority = data.get("priority", 0)
    if type(priority) is not int:
        raise ConfigError(f"{where}.priority must be an integer; got {priority!r}.")
    params = data.get("params")
    if params is not None and (
        not isinstance(params, Mapping) or not all(isinstance(key, str) for key in params)
    ):
        raise ConfigError(f"{where}.params must be a mapping with string keys; got {params!r}.")
    given = [key for key in (choice, "restrict_to") if data.get(key) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{where} must hold exactly one of {choice} and restrict_to; got "
            f"{' and '.join(given) or 'neither'}."
        )
    kernels: tuple[str, ...] = ()
    glob = data.get("restrict_to")
    if glob is None:
        kernels = _kernel_ids(data[choice], f"{where}.{choice}", several=section == "rules")
    elif not isinstance(glob, str) or not glob:
        raise ConfigError(f"{where}.restrict_to must be a kernel id or glob; got {glob!r}.")
    return PolicyRule(
        name,
        where,
        parse_match(data.get("match"), f"{where}.match", facts=facts),
        kernels,
        glob,
        priority,
        section == "overrides",
        dict(params or {}),
    )


def _kernel_ids(value: object, where: str, *, several: bool) -> tuple[str, ...]:
    items = list(value) if several and isinstance(value, list | tuple) else [value]
    rule = "a kernel id or a list of them" if several else "one kernel id"
    if not items or not all(isinstance(item, str) and item for item in items):
        raise ConfigError(f"{where} must be {rule}; got {value!r}.")
    if len(set(items)) != len(items):
        raise ConfigError(f"{where} must name each kernel once; got {value!r}.")
    return tuple(str(item) for item in items)


def _check_ids(rules: Iterable[PolicyRule]) -> None:
    seen: dict[str, str] = {}
    for rule in rules:
        if rule.id in seen:
            raise ConfigError(
                f"{rule.where}.id must be unique in the policy; got {rule.id!r} also at "
                f"{seen[rule.id]}. Rename one."
            )
        seen[rule.id] = rule.where


# ---------------------------------------------------------------- bound to a table


@dataclass(frozen=True)
class Ruling:
    """What a policy says about one decision: the kernels to try in order, and what comes after."""

    rule: PolicyRule
    kernels: tuple[str, ...]
    fallback: bool


class BoundPolicy:
    """A policy whose ops, kernels and params exist in a table.

    Raises: ConfigError naming the entry, with the closest known name.
    """

    def __init__(self, policy: KernelPolicy, rows: Mapping[str, Sequence[KernelRow]]) -> None:
        self.policy = policy
        self._rows = rows
        self._kernels = {rule.id: self._resolve(rule) for rule in policy.entries}

    def ops_of(self, rule: PolicyRule) -> tuple[str, ...]:
        """Return the ops a rule may decide about."""
        return tuple(self._kernels[rule.id])

    def decide(self, op: str, facts: Mapping[str, Any]) -> Ruling | None:
        """Return the ruling on an op, or None when no entry matches these dotted facts.

        Raises: ConfigError when two entries of one priority match.
        """
        for rules in (self.policy.overrides, self.policy.rules):
            winners = [
                rule
                for rule in rules
                if op in self._kernels[rule.id] and rule.match.problem(facts) is None
            ]
            if not winners:
                continue
            top = max(rule.priority for rule in winners)
            first, *others = [rule for rule in winners if rule.priority == top]
            if others:
                raise ConfigError(
                    f"one policy entry must win op {op!r}; got {first.id!r} and {others[0].id!r}, "
                    f"both of priority {top}. Give one a higher priority or a narrower match."
                )
            allowed = not first.strict and self.policy.fallback == "reference"
            return Ruling(first, self._kernels[first.id][op], allowed)
        return None

    def _resolve(self, rule: PolicyRule) -> dict[str, tuple[str, ...]]:
        """Return the kernels of a rule by op, in the order they are tried."""
        ops = self._ops(rule)
        self._check_conditions(rule)
        names = [row.name for rows in self._rows.values() for row in rows]
        key = "restrict_to" if rule.glob is not None else _CHOICES[_section(rule)]
        for kernel in rule.kernels:
            if kernel not in names:
                raise ConfigError(
                    f"{rule.where}.{key} must name a kernel of the table; got {kernel!r}."
                    f"{did_you_mean(kernel, names)} See `phyai doctor --kernels`."
                )
        found: dict[str, tuple[str, ...]] = {}
        for op in ops:
            mine = {row.name: row for row in self._rows[op]}
            if rule.glob is not None:
                chosen = [name for name in mine if fnmatchcase(name, rule.glob)]
            else:
                chosen = [name for name in rule.kernels if name in mine]
            if chosen:
                self._check_params(rule, [mine[name] for name in chosen])
                found[op] = tuple(chosen)
        if not found:
            listed = [row.name for op in ops for row in self._rows[op]]
            hint = did_you_mean(rule.glob or rule.kernels[0], listed)
            what = "match a kernel" if rule.glob is not None else "name kernels"
            got = rule.glob if rule.glob is not None else list(rule.kernels)
            raise ConfigError(
                f"{rule.where}.{key} must {what} of {', '.join(ops)}; got {got!r}.{hint} "
                "See `phyai doctor --kernels`."
            )
        self._check_coverage(rule, key, found)
        return found

    def _ops(self, rule: PolicyRule) -> tuple[str, ...]:
        """Return the ops the rule's match leaves."""
        named = rule.match.named_ops()
        if named is None:
            return tuple(sorted(self._rows))
        return tuple(sorted({self._op(name, rule) for name in named}))

    def _op(self, name: str, rule: PolicyRule) -> str:
        resolved = name if name in self._rows else OP_ALIASES.get(name, name)
        if resolved not in self._rows:
            raise ConfigError(
                f"{rule.where}.match.op must be a known op; got {name!r}."
                f"{did_you_mean(name, self._rows)} Known ops: {', '.join(sorted(self._rows))}."
            )
        return resolved

    def _check_conditions(self, rule: PolicyRule) -> None:
        """Also ops inside any_of, none_of and when must exist."""
        for condition in rule.match.all_conditions():
            if condition.fact == "op":
                for _, name in condition.choices:
                    self._op(str(name), rule)

    def _check_coverage(
        self, rule: PolicyRule, key: str, found: Mapping[str, tuple[str, ...]]
    ) -> None:
        """A named kernel or op that can never come into play is a mistake."""
        for kernel in rule.kernels:
            if not any(kernel in names for names in found.values()):
                homes = sorted(op for op, rows in self._rows.items()
                               if kernel in [row.name for row in rows])  # fmt: skip
                raise ConfigError(
                    f"{rule.where}.{key} must name kernels of the matched op; got {kernel!r} of "
                    f"{', '.join(homes)}."
                )
        missing = set(self._ops(rule)) - set(found) if rule.match.named_ops() else set()
        if missing:
            raise ConfigError(
                f"{rule.where}.match.op must be ops that have one of the kernels; got "
                f"{', '.join(sorted(missing))} without. Write a rule for each op."
            )

    def _check_params(self, rule: PolicyRule, rows: Sequence[KernelRow]) -> None:
        for row in rows:
            for name in rule.params:
                if name not in row.params:
                    known = ", ".join(sorted(row.params)) or "none"
                    raise ConfigError(
                        f"{rule.where}.params must be parameters of kernel {row.name!r} ({known}); "
                        f"got {name!r}.{did_you_mean(name, row.params)}"
                    )


def _section(rule: PolicyRule) -> Section:
    return "overrides" if rule.strict else "rules"
