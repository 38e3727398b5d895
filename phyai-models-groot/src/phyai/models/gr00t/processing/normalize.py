"""Normalises states and un-normalises actions, key by key, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from phyai.errors import CheckpointError
from phyai.models.gr00t.processing.modality import ActionConfig, EmbodimentModalities
from phyai.models.gr00t.processing.poses import WIDTHS, Array, from_matrix, inverse, to_matrix
from phyai.models.gr00t.processing.statistics import Statistics, required

Scale = Literal["range", "mean_std", "sin_cos"]


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the values of one key become about [-1, 1]; tables are [D], or [H, D] per step.

    range: 2 (x - low) / (high - low) - 1, and 0 where low and high are equal.
    mean_std: (x - mean) / std, and x where std is 0.  sin_cos: [sin x, cos x], twice as wide.
    """

    kind: Scale
    dim: int
    low: Array | None = None
    high: Array | None = None

    @property
    def width(self) -> int:
        """Values after scaling."""
        return self.dim * (2 if self.kind == "sin_cos" else 1)

    def normalize(self, values: Array, *, clip: bool) -> Array:
        """Return scaled values; [..., D] -> [..., width].  clip: ranges end at -1 and 1."""
        values = np.asarray(values, dtype=np.float64)
        if self.kind == "sin_cos":
            return np.concatenate([np.sin(values), np.cos(values)], axis=-1)
        low, high = self._tables(values)
        if self.kind == "mean_std":
            return np.where(high != 0, (values - low) / np.where(high != 0, high, 1.0), values)
        constant = np.isclose(low, high)
        span = np.where(constant, 1.0, high - low)
        out = np.where(constant, 0.0, 2.0 * (values - low) / span - 1.0)
        return np.clip(out, -1.0, 1.0) if clip else out

    def restore(self, values: Array) -> Array:
        """Return values in robot units; ranges are clipped to [-1, 1] first. [..., D] -> same."""
        values = np.asarray(values, dtype=np.float64)
        low, high = self._tables(values)
        if self.kind == "mean_std":
            return np.where(high != 0, values * high + low, values)
        restored: Array = (np.clip(values, -1.0, 1.0) + 1.0) / 2.0 * (high - low) + low
        return restored

    def _tables(self, values: Array) -> tuple[Array, Array]:
        assert self.low is not None
        assert self.high is not None
        if self.low.ndim == 2:  # one row per step of the chunk
            return self.low[: values.shape[-2]], self.high[: values.shape[-2]]
        return self.low, self.high


@dataclass(frozen=True, slots=True)
class ActionPart:
    """One action key: its columns' scaling, and what its values are relative to."""

    key: str
    scaling: Scaling
    config: ActionConfig
    relative: bool

    def to_robot(self, values: Array, reference: Array | None) -> Array:
        """Return absolute commands of model-space values; [H, D], reference [D] -> [H, D]."""
        out = self.scaling.restore(values)
        if reference is None:
            return out
        reference = np.asarray(reference, dtype=np.float64)
        if self.config.type != "EEF":
            return out + reference
        form = self.config.format
        return from_matrix(to_matrix(reference, form) @ to_matrix(out, form), form)

    def to_model(self, values: Array, reference: Array | None, *, clip: bool) -> Array:
        """Return model-space values of absolute commands; the inverse of ``to_robot``."""
        out = np.asarray(values, dtype=np.float64)
        if reference is not None:
            reference = np.asarray(reference, dtype=np.float64)
            if self.config.type == "EEF":
                form = self.config.format
                out = from_matrix(inverse(to_matrix(reference, form)) @ to_matrix(out, form), form)
            else:
                out = out - reference
        return self.scaling.normalize(out, clip=clip)


def state_scalings(
    modalities: EmbodimentModalities,
    stats: Statistics,
    *,
    use_percentiles: bool,
    sin_cos: bool,
) -> dict[str, Scaling]:
    """Return the scaling of every state key, in order.

    Raises: CheckpointError for statistics that are missing or do not fit together.
    """
    state = modalities.state
    out: dict[str, Scaling] = {}
    for key in state.keys:
        dim = required(stats, "state", key, "min").shape[-1]
        if sin_cos and key in state.sin_cos:
            out[key] = Scaling("sin_cos", dim)
        else:
            out[key] = _scaling(stats, "state", key, key in state.mean_std, use_percentiles)
    return out


def action_parts(
    modalities: EmbodimentModalities,
    stats: Statistics,
    *,
    use_percentiles: bool,
    use_relative: bool,
) -> tuple[ActionPart, ...]:
    """Return what each action key needs, in order.

    Relative keys are scaled by ``relative_action`` min and max per step, percentiles or not.
    Raises: CheckpointError for statistics that are missing or do not fit together.
    """
    action = modalities.action
    out = []
    for key, config in zip(action.keys, action.actions, strict=True):
        relative = use_relative and config.rep == "RELATIVE"
        section = "relative_action" if relative else "action"
        scaling = _scaling(
            stats, section, key, key in action.mean_std, use_percentiles and not relative
        )
        for table in (scaling.low, scaling.high):
            if table is not None and table.ndim == 2 and len(table) < action.steps:
                raise CheckpointError(
                    f"statistics.json must hold {action.steps} steps of {section}/{key}, one per "
                    f"delta index; got {len(table)}. Compute the statistics again."
                )
        if relative:
            _check_reference(modalities, stats, key, config, scaling.dim)
        out.append(ActionPart(key, scaling, config, relative))
    return tuple(out)


def _check_reference(
    modalities: EmbodimentModalities, stats: Statistics, key: str, config: ActionConfig, dim: int
) -> None:
    if config.state_key not in modalities.state.keys:
        raise CheckpointError(
            f"relative action {key!r} must name one of the state keys "
            f"{', '.join(modalities.state.keys)}; got {config.state_key!r}. "
            "Correct processor_config.json."
        )
    have = required(stats, "state", config.state_key, "min").shape[-1]
    want = WIDTHS[config.format] if config.type == "EEF" else dim
    if dim != want or have != want:
        raise CheckpointError(
            f"relative action {key!r} and its state must have {want} values "
            f"({config.type} {config.format}); got {dim} and {have}. Correct statistics.json."
        )


def _scaling(stats: Statistics, section: str, key: str, mean_std: bool, quantiles: bool) -> Scaling:
    names = ("mean", "std") if mean_std else ("q01", "q99") if quantiles else ("min", "max")
    low, high = (required(stats, section, key, name) for name in names)
    if low.shape != high.shape:
        raise CheckpointError(
            f"statistics.json must hold {names[0]} and {names[1]} of one shape for "
            f"{section}/{key}; got {list(low.shape)} and {list(high.shape)}. Download it again."
        )
    if low.ndim > 1 and section != "relative_action":
        raise CheckpointError(
            f"statistics.json must hold one row of {section}/{key}; got shape {list(low.shape)}. "
            "Only relative actions have one per step."
        )
    known = required(stats, section, key, "min").shape[-1]
    if low.shape[-1] != known:
        raise CheckpointError(
            f"statistics.json must hold {known} values of {names[0]} for {section}/{key}, as of "
            f"min; got {low.shape[-1]}. Download it again."
        )
    return Scaling("mean_std" if mean_std else "range", low.shape[-1], low, high)


def references(parts: tuple[ActionPart, ...], state: Mapping[str, Array]) -> list[Array | None]:
    """Return the last raw state step each part is relative to; None for absolute parts."""
    return [
        np.asarray(state[part.config.state_key or part.key])[-1] if part.relative else None
        for part in parts
    ]
