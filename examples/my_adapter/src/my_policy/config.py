"""The checkpoint's config.json: sizes, camera, units, statistics and vocabulary."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phyai.errors import CheckpointError, did_you_mean

TYPE = "my_policy"


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Everything the checkpoint says about the policy besides its weights.

    words: the prompts' vocabulary; word i has token i + 1, token 0 is padding.
    state_mean, state_std, action_mean, action_std: robot units, one value per dim.
    """

    words: tuple[str, ...]
    action_names: tuple[str, ...]
    action_units: tuple[str, ...]
    state_mean: tuple[float, ...]
    state_std: tuple[float, ...]
    action_mean: tuple[float, ...]
    action_std: tuple[float, ...]
    type: str = TYPE
    camera: str = "top"
    control_hz: float = 10.0
    image_size: int = 32
    patch_size: int = 8
    width: int = 64
    heads: int = 4
    vision_layers: int = 1
    layers: int = 2
    horizon: int = 8
    max_words: int = 8
    num_steps: int = 5

    def __post_init__(self) -> None:
        if self.type != TYPE:
            raise CheckpointError(f"config type must be {TYPE!r}; got {self.type!r}.")
        if self.width % (2 * self.heads):
            raise CheckpointError(
                f"config width must be a multiple of 2 * heads; got {self.width} and {self.heads}."
            )
        if self.image_size % self.patch_size:
            raise CheckpointError(
                f"config image_size must be a multiple of patch_size; got {self.image_size} and "
                f"{self.patch_size}."
            )
        per_action = (self.action_units, self.action_mean, self.action_std)
        if any(len(values) != self.action_dim for values in per_action):
            raise CheckpointError(
                f"config must give a unit, mean and std for each of {self.action_dim} actions."
            )
        if len(self.state_std) != self.state_dim:
            raise CheckpointError(f"config must give {self.state_dim} values of state_std.")
        if min(*self.action_std, *self.state_std) <= 0:
            raise CheckpointError("config standard deviations must be positive.")

    @property
    def action_dim(self) -> int:
        return len(self.action_names)

    @property
    def state_dim(self) -> int:
        return len(self.state_mean)

    @classmethod
    def from_folder(cls, folder: Path) -> PolicyConfig:
        """Return the config of a checkpoint; CheckpointError unless every field is known."""
        file = folder / "config.json"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} must be readable JSON; got {error}.") from error
        known = {field.name for field in dataclasses.fields(cls)}
        for name in sorted(set(data) - known):
            raise CheckpointError(
                f"{file} holds unknown field {name!r}.{did_you_mean(name, known)}"
            )
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"{file} must hold every field; {error}.") from error

    def save(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
