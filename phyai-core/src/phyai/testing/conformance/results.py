"""Results of any kind as named arrays, and what two of them differ in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phyai.types import ActionChunk, Media

Arrays = dict[str, NDArray[Any]]


def arrays(result: Any, prefix: str = "") -> Arrays:
    """Return every array of a result under its name, in memory of their own.

    ActionChunk: actions, model_actions, mask.  A list: ``row 0 actions`` ...
    """
    if isinstance(result, ActionChunk):
        fields = ("actions", "model_actions", "mask")
        return {prefix + name: np.array(getattr(result, name)) for name in fields}
    if isinstance(result, Media):
        own = {f"{prefix}{result.kind}": np.array(result.data)}
        return own if result.sound is None else {**own, **arrays(result.sound, prefix)}
    if isinstance(result, torch.Tensor):
        return {prefix + "tensor": _array(result)}
    if isinstance(result, Mapping):
        return {f"{prefix}{name}": _array(value) for name, value in result.items()}
    if isinstance(result, Sequence) and not isinstance(result, str):
        found: Arrays = {}
        for row, value in enumerate(result):
            found.update(arrays(value, f"{prefix}row {row} "))
        return found
    return {prefix + "result": np.array(result)}


def row_of(result: Any, row: int) -> Arrays:
    """Return the arrays of one row of a list result."""
    return arrays(result[row])


def other_bits(got: Arrays, want: Arrays) -> str:
    """Return what differs in any bit, as text; empty when nothing does."""
    for name, expected in want.items():
        if name not in got:
            return f"{name} is absent"
        value = got[name]
        if value.shape != expected.shape or value.dtype != expected.dtype:
            return f"{name} is {_kind(value)} and {_kind(expected)}"
        if not np.array_equal(value, expected):
            largest = _largest(value, expected)
            return f"{name} differs by up to {largest:.3g}"
    extra = sorted(set(got) - set(want))
    return f"{extra[0]} is there only once" if extra else ""


def too_far(got: Arrays, want: Arrays, tolerance: float) -> str:
    """Return what differs by more than ``tolerance``, as text; empty when nothing does.

    Of 8-bit levels one step is always allowed: a value may lie at the edge of two.
    """
    for name, expected in want.items():
        if name not in got:
            return f"{name} is absent"
        value = got[name]
        if value.shape != expected.shape:
            return f"{name} has shape {list(value.shape)} and {list(expected.shape)}"
        largest = _largest(value, expected)
        allowed = max(tolerance, 1.0) if value.dtype == np.uint8 else tolerance
        if not largest <= allowed:  # also for NaN
            return f"{name} differs by up to {largest:.3g} (allowed {allowed:g})"
    return ""


def not_finite(found: Arrays) -> str:
    """Return the name of the first array that holds NaN or infinity."""
    for name, value in found.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            return name
    return ""


def least_cosine(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Return the cosine of two arrays; 1 where both are zero."""
    a, b = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    if norms == 0.0:
        return float(np.array_equal(a, b))
    return float(a @ b) / norms


def _largest(value: NDArray[Any], expected: NDArray[Any]) -> float:
    if not value.size:
        return 0.0
    return float(np.abs(value.astype(np.float64) - expected.astype(np.float64)).max())


def _array(value: Any) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            value = value.float()
        return np.array(value.numpy())
    return np.array(value)


def _kind(value: NDArray[Any]) -> str:
    return f"{value.dtype} {list(value.shape)}"
