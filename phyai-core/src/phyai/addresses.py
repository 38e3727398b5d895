"""Where a model's tensors live: what a captured graph holds fast, and what has moved since."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger("phyai.graph")

FOREIGN = ("torch", "numpy", "builtins", "threading", "logging", "collections", "_thread")
"""Packages whose objects are not looked into; tensors and modules of torch are."""
NO_WEIGHTS = (
    "phyai.timers", "phyai.kernels.registry", "phyai.services", "phyai.cache", "phyai.memory",
    "phyai.memo", "phyai.graph", "phyai.step_unit"
)  # fmt: skip
"""Modules whose objects hold no tensor that a region reads, or only its cache's own."""
MAX_DEPTH = 12
"""Deeper than any module tree; a long chain of linked objects is not followed to its end."""
PLAIN = (str, bytes, int, float, complex, type(None), type)


def tensors_of(root: object) -> dict[str, Tensor]:
    """Return every tensor that a model's objects hold, by its path.

    Looks into modules (parameters, buffers, attributes), dicts, lists, tuples, partials, bound
    methods, closures and plain objects; each object once, under its shortest path. Objects more
    than ``MAX_DEPTH`` steps away are left out, and the log says so once.

    Another thread may change dicts, lists and attributes meanwhile.

    >>> import torch
    >>> from phyai.addresses import tensors_of
    >>> sorted(tensors_of({"head": torch.nn.Linear(2, 1), "table": [torch.zeros(1)]}))
    ['head.bias', 'head.weight', 'table.0']
    """
    found: dict[str, Tensor] = {}
    seen: dict[int, object] = {}  # keeps the objects, or another one may get the id
    waiting = deque([("", root, 0)])
    while waiting:  # the nearest first: what a longer path meets again is known by then
        path, value, depth = waiting.popleft()
        if isinstance(value, Tensor):
            if not _placeholder(value):
                found[path] = value
            continue
        if id(value) in seen:
            continue
        if depth > MAX_DEPTH:
            _say_cut(path)
            continue
        seen[id(value)] = value
        for name, child in _children(value):
            if not isinstance(child, PLAIN):
                waiting.append((f"{path}.{name}" if path else name, child, depth + 1))
    return found


def addresses(root: object) -> dict[str, int]:
    """Return path -> address of every tensor ``tensors_of`` finds.

    A tensor without plain memory of its own (a packed weight) is told by its identity.
    """
    return {path: _address(tensor) for path, tensor in tensors_of(root).items()}


def nbytes(root: object) -> int:
    """Return the bytes of those tensors, each storage once."""
    tensors = list(tensors_of(root).values())
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.layout is torch.strided
    }
    packed = {id(t): t.numel() * t.element_size() for t in tensors if t.layout != torch.strided}
    return sum(storages.values()) + sum(packed.values())


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


_cuts: list[str] = []


def _say_cut(path: str) -> None:
    """Say once per process that something was too deep to look into."""
    if not _cuts:
        _cuts.append(path)
        log.warning(
            "objects more than %d steps into a model are not looked into: a graph does not notice "
            "when tensors of %s move",
            MAX_DEPTH,
            path,
        )


def _children(value: object) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, by name."""
    if isinstance(value, nn.Module):
        own = {
            n: v
            for n, v in list(vars(value).items())
            if not n.startswith(("_backward", "_forward"))
        }
        for group in ("_parameters", "_buffers", "_modules"):
            yield from list(own.pop(group, {}).items())
        yield from own.items()
    elif isinstance(value, Mapping):
        yield from ((str(key), child) for key, child in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((str(index), child) for index, child in enumerate(list(value)))
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
