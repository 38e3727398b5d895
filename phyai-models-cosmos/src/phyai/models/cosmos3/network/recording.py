"""What the network gives to a recorder: names ``mid.<name>``, other branches ``mid.<branch>.``."""

from __future__ import annotations

from torch import Tensor

from phyai.cache import Cache
from phyai.timers import Profile
from phyai.types import Step


def records(profile: Profile) -> bool:
    """Return whether somebody listens to more than results."""
    return profile.recorder.inside


def first_step(step: Step) -> bool:
    """Return whether a step is the first one; only while somebody listens, for it may wait."""
    return step.index == 0 if step.position is None else int(step.position) == 0


def record(profile: Profile, cache: Cache, name: str, value: Tensor) -> None:
    """Put a tensor of a branch into the recorder; [rows, ...], or packed rows [tokens, ...]."""
    branch = "" if cache.branch == "cond" else f"{cache.branch}."
    profile.record(f"mid.{branch}{name}", value)
