"""JSON trees and buffers to values: the receiving half of ``phyai.deployment.values``."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phyai.deployment import value_arrays as arrays
from phyai.deployment import value_classes as classes
from phyai.errors import PhyaiError


class WorkerTraceback(PhyaiError):
    """The ``__cause__`` of an error that happened in a worker; its text is the traceback there."""


_NESTED = frozenset({list, dict})


class Decoder:
    """Builds values out of trees; any of Python's look-up and value errors means a bad tree."""

    __slots__ = ("buffers", "copy")

    def __init__(self, buffers: Sequence[memoryview], copy: bool) -> None:
        self.buffers = buffers
        self.copy = copy

    def build(self, tree: Any) -> Any:
        if type(tree) is list:
            return _BUILD[tree[0]](self, tree)
        if type(tree) is dict:
            raise TypeError("a bare JSON object")
        return tree

    def parts(self, tree: list[Any], start: int = 1) -> list[Any]:
        parts = tree[start:]
        if _NESTED.isdisjoint(map(type, parts)):
            return parts
        build = self.build
        return [build(part) if type(part) in _NESTED else part for part in parts]

    def pairs(self, tree: list[Any], start: int = 1) -> dict[Any, Any]:
        parts = self.parts(tree, start)
        return dict(zip(parts[::2], parts[1::2], strict=True))

    def buffer(self, index: Any) -> memoryview:
        if type(index) is not int or index < 0:
            raise IndexError(f"buffer {index!r}")
        return self.buffers[index]


def _dataclass(decoder: Decoder, tree: list[Any]) -> Any:
    return classes.build_dataclass(classes.locate(tree[1]), decoder.pairs(tree, 2))


def _named_tuple(decoder: Decoder, tree: list[Any]) -> Any:
    cls = classes.locate(tree[1])
    classes.check_named_tuple(cls, len(tree) - 2)
    return tuple.__new__(cls, decoder.parts(tree, 2))


def _enum_class(name: Any, base: type[enum.Enum]) -> Any:
    cls = classes.locate(name)
    if not issubclass(cls, base):
        raise TypeError(f"{name!r} is no {base.__name__.lower()}")
    return cls


def _member(decoder: Decoder, tree: list[Any]) -> Any:
    return _enum_class(tree[1], enum.Enum).__members__[tree[2]]


def _flags(decoder: Decoder, tree: list[Any]) -> Any:
    cls = _enum_class(tree[1], enum.Flag)
    members = [cls.__members__[name] for name in tree[2:]]
    return functools.reduce(operator.or_, members) if members else cls(0)


def _array(decoder: Decoder, tree: list[Any]) -> Any:
    _, dtype, shape, index = tree
    return arrays.build_array(dtype, shape, decoder.buffer(index), decoder.copy)


def _scalar(decoder: Decoder, tree: list[Any]) -> Any:
    _, dtype, index = tree
    return arrays.build_array(dtype, (), decoder.buffer(index), True)[()]


def _tensor(decoder: Decoder, tree: list[Any]) -> Any:
    _, dtype, shape, index = tree
    return arrays.build_tensor(dtype, shape, decoder.buffer(index), decoder.copy)


def _error(decoder: Decoder, tree: list[Any]) -> BaseException:
    _, name, original, text, trace, args, attributes = tree
    try:
        cls = classes.locate(name)
        if not issubclass(cls, BaseException):
            raise TypeError(f"{name!r} is no exception")
        error = classes.build_error(cls, decoder.build(args), decoder.build(attributes))
        str(error)
    except Exception:  # the class is unknown here, or not as it was there
        error = RuntimeError(f"{original}: {text}")
    if trace:
        error.__cause__ = WorkerTraceback(trace)
    return error


_BUILD: dict[str, Callable[[Decoder, list[Any]], Any]] = {
    "l": lambda decoder, tree: decoder.parts(tree),
    "u": lambda decoder, tree: tuple(decoder.parts(tree)),
    "d": lambda decoder, tree: decoder.pairs(tree),
    "s": lambda decoder, tree: set(decoder.parts(tree)),
    "f": lambda decoder, tree: frozenset(decoder.parts(tree)),
    "i": lambda decoder, tree: int(tree[1], 16),
    "c": lambda decoder, tree: complex(tree[1], tree[2]),
    "b": lambda decoder, tree: bytes(decoder.buffer(tree[1])),
    "B": lambda decoder, tree: bytearray(decoder.buffer(tree[1])),
    "p": lambda decoder, tree: Path(tree[1]),
    "a": _array,
    "g": _scalar,
    "t": _tensor,
    "G": lambda decoder, tree: arrays.open_shared(decoder.parts(tree), decoder.copy),
    "y": lambda decoder, tree: arrays.check_dtype(np.dtype(str(tree[1]))),
    "k": lambda decoder, tree: arrays.dtype_of(tree[1]),
    "v": lambda decoder, tree: arrays.build_device(str(tree[1])),
    "z": lambda decoder, tree: torch.Size(tree[1:]),
    "o": _dataclass,
    "n": _named_tuple,
    "e": _member,
    "E": _flags,
    "x": _error,
}
