"""Draws sample camera frames: coloured blocks on a table, from one side, the other or close by.

Plain arithmetic, the same pixels on every call: no photograph, no renderer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_TABLE, _WALL = (176, 142, 104), (198, 208, 216)
# Colour, then centre and half side as shares of the picture.
_BLOCKS = (
    ((196, 60, 52), 0.30, 0.70, 0.08),
    ((58, 104, 186), 0.55, 0.55, 0.06),
    ((70, 150, 92), 0.74, 0.82, 0.07),
)


def sample_frame(camera: str, height: int = 360, width: int = 640) -> NDArray[np.uint8]:
    """Return one frame, uint8 [height, width, 3]; the name decides the point of view."""
    y, x = np.mgrid[0:height, 0:width]
    y, x = (y + 0.5) / height, (x + 0.5) / width
    close = "wrist" in camera
    zoom, horizon = (1.8, -1.0) if close else (1.0, 0.35)
    if "2" in camera:  # the second camera outside looks from the other side
        x = 1.0 - x
    shade = 0.86 + 0.14 * y
    ground = y[..., None] > horizon
    out = np.where(ground, np.multiply.outer(shade, _TABLE), np.multiply.outer(shade, _WALL))
    for color, column, row, side in _BLOCKS:
        column, row = (column - 0.5) * zoom + 0.5, (row - 0.6) * zoom + 0.6
        inside = (abs(x - column) < side * zoom) & (abs(y - row) < side * zoom)
        light = 1.0 + 0.2 * (row - y) / (side * zoom)
        out = np.where(inside[..., None], np.multiply.outer(light, color), out)
    return np.asarray(np.clip(np.rint(out), 0, 255), dtype=np.uint8)
