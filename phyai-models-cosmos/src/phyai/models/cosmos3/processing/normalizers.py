"""Scaling of action channels between robot units and the model's, by statistics of a data set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phyai.errors import ConfigError, did_you_mean

METHODS = ("meanstd", "minmax", "quantile", "quantile_rot")
_NEEDS = {
    "meanstd": ("mean", "std"),
    "minmax": ("min", "max"),
    "quantile": ("q01", "q99"),
    "quantile_rot": ("q01", "q99"),
}
_LEAST = 1e-8


@dataclass(frozen=True, slots=True)
class Normalizer:
    """model = (robot - offset) / scale, per channel; float32 [D] each.

    >>> scaling = Normalizer.of("minmax", {"min": [0.0], "max": [4.0]})
    >>> scaling.normalize(np.array([[3.0]], np.float32))
    array([[0.5]], dtype=float32)
    """

    offset: NDArray[np.float32]
    scale: NDArray[np.float32]

    @classmethod
    def of(
        cls, method: str, statistics: Mapping[str, Any], rotation: Iterable[int] = ()
    ) -> Normalizer:
        """Return the scaling of a method.

        statistics: mean and std, min and max, or q01 and q99, [D] each.
        rotation: channels that quantile_rot leaves as they are.
        Raises: ConfigError.
        """
        if method not in METHODS:
            raise ConfigError(
                f"action_normalization must be one of {', '.join(METHODS)}; got {method!r}."
                f"{did_you_mean(str(method), METHODS)} Correct it."
            )
        low, high = (_values(statistics, name) for name in _NEEDS[method])
        if low.shape != high.shape:
            raise ConfigError(
                f"action statistics must have one length; got {len(low)} and {len(high)} values. "
                "Correct the file."
            )
        if method == "meanstd":
            return cls(low, np.maximum(high, np.float32(_LEAST)))
        offset = (high + low) / np.float32(2.0)
        scale = np.maximum((high - low) / np.float32(2.0), np.float32(_LEAST))
        if method == "quantile_rot":
            channels = list(rotation)
            offset[channels], scale[channels] = 0.0, 1.0
        return cls(offset, scale)

    def normalize(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Return model units of robot units [..., D]."""
        return np.asarray((rows - self.offset) / self.scale, dtype=np.float32)

    def denormalize(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Return robot units of model units [..., D]."""
        return np.asarray(rows * self.scale + self.offset, dtype=np.float32)


def _values(statistics: Mapping[str, Any], name: str) -> NDArray[np.float32]:
    try:
        values = np.array(statistics[name], dtype=np.float32)
    except KeyError as error:
        raise ConfigError(
            f"action statistics must hold {name}; got {', '.join(sorted(statistics)) or 'none'}. "
            "Pass the file of this data set."
        ) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"action statistics must hold numbers for {name}; got {error}. Correct the file."
        ) from error
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ConfigError(
            f"action statistics must hold one finite row for {name}; got shape "
            f"{list(values.shape)}. Correct the file."
        )
    return values
