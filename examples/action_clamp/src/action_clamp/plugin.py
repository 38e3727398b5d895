"""Hook plugin: clamps named actions to the limits in the file ACTION_CLAMP names. No torch.

The file holds, per plugin id, limits in robot units: ``{"pi05": {"gripper": [-1, 1]}}``. Without a
file, with one that cannot be understood, or for a plugin it does not name, no engine starts: a
clamp that is silently off is worse than none. ``{"pi05": {}}`` leaves all actions as they are.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.errors import ConfigError
from phyai.hooks import hookimpl
from phyai.types import ActionChunk

if TYPE_CHECKING:
    from phyai.cache import Cache
    from phyai.types import Media, Output, Prepared, Tensors

Limits = Mapping[str, tuple[float, float]]
VARIABLE = "ACTION_CLAMP"


@hookimpl(wrapper=True)
def phyai_output(adapter: Any, services: Any) -> Generator[None, Any, Any]:
    inner = yield
    limits = read_limits(os.environ.get(VARIABLE))
    if adapter.name not in limits:
        raise ConfigError(
            f"the file {VARIABLE} names must have limits of plugin {adapter.name!r}; it has those "
            f"of {', '.join(sorted(limits)) or 'none'}. Add them, or {{}} to clamp nothing."
        )
    return ClampedOutput(inner, limits[adapter.name])


def read_limits(file: str | None) -> dict[str, Limits]:
    """Return the limits by plugin id and action name; ConfigError when they are not clear."""
    if not file:
        raise ConfigError(
            f"variable {VARIABLE} must name the file of limits; got none. "
            "Set it, or block the plugin with PHYAI_PLUGINS_BLOCK=action_clamp."
        )
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
        return {
            plugin: {name: _pair(name, pair) for name, pair in limits.items()}
            for plugin, limits in data.items()
        }
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} must hold {{plugin: {{action: [low, high]}}}} as JSON; got {error}."
        ) from error


def _pair(name: str, pair: Any) -> tuple[float, float]:
    low, high = (float(value) for value in pair)
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ConfigError(f"limits of action {name!r} must be finite, low <= high; got {pair!r}.")
    return low, high


class ClampedOutput:
    """The wrapped output with its actions in the limits; others keep their bits.

    ``model_actions`` stay what the model said: real-time chunking continues from them. How many
    values were clamped is ``chunk.info["clamped"]``.
    """

    def __init__(self, inner: Output, limits: Limits) -> None:
        self.inner, self.limits = inner, dict(limits)

    def decode(self, x: Tensors, cache: Cache, prepared: Prepared) -> Sequence[ActionChunk | Media]:
        results = self.inner.decode(x, cache, prepared)
        return [self.clamp(r) if isinstance(r, ActionChunk) else r for r in results]

    def tensors(self, x: Tensors, cache: Cache, prepared: Prepared) -> Any:
        return self.inner.tensors(x, cache, prepared)

    def clamp(self, chunk: ActionChunk) -> ActionChunk:
        """Return the chunk within the limits; the same object when it already was.

        Raises: ConfigError for a limit of an action the chunk does not have.
        """
        unknown = sorted(set(self.limits) - set(chunk.names))
        if unknown:
            raise ConfigError(
                f"limits must be of actions the policy has ({', '.join(chunk.names)}); "
                f"got {unknown[0]!r}. Correct the file {VARIABLE} names."
            )
        actions = chunk.actions.copy()
        for name, (low, high) in self.limits.items():
            column = actions[:, chunk.names.index(name)]
            column.clip(low, high, out=column)
        clamped = int((actions != chunk.actions).sum())
        if not clamped:
            return chunk
        info = {**chunk.info, "clamped": clamped}
        return dataclasses.replace(chunk, actions=actions, info=info)
