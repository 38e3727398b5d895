"""Normalises states and actions, and converts relative actions, exactly as each family does.

LeRobot computes in float32 with its statistics cast to it; openpi computes in float64. Nothing
is clipped. Formulas: Source LeRobot 0.6.1 normalize processor and openpi transforms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phyai.errors import CheckpointError, ConfigError

Array = NDArray[Any]

LEROBOT_EPS = 1e-8
OPENPI_EPS = 1e-6

_NEEDED: Mapping[str, tuple[str, str]] = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}


def needed_stats(mode: str) -> tuple[str, ...]:
    """Return the statistics ``mode`` uses; none for IDENTITY.

    Raises: CheckpointError for an unknown mode.
    """
    if mode == "IDENTITY":
        return ()
    if mode not in _NEEDED:
        raise CheckpointError(
            f"normalisation mode must be one of IDENTITY, {', '.join(sorted(_NEEDED))}; got "
            f"{mode!r}. Correct the processor file."
        )
    return _NEEDED[mode]


def _bounds(mode: str, stats: Mapping[str, Array]) -> tuple[Array, Array]:
    low, high = needed_stats(mode)
    missing = [name for name in (low, high) if name not in stats]
    if missing:
        raise CheckpointError(
            f"statistics for mode {mode} must hold {low} and {high}; {', '.join(missing)} "
            f"missing among {sorted(stats)}. Use statistics computed for this mode."
        )
    return (np.asarray(stats[low], dtype=np.float32), np.asarray(stats[high], dtype=np.float32))


def lerobot_normalize(
    x: Array, stats: Mapping[str, Array] | None, mode: str, eps: float = LEROBOT_EPS
) -> NDArray[np.float32]:
    """Return x normalised as LeRobot does; identity without statistics.

    Shapes: x [..., D] float32; statistics [D].
    """
    x = np.asarray(x, dtype=np.float32)
    if mode == "IDENTITY" or stats is None:
        return x
    low, high = _bounds(mode, stats)
    if mode == "MEAN_STD":
        return np.asarray((x - low) / (high + np.float32(eps)), dtype=np.float32)
    span = _span(low, high, eps)
    return np.asarray(np.float32(2.0) * (x - low) / span - np.float32(1.0), dtype=np.float32)


def lerobot_unnormalize(
    x: Array, stats: Mapping[str, Array] | None, mode: str, eps: float = LEROBOT_EPS
) -> NDArray[np.float32]:
    """Return x in robot units; the inverse of ``lerobot_normalize``, but MEAN_STD has no eps."""
    x = np.asarray(x, dtype=np.float32)
    if mode == "IDENTITY" or stats is None:
        return x
    low, high = _bounds(mode, stats)
    one, two = np.float32(1.0), np.float32(2.0)
    if mode == "MEAN_STD":
        return np.asarray(x * high + low, dtype=np.float32)
    span = _span(low, high, eps)
    # The two orders of operations differ by rounding and are kept as in the original.
    scaled = (x + one) / two * span if mode == "MIN_MAX" else (x + one) * span / two
    return np.asarray(scaled + low, dtype=np.float32)


def _span(low: Array, high: Array, eps: float) -> Array:
    span = high - low
    return np.where(span == 0, np.float32(eps), span)


@dataclass(frozen=True)
class OpenpiStats:
    """Statistics of one openpi feature, float64 [D]; quantiles may be absent."""

    mean: Array
    std: Array
    q01: Array | None = None
    q99: Array | None = None

    @property
    def dim(self) -> int:
        return int(self.mean.shape[-1])

    def quantiles(self) -> tuple[Array, Array]:
        """Return (q01, q99).

        Raises: CheckpointError when the file has none.
        """
        if self.q01 is None or self.q99 is None:
            raise CheckpointError(
                "norm_stats.json must hold q01 and q99 for this model; got mean and std only. "
                "Compute the statistics again with openpi."
            )
        return self.q01, self.q99


def openpi_normalize(
    x: Array, stats: OpenpiStats | None, *, use_quantiles: bool
) -> NDArray[np.float64] | Array:
    """Return x normalised as openpi does; statistics are cut to x's last dim.

    Shapes: x [..., D]; float64 out.  Raises: CheckpointError when the statistics are shorter.
    """
    if stats is None:
        return np.asarray(x)
    x = np.asarray(x)
    dim = x.shape[-1]
    if stats.dim < dim:
        raise CheckpointError(
            f"openpi statistics must cover the {dim} values to normalise; got {stats.dim}. "
            "Use the statistics of this robot."
        )
    if use_quantiles:
        q01, q99 = (q[:dim] for q in stats.quantiles())
        out = (x - q01) / (q99 - q01 + OPENPI_EPS) * 2.0 - 1.0
    else:
        out = (x - stats.mean[:dim]) / (stats.std[:dim] + OPENPI_EPS)
    return np.asarray(out, dtype=np.float64)


def openpi_unnormalize(
    x: Array, stats: OpenpiStats | None, *, use_quantiles: bool
) -> NDArray[np.float64] | Array:
    """Return x in robot units, float64, in x's full width.

    z-score pads the statistics with mean 0 and std 1; quantiles leave further dims unchanged.
    """
    if stats is None:
        return np.asarray(x)
    x = np.asarray(x)
    width = x.shape[-1]
    if use_quantiles:
        q01, q99 = (q[:width] for q in stats.quantiles())
        dim = q01.shape[-1]
        head = (x[..., :dim] + 1.0) / 2.0 * (q99 - q01 + OPENPI_EPS) + q01
        return np.asarray(np.concatenate([head, x[..., dim:]], axis=-1), dtype=np.float64)
    mean, std = stats.mean[:width], stats.std[:width]
    extra = width - mean.shape[-1]
    mean = np.concatenate([mean, np.zeros(extra)])
    std = np.concatenate([std, np.ones(extra)])
    return np.asarray(x * (std + OPENPI_EPS) + mean, dtype=np.float64)


# ---------------------------------------------------------------- relative actions


def make_bool_mask(*dims: int) -> tuple[bool, ...]:
    """Return a mask from run lengths: positive runs are relative, negative runs absolute.

    >>> from phyai.models.pi.processing.normalize import make_bool_mask
    >>> make_bool_mask(2, -1)
    (True, True, False)
    """
    mask: list[bool] = []
    for dim in dims:
        mask.extend([dim > 0] * abs(dim))
    return tuple(mask)


def relative_mask(
    action_dim: int, action_names: Sequence[str] | None, exclude: Sequence[str]
) -> tuple[bool, ...]:
    """Return which action dims are relative: not those whose name contains an excluded token.

    Without names every dim is relative. Matching ignores case (Source: LeRobot 0.6.1).
    Raises: ConfigError when the number of names differs from ``action_dim``.
    """
    if action_names is None or not exclude:
        return (True,) * action_dim
    if len(action_names) != action_dim:
        raise ConfigError(
            f"action_feature_names must name all {action_dim} action dims; got "
            f"{len(action_names)}. Correct the checkpoint's action names."
        )
    tokens = [token.lower() for token in exclude if token]
    return tuple(not any(token in name.lower() for token in tokens) for name in action_names)


def to_absolute(actions: Array, state: Array, mask: Sequence[bool]) -> Array:
    """Return actions with the state added to the masked dims, the same for every row.

    Shapes: actions [..., H, A]; state [..., D] with D >= len(mask); mask at most A long.
    """
    return _shift(actions, state, mask, 1)


def to_relative(actions: Array, state: Array, mask: Sequence[bool]) -> Array:
    """Return actions with the state taken off the masked dims; inverse of ``to_absolute``."""
    return _shift(actions, state, mask, -1)


def _shift(actions: Array, state: Array, mask: Sequence[bool], sign: int) -> Array:
    dims = len(mask)
    state = np.asarray(state)
    if state.shape[-1] < dims or actions.shape[-1] < dims:
        raise ConfigError(
            f"relative actions need {dims} state and action dims; got {state.shape[-1]} and "
            f"{actions.shape[-1]}. Correct the mask or the action names."
        )
    out = np.array(actions, copy=True)
    offset = np.where(np.asarray(mask), state[..., :dims], 0)[..., None, :]
    out[..., :dims] += (sign * offset).astype(out.dtype, copy=False)
    return out
