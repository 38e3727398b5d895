"""The task the policy was trained on: drive the gripper to the square of the named colour.

A table seen from above, x to the right and y up, both in [-1, 1] m; the state is the gripper's
position. An expert closes 10 % of the remaining distance per control period.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from phyai.types import Observation

from my_policy.config import PolicyConfig

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 230)}
PIXELS, SIDE = 32, 6
SHARE = 0.1  # of the remaining distance, per control period

CONFIG = PolicyConfig(
    words=("go", "to", "the", *COLOURS, "square"),
    action_names=("vx", "vy"),
    action_units=("m/s", "m/s"),
    state_mean=(0.0, 0.0),
    state_std=(0.5, 0.5),
    action_mean=(0.0, 0.0),
    action_std=(0.5, 0.5),
)


@dataclass(frozen=True)
class Scene:
    """An image with a square of each colour, and where the squares are [m]."""

    image: NDArray[np.uint8]
    state: NDArray[np.float32]
    squares: dict[str, NDArray[np.float32]]

    def observation(self, colour: str, **options: object) -> Observation:
        prompt = f"go to the {colour} square"
        return Observation({CONFIG.camera: self.image}, self.state, prompt, options)

    def expert(self, colour: str) -> NDArray[np.float32]:
        """Return the expert's velocities [H, 2], m/s."""
        left = (1.0 - SHARE) ** np.arange(CONFIG.horizon, dtype=np.float32)[:, None]
        velocity = SHARE * CONFIG.control_hz * left * (self.squares[colour] - self.state)
        return np.asarray(velocity, dtype=np.float32)


def draw_scene(random: np.random.Generator) -> Scene:
    """Return a scene whose squares do not overlap."""
    while True:
        corners = random.integers(0, PIXELS - SIDE + 1, (len(COLOURS), 2))
        gaps = np.abs(corners[:, None] - corners[None]).max(axis=-1)
        if (gaps + SIDE * np.eye(len(COLOURS)) >= SIDE).all():
            break
    image = np.full((PIXELS, PIXELS, 3), random.integers(90, 170), dtype=np.uint8)
    squares = {}
    for (name, colour), (row, column) in zip(COLOURS.items(), corners, strict=True):
        image[row : row + SIDE, column : column + SIDE] = colour
        centre = (np.array([column, row]) + SIDE / 2) / PIXELS * 2.0 - 1.0
        squares[name] = (centre * (1.0, -1.0)).astype(np.float32)
    return Scene(image, random.uniform(-1.0, 1.0, 2).astype(np.float32), squares)
