"""What the engine times, as the stages of a peer."""

from __future__ import annotations

from collections.abc import Mapping


def stages_of(timing: Mapping[str, float]) -> dict[str, float]:
    """Return seconds per stage of the peer's from our milliseconds; what is not timed is left out.

    prefix: all of ``encode`` behind the vision tower, so also what the steps read of it.
    """
    found = {}
    vision = timing.get("encode/vision")
    if vision is not None:
        found["vision"] = vision / 1e3
        found["prefix"] = (timing["encode"] - vision) / 1e3
    if "solve" in timing:
        found["loop"] = timing["solve"] / 1e3
    return found
