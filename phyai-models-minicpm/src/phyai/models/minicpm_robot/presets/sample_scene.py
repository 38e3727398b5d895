"""Draws sample camera frames: coloured discs on a table, from afar or close by.

Plain arithmetic, the same pixels on every call: no photograph, no renderer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PROMPT = "put the red cup on the plate"
_TABLE = (150, 118, 88)
# Colour, then centre (row, column) and radius as shares of the picture.
_DISCS = (
    ((232, 232, 226), 0.58, 0.62, 0.17),
    ((188, 44, 40), 0.66, 0.28, 0.08),
    ((58, 92, 160), 0.34, 0.48, 0.06),
)


def sample_frame(camera: str, height: int = 240, width: int = 320) -> NDArray[np.uint8]:
    """Return one camera's frame, uint8 [height, width, 3]; cameras on the arm see it larger."""
    close = "wrist" in camera or "gripper" in camera
    row, column = np.mgrid[0:height, 0:width]
    row, column = (row + 0.5) / height, (column + 0.5) / width
    light = 0.8 + 0.4 * column if "right" in camera else 1.2 - 0.4 * column
    out = np.multiply.outer(light * (0.9 + 0.2 * row), _TABLE)
    zoom = 1.8 if close else 1.0
    for color, at, across, radius in _DISCS:
        at, across = (at - 0.6) * zoom + 0.6, (across - 0.4) * zoom + 0.4
        near = np.hypot(row - at, (column - across) * width / height) < radius * zoom
        out = np.where(near[..., None], np.multiply.outer(light, color), out)
    return np.asarray(np.clip(np.rint(out), 0, 255), dtype=np.uint8)
