"""Reads ``statistics.json``: what a checkpoint's states and actions looked like in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from phyai.errors import CheckpointError
from phyai.models.gr00t.processing.poses import Array

Statistics: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Array]]]
"""state, action or relative_action -> key -> min, max, mean, std, q01, q99 -> float64 array."""

SECTIONS = ("state", "action", "relative_action")
NAMES = ("min", "max", "mean", "std", "q01", "q99")


def parse_statistics(data: Mapping[str, Any]) -> dict[str, Statistics]:
    """Return the statistics per embodiment tag; entries of other forms are left out.

    Values are [D], those of relative actions [H, D].
    Raises: CheckpointError naming the entry that is no table of finite numbers.
    """
    tags = {tag: entry for tag, entry in data.items() if not tag.startswith("__")}
    return {tag: _tag(tag, entry) for tag, entry in tags.items() if isinstance(entry, Mapping)}


def _tag(tag: str, entry: Mapping[str, Any]) -> Statistics:
    out: dict[str, dict[str, dict[str, Array]]] = {}
    for section in SECTIONS:
        keys = entry.get(section)
        if not isinstance(keys, Mapping):
            continue
        out[section] = {
            key: {
                name: _values(f"{tag}/{section}/{key}/{name}", table[name])
                for name in NAMES
                if table.get(name) is not None
            }
            for key, table in keys.items()
            if isinstance(table, Mapping) and not key.startswith("__")
        }
    return out


def _values(where: str, value: Any) -> Array:
    try:
        array = np.atleast_1d(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"statistics.json must hold numbers at {where}; got {error}. Download it again."
        ) from error
    if array.ndim > 2 or not array.size:
        raise CheckpointError(
            f"statistics.json must hold [D] or [H, D] numbers at {where}; got shape "
            f"{list(array.shape)}. Download it again."
        )
    if not np.isfinite(array).all():
        raise CheckpointError(
            f"statistics.json must be finite at {where}; got NaN or infinity. Actions would be "
            "NaN. Download it again, or compute the statistics again."
        )
    return array


def required(stats: Statistics, section: str, key: str, name: str) -> Array:
    """Return one entry.  Raises: CheckpointError naming it when the file has none."""
    table = stats.get(section, {}).get(key, {})
    if name not in table:
        raise CheckpointError(
            f"statistics.json must hold {section}/{key}/{name}; got none. "
            "Use the statistics of this checkpoint's training."
        )
    return table[name]
