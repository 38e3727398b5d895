"""Draws the sample camera images: a gripper above a table with coloured cubes, from two sides.

Plain painting, the same pixels on every call with one Pillow version: no photograph, no renderer.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from phyai.errors import ConfigError

Color: TypeAlias = tuple[int, int, int]
Point: TypeAlias = tuple[float, float]

SIZE = 256
VIEWS = ("base", "wrist")
PROMPT = "put the red cube in the bowl"
_OVERSAMPLING = 2

_WALL, _WALL_LOW = (206, 212, 217), (176, 184, 191)
_TABLE, _TABLE_FAR, _GRAIN = (181, 137, 94), (160, 118, 80), (168, 125, 84)
_RED, _BLUE, _GREEN, _YELLOW = (200, 52, 46), (52, 98, 190), (64, 148, 84), (226, 178, 56)
_STEEL, _STEEL_DARK, _ARM, _RUBBER = (150, 156, 162), (96, 102, 108), (235, 236, 238), (44, 46, 50)
_SHADOW = (96, 68, 44)


def sample_view(view: str, size: int = SIZE) -> NDArray[np.uint8]:
    """Return one camera image, uint8 [size, size, 3] RGB.

    view: "base" (third person) or "wrist" (looking down between the fingers).
    Raises: ConfigError for another view.
    """
    if view not in VIEWS:
        raise ConfigError(f"view must be one of {', '.join(VIEWS)}; got {view!r}.")
    canvas = _Canvas(size * _OVERSAMPLING)
    (_base if view == "base" else _wrist)(canvas)
    return np.asarray(canvas.image.resize((size, size), Image.Resampling.BOX)).copy()


class _Canvas:
    """A square picture addressed in units of 1: (0, 0) top left, (1, 1) bottom right."""

    def __init__(self, pixels: int) -> None:
        self.pixels = pixels
        self.image = Image.new("RGB", (pixels, pixels))
        self.draw = ImageDraw.Draw(self.image)

    def at(self, *points: Point) -> list[Point]:
        return [(x * self.pixels, y * self.pixels) for x, y in points]

    def polygon(self, color: Color, *points: Point) -> None:
        self.draw.polygon(self.at(*points), fill=color)

    def ellipse(self, color: Color, x: float, y: float, rx: float, ry: float) -> None:
        self.draw.ellipse(self.at((x - rx, y - ry), (x + rx, y + ry)), fill=color)

    def line(self, color: Color, width: float, *points: Point) -> None:
        self.draw.line(self.at(*points), fill=color, width=round(width * self.pixels))
        for x, y in points:
            self.ellipse(color, x, y, width / 2, width / 2)

    def gradient(self, top: Color, bottom: Color, y0: float, y1: float) -> None:
        rows = range(int(y0 * self.pixels), int(y1 * self.pixels))
        for row in rows:
            t = (row - rows.start) / max(len(rows) - 1, 1)
            self.draw.line([(0, row), (self.pixels, row)], fill=_mix(top, bottom, t))

    def shadow(self, x: float, y: float, rx: float, ry: float, strength: float = 0.55) -> None:
        """Darken a soft ellipse on the table."""
        mask = Image.new("L", self.image.size)
        ImageDraw.Draw(mask).ellipse(
            self.at((x - rx, y - ry), (x + rx, y + ry)), fill=round(255 * strength)
        )
        mask = mask.filter(ImageFilter.GaussianBlur(0.012 * self.pixels))
        self.image.paste(_SHADOW, mask=mask)

    def cube(self, color: Color, x: float, y: float, side: float, lean: float = 0.45) -> None:
        """Draw a cube standing on the table; (x, y) is the lower corner nearest to the viewer."""
        self.shadow(x + 0.15 * side, y - 0.22 * side, 1.0 * side, 0.42 * side)
        left, right = (x - 0.72 * side, y - lean * side), (x + 0.72 * side, y - lean * side)
        far, up = (x, y - 2 * lean * side), 0.85 * side

        def lifted(p: Point) -> Point:
            return p[0], p[1] - up

        self.polygon(_mix(color, (0, 0, 0), 0.12), (x, y), left, lifted(left), lifted((x, y)))
        self.polygon(_mix(color, (0, 0, 0), 0.34), (x, y), right, lifted(right), lifted((x, y)))
        top = [lifted(p) for p in ((x, y), left, far, right)]
        self.polygon(_mix(color, (255, 255, 255), 0.22), *top)


def _base(c: _Canvas) -> None:
    c.gradient(_WALL, _WALL_LOW, 0.0, 0.42)
    c.gradient(_TABLE_FAR, _TABLE, 0.42, 1.0)
    for i in range(9):
        end = -0.9 + 0.35 * i
        c.line(_GRAIN, 0.004, (0.18 + 0.08 * i, 0.424), (end, 1.0))
    c.line(_mix(_TABLE_FAR, (0, 0, 0), 0.3), 0.006, (-0.1, 0.42), (1.1, 0.42))
    _bowl(c, 0.74, 0.70, 0.145, 0.35)
    c.cube(_BLUE, 0.20, 0.66, 0.085)
    c.cube(_GREEN, 0.50, 0.585, 0.065)
    c.cube(_YELLOW, 0.30, 0.92, 0.105)
    c.shadow(0.47, 0.80, 0.10, 0.03, 0.4)
    c.cube(_RED, 0.46, 0.82, 0.10)
    _arm(c)


def _arm(c: _Canvas) -> None:
    """An arm from the upper right, its open gripper above the red cube."""
    c.line(_mix(_ARM, (0, 0, 0), 0.25), 0.100, (0.93, -0.05), (0.70, 0.16))
    c.line(_ARM, 0.084, (0.92, -0.06), (0.69, 0.15))
    c.line(_mix(_ARM, (0, 0, 0), 0.25), 0.084, (0.69, 0.16), (0.49, 0.29))
    c.line(_ARM, 0.070, (0.685, 0.15), (0.485, 0.28))
    c.ellipse(_STEEL_DARK, 0.692, 0.155, 0.046, 0.046)
    c.ellipse(_STEEL, 0.69, 0.152, 0.030, 0.030)
    c.line(_STEEL_DARK, 0.066, (0.478, 0.29), (0.465, 0.41))
    c.polygon(_STEEL, (0.375, 0.405), (0.555, 0.405), (0.565, 0.46), (0.365, 0.46))
    c.polygon(_STEEL_DARK, (0.365, 0.46), (0.565, 0.46), (0.560, 0.475), (0.370, 0.475))
    for side in (-1, 1):
        x = 0.465 + side * 0.085
        c.polygon(
            _STEEL_DARK, (x - 0.014, 0.47), (x + 0.014, 0.47), (x + 0.012, 0.60), (x - 0.012, 0.60)
        )
        tip = x - side * 0.006
        c.polygon(
            _RUBBER,
            (tip - 0.013, 0.60),
            (tip + 0.013, 0.60),
            (tip + 0.010, 0.66),
            (tip - 0.010, 0.66),
        )


def _bowl(c: _Canvas, x: float, y: float, radius: float, flat: float) -> None:
    outside, inside = (222, 224, 228), (168, 172, 180)
    c.shadow(x + 0.02, y + 0.55 * radius, 0.95 * radius, 0.40 * radius)
    c.ellipse(_mix(outside, (0, 0, 0), 0.18), x, y + 0.30 * radius, 0.62 * radius, 0.42 * radius)
    c.polygon(
        _mix(outside, (0, 0, 0), 0.10),
        (x - radius, y),
        (x + radius, y),
        (x + 0.60 * radius, y + 0.52 * radius),
        (x - 0.60 * radius, y + 0.52 * radius),
    )
    c.ellipse(outside, x, y, radius, flat * radius)
    c.ellipse(inside, x, y + 0.02 * radius, 0.88 * radius, 0.86 * flat * radius)
    c.ellipse(
        _mix(inside, (0, 0, 0), 0.15), x, y + 0.07 * radius, 0.66 * radius, 0.60 * flat * radius
    )


def _wrist(c: _Canvas) -> None:
    """Straight down: the table fills the view, the fingers come in from the sides."""
    c.gradient(_mix(_TABLE, (0, 0, 0), 0.06), _TABLE, 0.0, 1.0)
    for i in range(6):
        x = 0.06 + 0.19 * i
        c.line(_GRAIN, 0.006, (x, -0.05), (x + 0.05, 1.05))
    _block_from_above(c, _GREEN, 0.30, 0.10, 0.13, 0.4)
    _block_from_above(c, _YELLOW, 0.10, 0.80, 0.20, -0.3)
    c.shadow(0.95, 0.60, 0.22, 0.22, 0.4)
    c.ellipse((222, 224, 228), 0.96, 0.56, 0.22, 0.22)
    c.ellipse((168, 172, 180), 0.96, 0.56, 0.185, 0.185)
    c.ellipse(_mix((168, 172, 180), (0, 0, 0), 0.15), 0.96, 0.56, 0.12, 0.12)
    _block_from_above(c, _RED, 0.50, 0.52, 0.24, 0.18)
    for side in (-1, 1):
        inner, outer = 0.5 + side * 0.215, 0.5 + side * 0.30
        c.shadow(0.5 + side * 0.25, 0.63, 0.06, 0.18, 0.45)
        c.polygon(
            _STEEL_DARK, (inner, 0.56), (outer, 0.56), (outer + side * 0.05, 1.05), (inner, 1.05)
        )
        c.polygon(
            _STEEL,
            (inner + side * 0.028, 0.60),
            (outer, 0.60),
            (outer + side * 0.05, 1.05),
            (inner + side * 0.03, 1.05),
        )
        c.polygon(_RUBBER, (inner, 0.44), (outer, 0.44), (outer, 0.60), (inner, 0.60))
    c.polygon(_RUBBER, (0.20, 0.955), (0.80, 0.955), (0.86, 1.05), (0.14, 1.05))


def _block_from_above(
    c: _Canvas, color: Color, x: float, y: float, side: float, turn: float
) -> None:
    cos, sin, half = np.cos(turn), np.sin(turn), side / 2

    def corner(u: float, v: float, grow: float = 1.0) -> Point:
        du, dv = u * half * grow, v * half * grow
        return float(x + cos * du - sin * dv), float(y + sin * du + cos * dv)

    corners = ((-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0))
    c.shadow(x + 0.10 * side, y + 0.12 * side, 0.68 * side, 0.66 * side, 0.5)
    c.polygon(_mix(color, (0, 0, 0), 0.35), *(corner(u, v) for u, v in corners))
    lift = 0.10 * side
    # Perspective: the near top face is larger and shifted away from the middle of the view.
    shift = (lift * (x - 0.5), lift * (y - 0.5))
    top = [corner(u, v, 1.06) for u, v in corners]
    top = [(px + shift[0], py + shift[1] - 0.06 * side) for px, py in top]
    c.polygon(_mix(color, (255, 255, 255), 0.14), *top)


def _mix(a: Color, b: Color, t: float) -> Color:
    """Return color ``a`` moved towards ``b`` by the fraction ``t``."""
    r, g, blue = (round(p + (q - p) * t) for p, q in zip(a, b, strict=True))
    return r, g, blue
