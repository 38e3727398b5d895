"""The tiny preset's processor, and observations for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phyai.models.gr00t.presets.builders import sample_observation
from phyai.models.gr00t.presets.robots import LIBERO
from phyai.types import Observation


def observation_of(args: dict[str, Any], tag: str = LIBERO, **changes: Any) -> Observation:
    return replace(sample_observation({**args, "embodiment": tag}), **changes)
