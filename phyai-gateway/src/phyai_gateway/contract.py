"""What a model takes and gives, as its server publishes it; protocols check against it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_IN_FLIGHT = "max_in_flight"
"""In ``extra``: requests that the server takes at once, waiting ones included."""

FRAMES = "frames"
"""In ``extra``: steps relative to now that a camera shows, oldest first."""


@dataclass(frozen=True, slots=True)
class ModelContract:
    """The public face of one model name.

    cameras: name -> [H, W, C], or None where any size is taken.  state_dim, action_dim: 0 = not
    fixed.  state_names, action_names: in order, () = unknown.  horizon: rows of a chunk.
    control_hz: rows per second.  stateful: keeps sessions.  idempotent: may be sent twice.
    extra: what single protocols need, such as a modality configuration.

    >>> ModelContract("pi05", cameras={"base": None}).to_json()["name"]
    'pi05'
    """

    name: str
    plugin: str = ""
    cameras: Mapping[str, tuple[int, int, int] | None] = field(default_factory=dict)
    optional_cameras: tuple[str, ...] = ()
    state_dim: int = 0
    state_names: tuple[str, ...] = ()
    action_dim: int = 0
    action_names: tuple[str, ...] = ()
    horizon: int = 0
    control_hz: float | None = None
    default_prompt: str | None = None
    needs_prompt: bool = True
    options: tuple[str, ...] = ()
    max_rows: int = 1
    stateful: bool = False
    idempotent: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    @property
    def frames(self) -> int:
        """Return how many pictures of each camera an observation holds; 1 for most models."""
        steps = self.extra.get(FRAMES)
        return len(steps) if isinstance(steps, list | tuple) and steps else 1

    def differs_in(self, other: ModelContract) -> list[str]:
        """Return the names of the fields that make the fingerprints differ, in order."""
        mine, theirs = self._compared(), other._compared()
        return [key for key in mine if mine[key] != theirs[key]]

    def _compared(self) -> dict[str, Any]:
        fields = {k: v for k, v in self.to_json().items() if k != "name"}
        fields["extra"].pop(MAX_IN_FLIGHT, None)  # the same model, whatever its server can hold
        return fields

    @property
    def fingerprint(self) -> str:
        """Return a short hash that tells contracts apart, whatever the model is called."""
        fields = self._compared()
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
