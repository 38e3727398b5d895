"""Config dataclasses from and to plain mappings: exact types, dotted paths in every error.

Torch-free as long as no field is annotated with a real ``torch.dtype`` (see ``DTypeField``).
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from phyai import env
from phyai.config_fields import (
    DTypeField,
    dtype_field,
    dtype_name,
    is_torch_dtype,
    raw_value,
    torch_dtype,
)
from phyai.errors import ConfigError, did_you_mean

T = TypeVar("T")

_NOT_YAML = "cannot be given in YAML; got {!r}. Build EngineArgs in Python for it."


class _Unsupported:
    """Stands for a type that YAML cannot express."""


class _TorchNames:
    """Answers ``torch.dtype`` and the like in annotations, so that reading them needs no torch."""

    def __getattr__(self, name: str) -> type:
        return _TorchDType if name == "dtype" else _Unsupported


class _TorchDType:
    """Stands for ``torch.dtype``."""


# ---------------------------------------------------------------- types of fields


def field_types(cls: type) -> dict[str, Any]:
    """Return the resolved annotation of each constructor field of a dataclass.

    An annotation that cannot be resolved (imported for type checking only) counts as a type that
    YAML cannot express.
    """
    resolved: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        namespace = vars(sys.modules.get(base.__module__, types.ModuleType("")))
        for name, annotation in inspect.get_annotations(base).items():
            holder = types.SimpleNamespace(__annotations__={name: annotation})
            try:
                hints = typing.get_type_hints(
                    holder, globalns=dict(namespace), localns={"torch": _TorchNames()}
                )
            except (NameError, AttributeError, TypeError):
                nullable = "None" in str(annotation)
                hints = {name: _Unsupported | None if nullable else _Unsupported}
            resolved.update(hints)
    return {f.name: resolved[f.name] for f in dataclasses.fields(cls) if f.init}


def _is_dtype_type(tp: Any) -> bool:
    if tp is DTypeField or tp is _TorchDType:
        return True
    return getattr(tp, "__module__", "") == "torch" and getattr(tp, "__qualname__", "") == "dtype"


def type_text(tp: Any) -> str:
    """Return a type as a YAML author reads it, such as ``int | null`` or ``list of str``."""
    origin, args = get_origin(tp), get_args(tp)
    if _is_dtype_type(tp):
        return "dtype"
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(arg) for arg in args)
    if origin is Literal:
        return " | ".join(str(arg) for arg in args)
    if tp is type(None):
        return "null"
    if _is_sequence(tp):
        items = [arg for arg in args if arg is not Ellipsis]
        if tp is list or not items:
            return "list"
        if origin is tuple and Ellipsis not in args:
            return f"[{', '.join(type_text(item) for item in items)}]"
        return f"list of {type_text(items[0])}"
    if _is_mapping(tp):
        return "mapping"
    if isinstance(tp, type) and issubclass(tp, enum.Enum):
        return " | ".join(str(member.value) for member in tp)
    if origin is os.PathLike or (isinstance(tp, type) and issubclass(tp, os.PathLike)):
        return "path"
    if tp in (bool, int, float, str):
        return str(tp.__name__)
    if dataclasses.is_dataclass(tp):
        return "mapping"
    return "any" if tp is Any else "Python only"


def _is_sequence(tp: Any) -> bool:
    return (get_origin(tp) or tp) in (list, tuple, Sequence)


def _is_mapping(tp: Any) -> bool:
    return (get_origin(tp) or tp) in (dict, Mapping)


# ---------------------------------------------------------------- mapping -> dataclass


def from_mapping(cls: type[T], data: object, path: str, *, base: T | None = None) -> T:
    """Return a ``cls`` built from plain YAML data, starting from ``base`` when given.

    path: dotted path of ``data``, which starts every message.
    Raises: ConfigError for unknown keys, wrong types, missing fields and refused values.
    """
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"{path} needs a dataclass to build; got {cls!r}.")
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must be a mapping; got {data!r}.")
    hints = field_types(cls)
    check_keys(data, hints, path)
    values = {}
    for name, value in data.items():
        inner = _dataclass_of(hints[name])
        start = raw_value(base, name) if base is not None and inner is not None else None
        if inner is not None and start is not None and isinstance(value, Mapping):
            values[name] = from_mapping(inner, value, f"{path}.{name}", base=start)
        else:
            values[name] = convert(hints[name], value, f"{path}.{name}")
    if base is None:
        for field in dataclasses.fields(cls):
            required = (
                field.init
                and field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            if required and field.name not in values:
                raise ConfigError(
                    f"{path}.{field.name} is required ({type_text(hints[field.name])}); got none."
                )
    try:
        if base is None:
            return typing.cast(T, cls(**values))
        return typing.cast(T, base.replace(**values))  # type: ignore[attr-defined]
    except (ConfigError, ValueError, TypeError) as error:
        raise ConfigError(_with_path(path, cls, str(error))) from error


def check_keys(data: Mapping[Any, Any], known: typing.Iterable[str], path: str) -> None:
    """Raise ConfigError for a non-string or unknown key, with its path and the nearest name."""
    names = tuple(known)
    for key in data:
        if type(key) is not str:
            raise ConfigError(f"{path or 'file'} must have string keys; got {key!r}.")
        if key not in names:
            prefix = f"{path}." if path else ""
            hint = did_you_mean(f"{prefix}{key}", [f"{prefix}{name}" for name in names])
            raise ConfigError(
                f"{prefix}{key} must be a known key ({', '.join(sorted(names))}); "
                f"got {key!r}.{hint}"
            )


def _dataclass_of(tp: Any) -> type | None:
    """Return the dataclass of ``X`` or ``X | None``."""
    members = get_args(tp) if get_origin(tp) in (Union, types.UnionType) else (tp,)
    found = [m for m in members if isinstance(m, type) and dataclasses.is_dataclass(m)]
    return found[0] if len(found) == 1 else None


def _with_path(path: str, cls: type, message: str) -> str:
    """Put the dotted path of the refused field before a constructor's message."""
    head, _, _ = message.partition(" ")
    owner, _, name = head.partition(".")
    if owner == cls.__name__ and name:
        return f"{path}.{name}: {message}"
    return f"{path}: {message}"


def convert(tp: Any, value: object, path: str) -> Any:
    """Return ``value`` as type ``tp``: exact types, int also for float, lists for sequences.

    Raises: ConfigError starting with ``path``.
    """
    origin, args = get_origin(tp), get_args(tp)
    if origin is typing.Annotated:
        return convert(args[0], value, path)
    if tp is Any or tp is object:
        return _plain(value, path)
    if origin in (Union, types.UnionType):
        return _convert_union(tp, args, value, path)
    if _is_dtype_type(tp):
        return _convert_dtype(tp, value, path)
    if _is_sequence(tp):
        return _convert_sequence(tp, args, value, path)
    if _is_mapping(tp):
        if not isinstance(value, Mapping):
            raise _mismatch(tp, value, path)
        item = args[1] if args else Any
        for key in value:
            if type(key) is not str:
                raise ConfigError(f"{path} must have string keys; got {key!r}.")
        return {key: convert(item, entry, f"{path}.{key}") for key, entry in value.items()}
    if origin is Literal:
        return _choose(dict(zip(args, args, strict=True)), value, path)
    if tp is type(None):
        if value is not None:
            raise _mismatch(tp, value, path)
        return None
    if tp is float and type(value) is int:
        return float(value)
    if tp in (bool, int, float, str):
        if type(value) is not tp:
            raise _mismatch(tp, value, path)
        return value
    if isinstance(tp, type) and issubclass(tp, enum.Enum):
        return _choose({member.value: member for member in tp}, value, path)
    if origin is os.PathLike or (isinstance(tp, type) and issubclass(tp, os.PathLike)):
        if type(value) is not str or not value:
            raise _mismatch(tp, value, path)
        return Path(value)
    if isinstance(tp, type) and dataclasses.is_dataclass(tp):
        return from_mapping(tp, value, path)
    raise ConfigError(f"{path} {_NOT_YAML.format(value)}")


def _convert_union(tp: Any, args: tuple[Any, ...], value: object, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    members = [arg for arg in args if arg is not type(None)]
    # The one member that has the shape of the value explains best what is wrong inside it.
    shaped = [m for m in members if _has_shape(m, value)]
    if len(shaped) == 1 or len(members) == 1:
        return convert((shaped or members)[0], value, path)
    for member in shaped:
        try:
            return convert(member, value, path)
        except ConfigError:
            continue
    raise _mismatch(tp, value, path)


def _has_shape(tp: Any, value: object) -> bool:
    if isinstance(value, Mapping):
        return _is_mapping(tp) or (isinstance(tp, type) and dataclasses.is_dataclass(tp))
    if isinstance(value, list):
        return _is_sequence(tp)
    return not (_is_mapping(tp) or _is_sequence(tp) or type_text(tp) in ("mapping", "Python only"))


def _convert_dtype(tp: Any, value: object, path: str) -> Any:
    if type(value) is not str:
        raise _mismatch(tp, value, path)
    name = dtype_name(value, path)
    if tp is DTypeField:
        return name
    return torch_dtype(name)


def _convert_sequence(tp: Any, args: tuple[Any, ...], value: object, path: str) -> Any:
    kind = get_origin(tp) or tp
    if type(value) is not list:
        raise _mismatch(tp, value, path)
    fixed = kind is tuple and args and Ellipsis not in args
    if fixed and len(args) != len(value):
        raise ConfigError(f"{path} must be a list of {len(args)} items; got {value!r}.")
    item_types = args if fixed else (args[0] if args else Any,) * len(value)
    items = [
        convert(item, entry, f"{path}[{i}]")
        for i, (item, entry) in enumerate(zip(item_types, value, strict=True))
    ]
    return items if kind is list else tuple(items)


def _choose(choices: Mapping[Any, Any], value: object, path: str) -> Any:
    for choice, result in choices.items():
        if type(value) is type(choice) and value == choice:
            return result
    names = [str(choice) for choice in choices]
    hint = did_you_mean(value, names) if isinstance(value, str) else ""
    raise ConfigError(f"{path} must be one of {', '.join(names)}; got {value!r}.{hint}")


def _mismatch(tp: Any, value: object, path: str) -> ConfigError:
    if callable(value) or type(value).__module__.partition(".")[0] in ("torch", "numpy"):
        return ConfigError(f"{path} must be {type_text(tp)}, and {_NOT_YAML.format(value)}")
    return ConfigError(f"{path} must be {type_text(tp)}; got {value!r}.")


def _plain(value: object, path: str) -> Any:
    """Return plain YAML data as it is."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return convert(dict[str, Any], value, path)
    raise ConfigError(f"{path} {_NOT_YAML.format(value)}")


# ---------------------------------------------------------------- dataclass -> mapping


def to_mapping(config: object, path: str = "") -> dict[str, Any]:
    """Return a dataclass as plain YAML data, dtypes by name; imports no torch.

    Raises: ConfigError with the dotted path of a callable, tensor or other Python-only value.
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ConfigError(f"{path or 'config'} must be a dataclass instance; got {config!r}.")
    return {
        f.name: export(raw_value(config, f.name), f"{path}.{f.name}" if path else f.name)
        for f in dataclasses.fields(config)
        if f.init
    }


def export(value: Any, path: str) -> Any:
    """Return one field's value as plain YAML data; ConfigError starting with ``path``."""
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or type(value) in (bool, int, float, str):
        return value
    if is_torch_dtype(value):
        return dtype_name(value, path)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [export(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {key: export(item, f"{path}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value, path)
    raise ConfigError(f"{path} {_NOT_YAML.format(value)}")


# ---------------------------------------------------------------- description


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One settable field: its dotted path, type, default, environment variable and meaning."""

    path: str
    type: str
    default: Any
    env: str
    help: str


def describe(cls: type, path: str) -> tuple[FieldInfo, ...]:
    """Return every leaf field of a dataclass that has defaults, in order."""
    default, hints = cls(), field_types(cls)
    rows: list[FieldInfo] = []
    for f in dataclasses.fields(cls):
        where, inner = f"{path}.{f.name}", _dataclass_of(hints[f.name])
        if inner is not None:
            rows.extend(describe(inner, where))
            continue
        descriptor = dtype_field(cls, f.name)
        variable = env.BY_FIELD.get(where.removeprefix("config."))
        rows.append(
            FieldInfo(
                where,
                type_text(hints[f.name]),
                export(raw_value(default, f.name), where),
                variable.name if variable and where.startswith("config.") else "",
                descriptor.help if descriptor else f.metadata.get("help", ""),
            )
        )
    return tuple(rows)
