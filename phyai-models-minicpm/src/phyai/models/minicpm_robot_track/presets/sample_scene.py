"""Draws sample frames: a figure in a red jacket that walks through a corridor.

Plain arithmetic, the same pixels on every call: no photograph, no renderer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PROMPT = "Follow the person in the red jacket."
_WALL, _FLOOR = (202, 206, 208), (150, 140, 128)
_JACKET, _LEGS, _HEAD = (198, 48, 44), (52, 58, 76), (224, 184, 156)


def sample_frames(count: int, height: int = 240, width: int = 320) -> NDArray[np.uint8]:
    """Return frames uint8 [count, height, width, 3], oldest first; the figure moves."""
    return np.stack([_frame(step, height, width) for step in range(count)])


def _frame(step: int, height: int, width: int) -> NDArray[np.uint8]:
    y, x = np.mgrid[0:height, 0:width]
    y, x = (y + 0.5) / height, (x + 0.5) / width
    out = np.where((y > 0.55)[..., None], _FLOOR, _WALL) * (0.8 + 0.2 * y)[..., None]
    centre = 0.4 + 0.01 * step
    for color, row, high, side in ((_LEGS, 0.72, 0.16, 0.05), (_JACKET, 0.48, 0.12, 0.07)):
        inside = (abs(x - centre) < side) & (abs(y - row) < high)
        out = np.where(inside[..., None], color, out)
    head = (x - centre) ** 2 * (width / height) ** 2 + (y - 0.3) ** 2 < 0.055**2
    out = np.where(head[..., None], _HEAD, out)
    return np.asarray(np.clip(np.rint(out), 0, 255), dtype=np.uint8)
