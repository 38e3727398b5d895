"""Which views the image processor makes of a picture: an overview, and slices of a large one.

Robot frames are resized to a square of ``scale_resolution`` first, which gives one view. The rule
for other sizes is here because a checkpoint may have been trained with it.

Source: the MiniCPM-V 4.6 image processor (huggingface/transformers, models/minicpmv4_6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phyai.models.minicpm.frames import Pixels, resize
from phyai.models.minicpm_robot.processing.images import Grid, Size
from phyai.models.minicpm_robot.processing.settings import ImageSettings


@dataclass(frozen=True, slots=True)
class ViewPlan:
    """Sizes in pixels, (height, width). slices: (rows, columns), (0, 0) without slices."""

    overview: Size
    slices: Grid
    slice_size: Size

    def grids(self, patch_size: int) -> list[Grid]:
        """Return the size of every view in patches, the overview first."""
        sizes = [self.overview, *[self.slice_size] * (self.slices[0] * self.slices[1])]
        return [(height // patch_size, width // patch_size) for height, width in sizes]


def plan_views(height: int, width: int, settings: ImageSettings) -> ViewPlan:
    """Return the views of a picture.

    >>> plan_views(448, 448, ImageSettings())
    ViewPlan(overview=(448, 448), slices=(0, 0), slice_size=(0, 0))
    >>> plan_views(480, 640, ImageSettings()).grids(14)
    [(28, 36), (40, 28), (40, 28)]
    """
    slices = slice_grid(height, width, settings) if settings.slice_mode else None
    overview = _best_size(height, width, settings, upscale=slices is None)
    if slices is None:
        return ViewPlan(overview, (0, 0), (0, 0))
    rows, columns = slices
    # Each slice's share of the picture, after the sides are made to divide evenly.
    share = _whole(height, rows) / rows, _whole(width, columns) / columns
    return ViewPlan(overview, slices, _best_size(*share, settings, upscale=True))


def slice_grid(height: int, width: int, settings: ImageSettings) -> Grid | None:
    """Return (rows, columns) of slices whose shape is nearest to the picture's; None = none.

    >>> slice_grid(480, 640, ImageSettings())
    (1, 2)
    """
    area = height * width / settings.scale_resolution**2
    wanted = min(math.ceil(area), settings.max_slice_nums)
    if wanted <= 1:
        return None
    counts = [n for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= settings.max_slice_nums]
    grids = [(rows, n // rows) for n in counts for rows in range(1, n + 1) if n % rows == 0]
    log_shape = math.log(width / height)

    def off(grid: Grid) -> float:
        return abs(log_shape - math.log(grid[1] / grid[0]))

    # Of equally good ones the one with the most rows, as the official search ends up with.
    return min(grids, key=lambda grid: (off(grid), -grid[0]))


def make_views(image: Pixels, settings: ImageSettings) -> tuple[list[Pixels], Grid]:
    """Return the views of a picture, overview first and slices row by row, and its slice grid.

    Shapes: uint8 [height, width, 3] -> uint8 [height', width', 3] each.
    """
    plan = plan_views(image.shape[0], image.shape[1], settings)
    views = [resize(image, plan.overview)]
    rows, columns = plan.slices
    if rows:
        height, width = plan.slice_size
        large = resize(image, (rows * height, columns * width))
        views += [
            np.ascontiguousarray(large[r * height : (r + 1) * height, c * width : (c + 1) * width])
            for r in range(rows)
            for c in range(columns)
        ]
    return views, plan.slices


def _best_size(height: float, width: float, settings: ImageSettings, *, upscale: bool) -> Size:
    """Return the size in whole image tokens, of about the area of ``scale_resolution``."""
    side = settings.scale_resolution
    if upscale or height * width > side * side:
        shape = width / height
        # Truncated, the width from the truncated height: a pixel decides which block is nearest.
        height = int(side / math.sqrt(shape))
        width = int(height * shape)
    return _whole(height, settings.block), _whole(width, settings.block)


def _whole(length: float, divisor: int) -> int:
    return max(round(length / divisor) * divisor, divisor)
