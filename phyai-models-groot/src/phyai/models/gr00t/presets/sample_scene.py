"""Draws sample camera frames: coloured blocks on a table, from above or close by.

Plain arithmetic, the same pixels on every call: no photograph, no renderer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PROMPT = "Pick up the red cube."
_TABLE, _WALL = (181, 137, 94), (206, 212, 217)
# Colour, then centre and half side as shares of the picture.
_BLOCKS = (
    ((52, 98, 190), 0.22, 0.62, 0.07),
    ((64, 148, 84), 0.52, 0.50, 0.06),
    ((226, 178, 56), 0.34, 0.86, 0.08),
    ((200, 52, 46), 0.66, 0.74, 0.09),
)


def sample_frames(
    camera: str, steps: int, height: int = 240, width: int = 320
) -> NDArray[np.uint8]:
    """Return frames of one camera, uint8 [steps, height, width, 3]; the blocks drift with time."""
    return np.stack([_frame("wrist" in camera, step, height, width) for step in range(steps)])


def _frame(close: bool, step: int, height: int, width: int) -> NDArray[np.uint8]:
    y, x = np.mgrid[0:height, 0:width]
    y, x = (y + 0.5) / height, (x + 0.5) / width
    zoom, horizon = (2.0, -1.0) if close else (1.0, 0.36)
    shade = 0.85 + 0.15 * y
    ground = y[..., None] > horizon
    out = np.where(ground, np.multiply.outer(shade, _TABLE), np.multiply.outer(shade, _WALL))
    for color, column, row, side in _BLOCKS:
        column, row = (column - 0.5) * zoom + 0.5 + 0.01 * step, (row - 0.6) * zoom + 0.6
        inside = (abs(x - column) < side * zoom) & (abs(y - row) < side * zoom)
        light = 1.0 + 0.25 * (row - y) / (side * zoom)
        out = np.where(inside[..., None], np.multiply.outer(light, color), out)
    return np.asarray(np.clip(np.rint(out), 0, 255), dtype=np.uint8)
