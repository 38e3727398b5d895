"""Results that are kept for a repeated request: taken apart by row, copied, put together again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, cat

from phyai.errors import PluginContractError

Frozen: TypeAlias = Callable[[], Any]
"""Gives a fresh copy of what was frozen, at every call."""


def split(result: Any, rows: int) -> list[Any]:
    """Return the result of each row: of a list its items, of tensors [B, ...] slices [1, ...].

    Raises: PluginContractError for a result that is not rows-first.

    >>> import torch
    >>> from phyai.session_results import joined, split
    >>> [row.tolist() for row in split(torch.tensor([[1], [2]]), 2)]
    [[[1]], [[2]]]
    >>> joined(split({"a": torch.tensor([1, 2])}, 2))
    {'a': tensor([1, 2])}
    """
    if isinstance(result, Mapping):
        parts = {name: split(value, rows) for name, value in result.items()}
        return [{name: part[row] for name, part in parts.items()} for row in range(rows)]
    if isinstance(result, Tensor):
        if result.ndim and result.shape[0] == rows:
            return [result[row : row + 1] for row in range(rows)]
    elif isinstance(result, Sequence) and not isinstance(result, str) and len(result) == rows:
        return list(result)
    raise PluginContractError(
        f"a result that a session keeps must have one row per robot ({rows}); got "
        f"{type(result).__name__}. Return a tensor [B, ...], a mapping of them, or a list."
    )


def joined(rows: Sequence[Any]) -> Any:
    """Return the rows of ``split`` as one result again."""
    if all(isinstance(row, Tensor) for row in rows):
        return cat(list(rows))
    if all(isinstance(row, Mapping) for row in rows):
        return {name: joined([row[name] for row in rows]) for name in rows[0]}
    return list(rows)


def frozen(value: Any) -> Frozen:
    """Return what gives copies of a result as it is now; tensors wait in host memory."""
    if isinstance(value, Tensor):
        host, device = value.detach().to("cpu", copy=True), value.device
        return lambda: host.to(device, copy=True)
    if isinstance(value, np.ndarray):
        return value.copy().copy
    if isinstance(value, Mapping):
        items = {name: frozen(item) for name, item in value.items()}
        return lambda: {name: item() for name, item in items.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        fields = {f.name: frozen(getattr(value, f.name)) for f in dataclasses.fields(cls) if f.init}
        return lambda: cls(**{name: field() for name, field in fields.items()})
    kept = copy.deepcopy(value)
    return lambda: copy.deepcopy(kept)
