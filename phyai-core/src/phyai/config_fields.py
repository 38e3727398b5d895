"""Field rules shared by all config dataclasses: exact types, choices, dtypes by name.

Layer 1, torch-free: a dtype is stored under its canonical name and becomes a ``torch.dtype``
only when somebody reads it.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

from phyai.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

DTYPE_NAMES: dict[str, str] = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "fp64": "float64",
    "float64": "float64",
    "double": "float64",
}
"""Accepted spelling -> canonical name of a parameter dtype."""


def is_torch_dtype(value: object) -> bool:
    """Return whether ``value`` is a ``torch.dtype``, without importing torch."""
    kind = type(value)
    return kind.__module__ == "torch" and kind.__qualname__ == "dtype"


def dtype_name(value: object, where: str = "dtype") -> str:
    """Return the canonical name of a dtype given by name or as a ``torch.dtype``.

    Raises: ConfigError (starting with ``where``) for anything but the four float types.

    >>> from phyai.config_fields import dtype_name
    >>> dtype_name("bf16")
    'bfloat16'
    """
    text = str(value).removeprefix("torch.") if is_torch_dtype(value) else value
    if isinstance(text, str) and text in DTYPE_NAMES:
        return DTYPE_NAMES[text]
    hint = did_you_mean(text, DTYPE_NAMES) if isinstance(text, str) else ""
    raise ConfigError(
        f"{where} must be a floating torch.dtype or one of {', '.join(DTYPE_NAMES)}; "
        f"got {value!r}.{hint}"
    )


def torch_dtype(name: str) -> torch.dtype:
    """Return the ``torch.dtype`` of an accepted name. Imports torch."""
    import torch

    resolved = getattr(torch, dtype_name(name))
    assert isinstance(resolved, torch.dtype)
    return resolved


class DTypeField:
    """A dataclass field that takes a dtype or its name and reads as a ``torch.dtype``.

    The owner must be a dataclass without slots; compare and print ``name_of(owner)``.

    >>> from phyai.engine_config import DeviceConfig
    >>> DeviceConfig(params_dtype="fp32").dtype_name
    'float32'
    """

    def __init__(self, default: str, *, help: str = "") -> None:
        self.default = dtype_name(default)
        self.help = help
        self._owner, self._name = "", ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner.__name__, name

    @overload
    def __get__(self, instance: None, owner: type) -> str: ...
    @overload
    def __get__(self, instance: object, owner: type) -> torch.dtype: ...
    def __get__(self, instance: object | None, owner: type) -> torch.dtype | str:
        # dataclasses read the default through the class.
        return self.default if instance is None else torch_dtype(self.name_of(instance))

    def __set__(self, instance: object, value: torch.dtype | str) -> None:
        name = dtype_name(value, f"{self._owner}.{self._name}")
        instance.__dict__[f"_{self._name}"] = name

    def name_of(self, instance: object) -> str:
        """Return the stored canonical name, such as ``bfloat16``."""
        name: str = instance.__dict__[f"_{self._name}"]
        return name


def dtype_field(cls: type, name: str) -> DTypeField | None:
    """Return the descriptor of field ``name`` when it holds a dtype, else None."""
    found = inspect.getattr_static(cls, name, None)
    return found if isinstance(found, DTypeField) else None


def raw_value(config: object, name: str) -> Any:
    """Return a field's value, a dtype by its name, without importing torch."""
    descriptor = dtype_field(type(config), name)
    return getattr(config, name) if descriptor is None else descriptor.name_of(config)


class Config:
    """Base of the frozen config dataclasses; derive a changed one with ``replace``.

    >>> from phyai.engine_config import RuntimeConfig
    >>> RuntimeConfig().replace(max_live_caches=4).max_live_caches
    4
    """

    __slots__ = ()

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some fields changed."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        kept = {f.name: raw_value(self, f.name) for f in fields if f.init}
        return type(self)(**(kept | changes))


def fail(config: object, name: str, rule: str, hint: str = "") -> NoReturn:
    """Raise ConfigError saying that field ``name`` breaks ``rule``."""
    value = raw_value(config, name)
    raise ConfigError(f"{type(config).__name__}.{name} {rule}; got {value!r}.{hint}")


def check_bool(config: object, *names: str) -> None:
    """Raise ConfigError unless the fields are exactly bool."""
    for name in names:
        if type(raw_value(config, name)) is not bool:
            fail(config, name, "must be True or False")


def check_int(
    config: object, *names: str, minimum: int, maximum: int = 2**63 - 1, optional: bool = False
) -> None:
    """Raise ConfigError unless the fields are int (never bool) from ``minimum`` to ``maximum``."""
    for name in names:
        value = raw_value(config, name)
        if optional and value is None:
            continue
        or_none = " or None" if optional else ""
        if type(value) is not int or value < minimum:
            fail(config, name, f"must be an int >= {minimum}{or_none}")
        if value > maximum:
            fail(config, name, f"must be at most {maximum}{or_none}")


def check_seconds(
    config: object, *names: str, optional: bool = False, zero_ok: bool = False
) -> None:
    """Raise ConfigError unless the fields are finite numbers > 0 (or >= 0)."""
    for name in names:
        value = raw_value(config, name)
        if optional and value is None:
            continue
        good = type(value) in (int, float) and math.isfinite(value)
        if not good or value < 0 or (value == 0 and not zero_ok):
            rule = f"must be a finite number {'>= 0' if zero_ok else '> 0'}"
            fail(config, name, rule + (" or None" if optional else ""))


def check_text(config: object, *names: str, optional: bool = False) -> None:
    """Raise ConfigError unless the fields are non-empty strings."""
    for name in names:
        value = raw_value(config, name)
        if optional and value is None:
            continue
        if type(value) is not str or not value.strip():
            fail(config, name, f"must be a non-empty str{' or None' if optional else ''}")


def check_choice(
    config: object, name: str, choices: Iterable[str], *, optional: bool = False
) -> None:
    """Raise ConfigError unless the field is one of ``choices``."""
    value, known = raw_value(config, name), tuple(choices)
    if (optional and value is None) or (type(value) is str and value in known):
        return
    hint = did_you_mean(value, known) if isinstance(value, str) else ""
    listed = ", ".join(known) + (", None" if optional else "")
    fail(config, name, f"must be one of {listed}", hint)


def check_instance(config: object, name: str, kind: type, *, optional: bool = False) -> None:
    """Raise ConfigError unless the field is an instance of ``kind``."""
    value = raw_value(config, name)
    if not isinstance(value, kind) and not (optional and value is None):
        fail(config, name, f"must be a {kind.__name__}{' or None' if optional else ''}")
