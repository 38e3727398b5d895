"""One object per family that normalises states and actions for a whole checkpoint.

Immutable, so a processor can be shared by threads. Both have the same four methods; openpi
un-normalises in the model's full width, before any slicing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phyai.models.pi.processing.norm_stats import ACTION, STATE, Stats, feature_dim, openpi_stats
from phyai.models.pi.processing.normalize import (
    OpenpiStats,
    lerobot_normalize,
    lerobot_unnormalize,
    openpi_normalize,
    openpi_unnormalize,
)
from phyai.models.pi.processing.processor_files import NormStep

Array = NDArray[Any]


class Normalizer(Protocol):
    """State and action normalisation of one checkpoint; arrays [..., D]."""

    @property
    def state_dim(self) -> int | None: ...

    @property
    def action_dim(self) -> int | None: ...

    def normalize_state(self, state: Array) -> Array: ...

    def unnormalize_state(self, state: Array) -> Array: ...

    def normalize_actions(self, actions: Array) -> Array: ...

    def unnormalize_actions(self, actions: Array) -> Array: ...


@dataclass(frozen=True)
class LerobotNormalizer:
    """LeRobot: float32, statistics and modes from the processor files or the caller.

    state, action: the steps whose statistics and mode apply to each.
    """

    state: NormStep = field(default_factory=NormStep)
    action: NormStep = field(default_factory=NormStep)

    @property
    def state_dim(self) -> int | None:
        return self._dim(self.state, STATE)

    @property
    def action_dim(self) -> int | None:
        return self._dim(self.action, ACTION)

    @staticmethod
    def _dim(step: NormStep, feature: str) -> int | None:
        return None if step.mode(feature) == "IDENTITY" else feature_dim(step.stats, feature)

    @staticmethod
    def _of(step: NormStep, feature: str) -> tuple[Any, str, float]:
        return (step.stats or {}).get(feature), step.mode(feature), step.eps

    def normalize_state(self, state: Array) -> Array:
        return lerobot_normalize(state, *self._of(self.state, STATE))

    def unnormalize_state(self, state: Array) -> Array:
        return lerobot_unnormalize(state, *self._of(self.state, STATE))

    def normalize_actions(self, actions: Array) -> Array:
        return lerobot_normalize(actions, *self._of(self.action, ACTION))

    def unnormalize_actions(self, actions: Array) -> Array:
        return lerobot_unnormalize(actions, *self._of(self.action, ACTION))


@dataclass(frozen=True)
class OpenpiNormalizer:
    """openpi: float64; z-score for pi0, quantiles for pi0.5; identity without statistics."""

    state: OpenpiStats | None = None
    action: OpenpiStats | None = None
    use_quantiles: bool = False

    @classmethod
    def from_stats(cls, stats: Stats | None, *, use_quantiles: bool) -> OpenpiNormalizer:
        return cls(openpi_stats(stats, STATE), openpi_stats(stats, ACTION), use_quantiles)

    @property
    def state_dim(self) -> int | None:
        return None if self.state is None else self.state.dim

    @property
    def action_dim(self) -> int | None:
        return None if self.action is None else self.action.dim

    def normalize_state(self, state: Array) -> Array:
        return openpi_normalize(np.asarray(state), self.state, use_quantiles=self.use_quantiles)

    def unnormalize_state(self, state: Array) -> Array:
        return openpi_unnormalize(state, self.state, use_quantiles=self.use_quantiles)

    def normalize_actions(self, actions: Array) -> Array:
        return openpi_normalize(actions, self.action, use_quantiles=self.use_quantiles)

    def unnormalize_actions(self, actions: Array) -> Array:
        return openpi_unnormalize(actions, self.action, use_quantiles=self.use_quantiles)
