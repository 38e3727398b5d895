"""The preset of the manifest: the checkpoint ``train.py`` made, and an observation for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from phyai.types import Observation

from my_policy import task


def trained(cache_dir: Path, progress: Callable[[int, int, str], None] | None) -> dict[str, Any]:
    """Return the arguments of the checkpoint this package ships."""
    return {"checkpoint_dir": str(Path(__file__).parent / "trained")}


def sample_observation(args: Mapping[str, Any]) -> Observation:
    """Return a scene of the task and a prompt for its red square."""
    return task.draw_scene(np.random.default_rng(0)).observation("red")
