"""Where a model's tensors live: what a captured graph holds fast, and what has moved since."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

FOREIGN = ("torch", "numpy", "builtins", "threading", "logging", "collections", "_thread")
"""Packages whose objects are not looked into; tensors and modules of torch are."""
NO_WEIGHTS = ("phyai.timers", "phyai.kernels.registry", "phyai.services")
"""Modules whose objects hold no tensor that a region reads."""
MAX_DEPTH = 12
"""Deeper than any module tree; a chain of linked objects must not end in a RecursionError."""


def tensors_of(root: object) -> dict[str, Tensor]:
    """Return every tensor that a model's objects hold, by its path.

    Looks into modules (parameters, buffers, attributes), dicts, lists, tuples, partials, bound
    methods, closures and plain objects; each object once.

    >>> import torch
    >>> from phyai.addresses import tensors_of
    >>> sorted(tensors_of({"head": torch.nn.Linear(2, 1), "table": [torch.zeros(1)]}))
    ['head.bias', 'head.weight', 'table.0']
    """
    found: dict[str, Tensor] = {}
    _collect(root, "", found, set(), 0)
    return found


def addresses(root: object) -> dict[str, int]:
    """Return path -> address of every tensor ``tensors_of`` finds.

    A tensor without plain memory of its own (a packed weight) is told by its identity.
    """
    return {path: _address(tensor) for path, tensor in tensors_of(root).items()}


def nbytes(root: object) -> int:
    """Return the bytes of those tensors, each storage once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors_of(root).values()
        if tensor.layout is torch.strided
    }
    packed = [t for t in tensors_of(root).values() if t.layout is not torch.strided]
    return sum(storages.values()) + sum(t.numel() * t.element_size() for t in packed)


def moved(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return the paths whose tensor has another address; new and vanished paths do not count.

    What a region reads keeps its path for as long as the region lives: tables of another time
    grid come and go.
    """
    return sorted(path for path, at in before.items() if now.get(path, at) != at)


def _address(tensor: Tensor) -> int:
    if tensor.layout is torch.strided and tensor.device.type != "meta":
        try:
            return tensor.data_ptr()
        except RuntimeError:
            return id(tensor)
    return id(tensor)


def _placeholder(tensor: Tensor) -> bool:
    """Return whether a tensor is one number seen many times: a packed layer's empty weight."""
    return tensor.layout is torch.strided and tensor.numel() > 1 and not any(tensor.stride())


def _collect(
    value: object, path: str, found: dict[str, Tensor], seen: set[int], depth: int
) -> None:
    if isinstance(value, Tensor):
        if not _placeholder(value):
            found[path] = value
        return
    if depth > MAX_DEPTH or isinstance(value, (str, bytes, int, float, type(None), type)):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, child in _children(value):
        _collect(child, f"{path}.{name}" if path else name, found, seen, depth + 1)


def _children(value: object) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, by name."""
    if isinstance(value, nn.Module):
        own = {n: v for n, v in vars(value).items() if not n.startswith(("_backward", "_forward"))}
        for group in ("_parameters", "_buffers", "_modules"):
            yield from own.pop(group, {}).items()
        yield from own.items()
    elif isinstance(value, Mapping):
        yield from ((str(key), child) for key, child in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((str(index), child) for index, child in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, FunctionType):
        names = value.__code__.co_freevars
        yield from zip(names, map(_content, value.__closure__ or ()), strict=True)
    else:
        yield from _attributes(value)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is assigned later
        return None


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    module = type(value).__module__
    if module.partition(".")[0] in FOREIGN or module in NO_WEIGHTS:
        return
    yield from list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)
