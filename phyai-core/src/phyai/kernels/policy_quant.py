"""The ``quantization`` section of a policy: which layers get which quantised format.

Weights are rounded to nearest (``rtn``) when they are loaded: static and symmetric. Inputs are
quantised per token while the model runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from phyai.config_mapping import check_keys
from phyai.errors import ConfigError, did_you_mean

DTYPES = ("bf16", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "nvfp4", "mxfp4")
GRANULARITIES = ("per_tensor", "per_channel", "block")
MICRO_SCALED = ("nvfp4", "mxfp4")
SELECTORS = ("name", "glob", "regex", "module_cls")

COMBINATIONS: dict[tuple[str, str, tuple[int, int] | None], tuple[str | None, ...]] = {
    ("int4", "block", (1, 128)): (None, "int8", "fp8_e4m3"),
    ("int8", "block", (1, 128)): (None, "int8"),
    ("fp8_e4m3", "per_channel", None): (None, "fp8_e4m3"),
    ("fp8_e5m2", "per_channel", None): (None, "fp8_e5m2"),
    ("fp8_e4m3", "block", (128, 128)): ("fp8_e4m3",),
    ("fp8_e5m2", "block", (128, 128)): ("fp8_e5m2",),
    ("mxfp4", "block", (1, 32)): (None,),
    ("nvfp4", "block", (1, 16)): (None,),
}
"""(weight dtype, granularity, block) -> input dtypes that go with it; None: 16-bit inputs."""


@dataclass(frozen=True, slots=True)
class TensorQuant:
    """How one tensor is quantised. ``per_channel`` means per row; for an input, per token."""

    dtype: str
    granularity: str
    block_shape: tuple[int, int] | None = None
    symmetric: bool = True
    dynamic: bool = False
    micro_scaled: bool = False

    def __str__(self) -> str:
        block = "" if self.block_shape is None else f" {list(self.block_shape)}"
        return f"{self.dtype} {self.granularity}{block}"


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """The formats of one linear layer's weight and, when it is quantised too, input.

    >>> from phyai.kernels.policy_quant import QuantScheme, TensorQuant
    >>> QuantScheme(TensorQuant("int8", "block", (1, 128))).facts()["quant.format"]
    'int8'
    """

    weight: TensorQuant
    input: TensorQuant | None = None

    def facts(self) -> dict[str, str]:
        """Return the ``quant.*`` facts a quantised layer adds to its kernel decision."""
        found = {
            "quant.format": self.weight.dtype,
            "quant.weight": self.weight.dtype,
            "quant.granularity": self.weight.granularity,
        }
        return found if self.input is None else {**found, "quant.input": self.input.dtype}

    def __str__(self) -> str:
        return f"{self.weight}, {self.input.dtype if self.input else '16-bit'} inputs"


@dataclass(frozen=True, slots=True)
class QuantRule:
    """One rule: a selector of layers and their scheme; None leaves them as they are."""

    selector: str
    pattern: str
    scheme: QuantScheme | None

    def matches(self, name: str, module_cls: str) -> bool:
        """Return whether the rule selects a layer, by checkpoint prefix or class name."""
        if self.selector == "module_cls":
            return self.pattern == module_cls
        if self.selector == "name":
            return self.pattern == name
        if self.selector == "glob":
            return fnmatchcase(name, self.pattern)
        return re.search(self.pattern, name) is not None


@dataclass(frozen=True, slots=True)
class QuantPlan:
    """The whole section. ``scheme_for`` answers for one layer."""

    rules: tuple[QuantRule, ...] = ()
    default: QuantScheme | None = None
    method: str = "rtn"
    stage: str = "load"

    @property
    def applies(self) -> bool:
        """Whether any layer could become quantised."""
        return self.default is not None or any(rule.scheme is not None for rule in self.rules)

    def scheme_for(self, names: str | Iterable[str], module_cls: str = "") -> QuantScheme | None:
        """Return the scheme of a layer: the first rule that selects it, else the default.

        names: its checkpoint prefix, or all prefixes of a fused layer, which must agree.
        Raises: ConfigError when they do not.
        """
        legs = [names] if isinstance(names, str) else list(names)
        found = [self._scheme_of(name, module_cls) for name in legs]
        if any(scheme != found[0] for scheme in found[1:]):
            told = ", ".join(f"{n}: {s or 'none'}" for n, s in zip(legs, found, strict=True))
            raise ConfigError(
                f"quantization must treat layers that are fused into one alike; got {told}. "
                "Let one rule select all of them."
            )
        return found[0] if found else self.default

    def _scheme_of(self, name: str, module_cls: str) -> QuantScheme | None:
        for rule in self.rules:
            if rule.matches(name, module_cls):
                return rule.scheme
        return self.default


def parse_quantization(data: object, where: str) -> QuantPlan:
    """Return the plan written in ``data``; None gives an empty one.

    where: dotted path that starts every message.
    Raises: ConfigError for unknown keys, values and combinations.
    """
    if data is None:
        return QuantPlan()
    section = _mapping(data, where, ("method", "stage", "default", "rules"))
    if "method" not in section:
        raise ConfigError(f"{where}.method must be given; got none. Write `method: rtn`.")
    _one_of(section["method"], ("rtn",), f"{where}.method")
    _one_of(section.get("stage", "load"), ("load",), f"{where}.stage")
    default = section.get("default")
    scheme = None
    if default is not None:
        inner = f"{where}.default"
        scheme = _scheme(_mapping(default, inner, ("weight", "input")), inner)
    rules = section.get("rules")
    if rules is not None and not isinstance(rules, list | tuple):
        raise ConfigError(f"{where}.rules must be a list; got {rules!r}.")
    return QuantPlan(
        tuple(_rule(rule, f"{where}.rules[{i}]") for i, rule in enumerate(rules or ())), scheme
    )


def _rule(data: object, where: str) -> QuantRule:
    rule = _mapping(data, where, ("match", "weight", "input", "scheme"))
    match = _mapping(rule.get("match"), f"{where}.match", SELECTORS)
    if len(match) != 1:
        raise ConfigError(
            f"{where}.match must hold exactly one of {', '.join(SELECTORS)}; got "
            f"{sorted(match) or 'none'}."
        )
    ((selector, pattern),) = match.items()
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"{where}.match.{selector} must be text; got {pattern!r}.")
    if selector == "regex":
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{where}.match.regex must be a regular expression; got {pattern!r}: {error}."
            ) from error
    if "scheme" in rule:
        if rule["scheme"] is not None or "weight" in rule or "input" in rule:
            raise ConfigError(
                f"{where}.scheme must be null and stand alone; got {rule['scheme']!r}. Formats "
                "belong under weight and input."
            )
        return QuantRule(selector, pattern, None)
    return QuantRule(selector, pattern, _scheme(rule, where))


def _scheme(data: Mapping[str, Any], where: str) -> QuantScheme:
    if data.get("weight") is None:
        raise ConfigError(
            f"{where}.weight must be given; got none. Write its dtype, or `scheme: null` to leave "
            "the layers as they are."
        )
    weight = _weight(data["weight"], f"{where}.weight")
    found = data.get("input")
    scheme = QuantScheme(weight, None if found is None else _input(found, f"{where}.input"))
    allowed = COMBINATIONS[weight.dtype, weight.granularity, weight.block_shape]
    got = scheme.input.dtype if scheme.input else None
    if got not in allowed:
        listed = ", ".join(dtype or "null" for dtype in allowed)
        raise ConfigError(
            f"{where}.input must be {listed} beside weights of {weight}; got {got or 'null'}."
        )
    return scheme


_TENSOR_KEYS = ("dtype", "granularity", "block_shape", "symmetric", "dynamic", "micro_scaled")


def _weight(data: object, where: str) -> TensorQuant:
    spec = _mapping(data, where, _TENSOR_KEYS)
    dtype = _one_of(spec.get("dtype"), DTYPES, f"{where}.dtype")
    layouts = [key[1:] for key in COMBINATIONS if key[0] == dtype]
    if not layouts:
        raise ConfigError(
            f"{where}.dtype must be a quantised format; got {dtype!r}. Write `scheme: null` to "
            "leave the layers as they are."
        )
    block = _block_shape(spec.get("block_shape"), f"{where}.block_shape")
    granularity = spec.get("granularity")
    if granularity is not None:
        _one_of(granularity, GRANULARITIES, f"{where}.granularity")
    for known, shape in layouts:
        fits = granularity in (None, known) and block in (None, shape)
        if fits:
            micro = dtype in MICRO_SCALED
            _must_be(spec, where, symmetric=True, dynamic=False, micro_scaled=micro)
            return TensorQuant(dtype, known, shape, micro_scaled=micro)
    listed = " or ".join(f"{g}{'' if s is None else f' {list(s)}'}" for g, s in layouts)
    raise ConfigError(
        f"{where} of dtype {dtype} must be {listed}; got granularity {granularity!r}, "
        f"block_shape {None if block is None else list(block)!r}."
    )


def _input(data: object, where: str) -> TensorQuant:
    spec = _mapping(data, where, _TENSOR_KEYS)
    dtype = _one_of(spec.get("dtype"), DTYPES, f"{where}.dtype")
    granularity = spec.get("granularity", "per_channel")
    if granularity not in ("per_channel", "per_token") or spec.get("block_shape") is not None:
        raise ConfigError(
            f"{where} must be quantised per token (granularity per_channel, no block_shape); got "
            f"granularity {granularity!r}, block_shape {spec.get('block_shape')!r}."
        )
    _must_be(spec, where, symmetric=True, dynamic=True, micro_scaled=False)
    return TensorQuant(dtype, "per_channel", dynamic=True)


def _must_be(spec: Mapping[str, Any], where: str, **wanted: bool) -> None:
    for name, value in wanted.items():
        if spec.get(name, value) is not value:
            raise ConfigError(
                f"{where}.{name} must be {str(value).lower()} here; got {spec[name]!r}."
            )


def _block_shape(value: object, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    good = (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(n) is int and n > 0 for n in value)
    )
    if not good or not isinstance(value, list | tuple):
        raise ConfigError(f"{where} must be two positive numbers such as [1, 128]; got {value!r}.")
    return value[0], value[1]


def _mapping(data: object, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a mapping; got {data!r}.")
    check_keys(data, keys, where)
    return data


def _one_of(value: object, choices: tuple[str, ...], where: str) -> str:
    if isinstance(value, str) and value in choices:
        return value
    hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    raise ConfigError(f"{where} must be one of {', '.join(choices)}; got {value!r}.{hint}")
