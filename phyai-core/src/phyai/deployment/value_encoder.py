"""Values to JSON trees and buffers: the sending half of ``phyai.deployment.values``."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import traceback
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from phyai.deployment import value_arrays as arrays
from phyai.deployment import value_classes as classes

MAX_DEPTH = 100
"""Containers inside one another, at most; a value that contains itself ends here."""
_MAX_TRACEBACK = 32_768
_PLAIN = frozenset({str, float, bool, types.NoneType})
_JSON_INT = 1 << 63


class Refused(Exception):
    """What cannot travel, and the way to it from inside out."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.place: list[str] = []


class Encoder:
    __slots__ = ("buffers", "depth")

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.depth = 0

    def lower(self, value: Any) -> Any:
        cls: Any = type(value)
        if cls in _PLAIN:
            return value
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refused(f"something nested deeper than {MAX_DEPTH} containers")
        try:
            tree = _lowering(cls)(self, value)
        except TypeError as error:
            raise Refused(f"a {cls.__module__}.{cls.__qualname__} {error}") from None
        self.depth -= 1
        return tree

    def part(self, value: Any, key: Any, place: str = "[{!r:.80}]") -> Any:
        """Lower a part of a container; ``place`` says where it is, for an error's text."""
        try:
            return self.lower(value)
        except Refused as refused:
            refused.place.append(place.format(key))
            raise

    def parts(self, tree: list[Any], values: Collection[Any]) -> list[Any]:
        if _PLAIN.issuperset(map(type, values)):
            tree.extend(values)
            return tree
        for index, value in enumerate(values):
            tree.append(self.part(value, index))
        return tree

    def buffer(self, data: memoryview) -> int:
        self.buffers.append(data)
        return len(self.buffers) - 1


_Lower = Callable[[Encoder, Any], Any]


def _lower_int(encoder: Encoder, value: int) -> Any:
    return value if -_JSON_INT <= value < _JSON_INT else ["i", hex(value)]


def _lower_bytes(encoder: Encoder, value: bytes | bytearray | memoryview) -> Any:
    data = memoryview(bytes(value) if isinstance(value, memoryview) else value)
    return ["B" if isinstance(value, bytearray) else "b", encoder.buffer(data)]


def _lower_set(encoder: Encoder, value: set[Any] | frozenset[Any]) -> Any:
    return encoder.parts(["f" if isinstance(value, frozenset) else "s"], value)


def _lower_mapping(encoder: Encoder, value: Mapping[Any, Any]) -> Any:
    tree: list[Any] = ["d"]
    for key, item in value.items():
        tree.append(key if type(key) is str else encoder.part(key, key, "[key {!r:.80}]"))
        tree.append(item if type(item) in _PLAIN else encoder.part(item, key))
    return tree


def _lower_dataclass(encoder: Encoder, value: Any) -> Any:
    cls: Any = type(value)
    plan = classes.field_plan(cls)
    attributes = classes.read_dataclass(value, plan)
    tree: list[Any] = ["o", classes.reference(cls)]
    for name, item in attributes.items():
        tree.append(name)
        tree.append(item if type(item) in _PLAIN else encoder.part(item, name, ".{}"))
    return tree


def _lower_named_tuple(encoder: Encoder, value: tuple[Any, ...]) -> Any:
    cls: Any = type(value)
    classes.check_named_tuple(cls, len(value))
    return encoder.parts(["n", classes.reference(cls)], value)


def _lower_enum(encoder: Encoder, value: enum.Enum) -> Any:
    cls: Any = type(value)
    name: Any = value.name
    if name in cls.__members__:
        return ["e", classes.reference(cls), name]
    members = list(value) if isinstance(value, enum.Flag) else []
    if value.value and (not members or functools.reduce(operator.or_, members) != value):
        raise TypeError("that is no member of its enum")
    return ["E", classes.reference(cls), *(member.name for member in members)]


def _lower_array(encoder: Encoder, value: np.ndarray[Any, Any]) -> Any:
    dtype, shape, data = arrays.describe_array(value)
    return ["a", dtype, shape, encoder.buffer(data)]


def _lower_scalar(encoder: Encoder, value: np.generic) -> Any:
    dtype, _, data = arrays.describe_array(np.asarray(value))
    return ["g", dtype, encoder.buffer(data)]


def _lower_tensor(encoder: Encoder, value: torch.Tensor) -> Any:
    if value.device.type == "cuda":
        return encoder.parts(["G"], arrays.describe_shared(value))
    dtype, shape, data = arrays.describe_tensor(value)
    return ["t", dtype, shape, encoder.buffer(data)]


def lower_error(encoder: Encoder, error: BaseException) -> Any:
    cls: Any = type(error)
    text = classes.text_of(error)
    trace = ""
    if error.__traceback__ is not None or error.__cause__ is not None:
        trace = "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]
    try:
        name = classes.reference(cls)
    except TypeError:
        name = ""
    args = _if_it_travels(encoder, classes.error_arguments(error))
    attributes: list[Any] = ["d"]
    for key, value in getattr(error, "__dict__", {}).items():
        if (tree := _if_it_travels(encoder, value)) is not _LEFT:
            attributes += [key, tree]
    args = ["u", text] if args is _LEFT else args
    return ["x", name, f"{cls.__module__}.{cls.__qualname__}", text, trace, args, attributes]


_LEFT = object()


def _if_it_travels(encoder: Encoder, value: Any) -> Any:
    depth, count = encoder.depth, len(encoder.buffers)
    try:
        return encoder.lower(value)
    except Exception:
        encoder.depth = depth
        del encoder.buffers[count:]
        return _LEFT


# Subclasses come before what they derive from.
_BY_BASE: tuple[tuple[type, _Lower], ...] = (
    (np.ndarray, _lower_array),
    (np.generic, _lower_scalar),
    (np.dtype, lambda encoder, value: ["y", arrays.check_dtype(value).str]),
    (enum.Enum, _lower_enum),
    (BaseException, lower_error),
    (PurePath, lambda encoder, value: ["p", str(value)]),
)
_BY_CLASS: dict[type, _Lower] = {
    int: _lower_int,
    complex: lambda encoder, value: ["c", value.real, value.imag],
    list: lambda encoder, value: encoder.parts(["l"], value),
    tuple: lambda encoder, value: encoder.parts(["u"], value),
    dict: _lower_mapping,
    set: _lower_set,
    frozenset: _lower_set,
    bytes: _lower_bytes,
    bytearray: _lower_bytes,
    memoryview: _lower_bytes,
    torch.Tensor: _lower_tensor,
    torch.nn.Parameter: _lower_tensor,
    torch.Size: lambda encoder, value: ["z", *value],
    torch.dtype: lambda encoder, value: ["k", arrays.dtype_name(value)],
    torch.device: lambda encoder, value: ["v", str(value)],
}


def _refuse(encoder: Encoder, value: Any) -> Any:
    raise TypeError("object")


@functools.lru_cache(maxsize=512)
def _lowering(cls: Any) -> _Lower:
    if cls in _BY_CLASS:
        return _BY_CLASS[cls]
    for base, lower in _BY_BASE:
        if issubclass(cls, base):
            return lower
    if dataclasses.is_dataclass(cls):
        return _lower_dataclass
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return _lower_named_tuple
    return _lower_mapping if issubclass(cls, Mapping) else _refuse
