"""Loads normalisation statistics: LeRobot safetensors or JSON, openpi norm_stats.json.

Both end as ``Stats``: feature -> statistic -> float64 array, with LeRobot's feature names
(``observation.state``, ``action``) whatever the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError
from phyai.json_files import read_json_object
from phyai.models.pi.processing.normalize import OpenpiStats

Stats: TypeAlias = Mapping[str, Mapping[str, NDArray[np.float64]]]

STATE = "observation.state"
ACTION = "action"
_OPENPI_NAMES = {"state": STATE, "actions": ACTION}
_USED = frozenset({"mean", "std", "min", "max", "q01", "q10", "q90", "q99"})


def load_stats(path: str | Path) -> Stats:
    """Return the statistics in a ``.safetensors`` or ``.json`` file.

    Tensor keys are ``<feature>.<statistic>``, split at the last dot. JSON is openpi's
    ``{"norm_stats": {"state": ..., "actions": ...}}`` or LeRobot's ``{feature: {...}}``.
    Raises: CheckpointNotFound, CheckpointError.
    """
    file = Path(path)
    if not file.is_file():
        raise CheckpointNotFound(
            f"statistics must be an existing file; got {str(file)!r}. Correct the path."
        )
    if file.suffix == ".safetensors":
        return _from_tensors(file)
    data = read_json_object(file)
    inner = data.get("norm_stats", data)
    if not isinstance(inner, dict) or not inner:
        raise CheckpointError(
            f"{file.name} must hold statistics by feature; got {type(inner).__name__}. "
            "Compute them again."
        )
    stats = {
        _OPENPI_NAMES.get(str(name), str(name)): _table(name, values, file.name)
        for name, values in inner.items()
        if isinstance(values, dict)
    }
    return _even(stats, file.name)


def _from_tensors(file: Path) -> Stats:
    try:
        tensors = load_file(file)
    except Exception as error:
        raise CheckpointError(
            f"{file.name} must be a readable safetensors file; got {error}. Download it again."
        ) from error
    stats: dict[str, dict[str, NDArray[np.float64]]] = {}
    for key, tensor in tensors.items():
        feature, _, name = key.rpartition(".")
        if feature and name in _USED:
            # By way of torch: numpy has no bfloat16.
            stats.setdefault(feature, {})[name] = _vector(tensor.double(), key, file.name)
    return _even(stats, file.name)


def _even(stats: Stats, where: str) -> Stats:
    """Return the statistics, after checking that those of a feature have one shape."""
    for feature in (STATE, ACTION):
        for name, array in stats.get(feature, {}).items():
            if array.ndim != 1 or not array.size:
                raise CheckpointError(
                    f"{where}: statistic {name} of {feature!r} must be a list of numbers, one per "
                    f"value; got shape {list(array.shape)}. Compute it again."
                )
    for feature, table in stats.items():
        if len({array.shape for array in table.values()}) > 1:
            lengths = ", ".join(f"{name} {list(a.shape)}" for name, a in sorted(table.items()))
            raise CheckpointError(
                f"{where}: statistics of {feature!r} must have one length; got {lengths}. "
                "Compute them again."
            )
    return stats


def _table(feature: str, values: Mapping[str, Any], where: str) -> dict[str, NDArray[np.float64]]:
    return {
        name: _vector(value, f"{feature}.{name}", where)
        for name, value in values.items()
        if name in _USED and value is not None
    }


def _vector(value: Any, key: str, where: str) -> NDArray[np.float64]:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: {key} must be a list of numbers; got {value!r}. Compute it again."
        ) from error
    if not np.isfinite(array).all():
        raise CheckpointError(f"{where}: {key} must be finite; got {array}. Compute it again.")
    return array


def feature_dim(stats: Stats | None, feature: str) -> int | None:
    """Return how many values the statistics of ``feature`` cover; None without statistics."""
    table = (stats or {}).get(feature) or {}
    array = next((a for a in table.values() if a.ndim == 1), None)
    return None if array is None else int(array.shape[0])


def openpi_stats(stats: Stats | None, feature: str) -> OpenpiStats | None:
    """Return the openpi view of one feature's statistics; None when there are none.

    Raises: CheckpointError when mean or std is missing.
    """
    table = (stats or {}).get(feature)
    if table is None:
        return None
    missing = [name for name in ("mean", "std") if name not in table]
    if missing:
        raise CheckpointError(
            f"openpi statistics of {feature!r} must hold mean and std; {', '.join(missing)} "
            f"missing among {sorted(table)}. Compute them again."
        )
    return OpenpiStats(
        mean=table["mean"], std=table["std"], q01=table.get("q01"), q99=table.get("q99")
    )


def find_openpi_stats(folder: Path, asset_id: str | None) -> Path | None:
    """Return ``assets/<asset_id>/norm_stats.json`` of an openpi checkpoint; None without assets.

    An asset id may contain slashes. Without one, a single asset is picked.
    Raises: ConfigError listing the assets when the choice is open or unknown.
    """
    root = folder / "assets"
    files = sorted(root.rglob("norm_stats.json")) if root.is_dir() else []
    ids = {file.parent.relative_to(root).as_posix(): file for file in files}
    listing = ", ".join(sorted(ids)) or "none"
    if asset_id is not None:
        if asset_id not in ids:
            raise ConfigError(
                f"asset id must be one of the checkpoint's assets ({listing}); got "
                f"{asset_id!r}. Choose one of them."
            )
        return ids[asset_id]
    if len(ids) > 1:
        raise ConfigError(
            f"asset id must be given when a checkpoint has several assets; got none of "
            f"{listing}. Choose one of them."
        )
    return next(iter(ids.values()), None)
