"""A robot without hardware, written as a third party writes one for lerobot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lerobot.robots import Robot, RobotConfig


@RobotConfig.register_subclass("stand_in_arm")
@dataclass(kw_only=True)
class StandInArmConfig(RobotConfig):
    """sizes: camera -> (height, width).  moved: how many of the joints are commanded."""

    joints: int = 6
    moved: int = 6
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)


class StandInArm(Robot):
    """Moves where it is told at once; its cameras show noise."""

    config_class = StandInArmConfig
    name = "stand_in_arm"

    def __init__(self, config: StandInArmConfig) -> None:
        super().__init__(config)
        self.config, self._connected = config, False
        self._random = np.random.default_rng(11)
        self._names = [f"joint_{index}.pos" for index in range(config.joints)]
        self._positions = dict.fromkeys(self._names, 0.25)
        self.performed: list[dict[str, float]] = []

    @property
    def observation_features(self) -> dict[str, Any]:
        cameras = {name: (*size, 3) for name, size in self.config.sizes.items()}
        return dict.fromkeys(self._names, float) | cameras

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(self._names[: self.config.moved], float)

    @property
    def is_connected(self) -> bool:
        return self._connected

    def connect(self, calibrate: bool = True) -> None:
        self._connected = True

    @property
    def is_calibrated(self) -> bool:
        return True

    def calibrate(self) -> None:
        """Nothing to calibrate."""

    def configure(self) -> None:
        """Nothing to configure."""

    def get_observation(self) -> dict[str, Any]:
        # Joints tremble a little, so that no two observations are alike.
        joints = {k: v + float(self._random.normal() / 64) for k, v in self._positions.items()}
        pictures = {
            name: self._random.integers(0, 256, (*size, 3), np.uint8)
            for name, size in self.config.sizes.items()
        }
        return joints | pictures

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        assert all(np.isfinite(value) for value in action.values())
        self._positions |= {name: float(value) % 3.0 for name, value in action.items()}
        self.performed.append(action)
        return action

    def disconnect(self) -> None:
        self._connected = False
