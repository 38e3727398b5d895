"""One embodiment of a checkpoint: its projector, state layout and action layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phyai.errors import CheckpointError, RequestError
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.processing.embodiments import projector_id
from phyai.models.gr00t.processing.modality import EmbodimentModalities
from phyai.models.gr00t.processing.normalize import (
    ActionPart,
    Scaling,
    action_parts,
    references,
    state_scalings,
)
from phyai.models.gr00t.processing.poses import Array
from phyai.models.gr00t.processing.settings import STATISTICS, ProcessorSettings

Raw = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Robot:
    """What ``Processor`` knows of one embodiment tag; make it with ``build``.

    state: scaling by state key, in order.  actions: parts by column, in order.
    clip: normalised states and actions end at -1 and 1.  exclude_state: the model sees zeros.
    """

    modalities: EmbodimentModalities
    embodiment_id: int
    state: Mapping[str, Scaling]
    actions: tuple[ActionPart, ...]
    clip: bool = True
    exclude_state: bool = False

    @classmethod
    def build(cls, tag: str, settings: ProcessorSettings, config: GrootConfig) -> Robot:
        """Return one embodiment.

        Raises: CheckpointError saying why the tag cannot run on this model.
        """
        modalities = settings.modalities[tag]
        if tag not in settings.statistics:
            raise CheckpointError(
                f"{STATISTICS} must hold embodiment {tag!r}; got none. "
                "Use the statistics of this checkpoint's training."
            )
        stats = settings.statistics[tag]
        number = projector_id(tag, settings.ids)
        if number is None or number >= config.max_num_embodiments:
            raise CheckpointError(
                f"embodiment {tag!r} must have a projector in [0, {config.max_num_embodiments}); "
                f"got {number}. Add it to embodiment_id.json."
            )
        # Before the statistics, which a horizon of another model would not fit either.
        most_steps = settings.sizes.get("max_action_horizon", config.action_horizon)
        horizon = min(config.action_horizon, most_steps)
        _at_most(tag, "action steps", modalities.action.steps, horizon)
        state = state_scalings(
            modalities,
            stats,
            use_percentiles=settings.use_percentiles,
            sin_cos=settings.apply_sincos_state_encoding,
        )
        actions = action_parts(
            modalities,
            stats,
            use_percentiles=settings.use_percentiles,
            use_relative=settings.use_relative_action,
        )
        robot = cls(
            modalities, number, state, actions, settings.clip_outliers, settings.exclude_state
        )
        robot.check(config)
        return robot

    def check(self, config: GrootConfig) -> None:
        """Raise CheckpointError unless states and actions fit into the model's sizes."""
        tag, width = self.modalities.tag, sum(scaling.width for scaling in self.state.values())
        _at_most(tag, "action values", self.action_dim, config.max_action_dim)
        _at_most(tag, "normalised state values", width, config.max_state_dim)
        if self.modalities.state.steps != config.state_history_length:
            raise CheckpointError(
                f"embodiment {tag!r} must have state_history_length = "
                f"{config.state_history_length} state steps; got {self.modalities.state.steps}. "
                "Correct delta_indices of its state."
            )

    @property
    def state_dim(self) -> int:
        """Raw state values of one step."""
        return sum(self.state_widths.values())

    @property
    def state_widths(self) -> dict[str, int]:
        return {key: scaling.dim for key, scaling in self.state.items()}

    @property
    def action_dim(self) -> int:
        return sum(part.scaling.dim for part in self.actions)

    @property
    def action_names(self) -> tuple[str, ...]:
        """One name per action column: the key, numbered when it has several columns."""
        return tuple(
            part.key if part.scaling.dim == 1 else f"{part.key}.{i}"
            for part in self.actions
            for i in range(part.scaling.dim)
        )

    def columns(self) -> dict[str, slice]:
        """Return the action columns of every key."""
        out, at = {}, 0
        for part in self.actions:
            out[part.key] = slice(at, at + part.scaling.dim)
            at += part.scaling.dim
        return out

    def normalize_state(self, raw: Raw) -> dict[str, NDArray[np.float32]]:
        """Return the state by key as the model sees it; [T, D] -> float32 [T, width]."""
        out = {}
        for key, scaling in self.state.items():
            values = scaling.normalize(raw[key], clip=self.clip).astype(np.float32)
            out[key] = np.zeros_like(values) if self.exclude_state else values
        return out

    def decode(self, actions: Array, raw: Raw) -> NDArray[np.float32]:
        """Return robot commands; actions [H, >= A] model space -> float32 [H_tag, A]."""
        steps = actions[: self.modalities.action.steps]
        parts = [
            part.to_robot(steps[:, columns], reference)
            for part, columns, reference in self._with_references(raw)
        ]
        # One rounding, at the end: relative poses are composed in float64.
        return np.concatenate(parts, axis=1).astype(np.float32)

    def encode(self, actions: Array, raw: Raw) -> NDArray[np.float32]:
        """Return model-space actions of robot commands; [T, A] -> float32 [T, A].

        Raises: RequestError for another width or more steps than the embodiment has.
        """
        most = self.modalities.action.steps
        if actions.ndim != 2 or actions.shape[1] != self.action_dim or len(actions) > most:
            raise RequestError(
                f"actions must be at most {most} steps of {self.action_dim} values, as this "
                f"embodiment's chunks are; got shape {list(actions.shape)}. Send its own actions."
            )
        parts = [
            part.to_model(actions[:, columns], reference, clip=self.clip)
            for part, columns, reference in self._with_references(raw)
        ]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def _with_references(self, raw: Raw) -> list[tuple[ActionPart, slice, Array | None]]:
        columns = self.columns().values()
        return list(zip(self.actions, columns, references(self.actions, raw), strict=True))


def _at_most(tag: str, what: str, got: int, most: int) -> None:
    if got > most:
        raise CheckpointError(
            f"embodiment {tag!r} must have at most the model's {most} {what}; got {got}. "
            "Use a checkpoint that was trained with it."
        )
