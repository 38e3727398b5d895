"""MiniCPM-RobotManip: adapter, arguments, request (imported lazily; the plugin is torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phyai.models.minicpm_robot.main_minicpm_robot import (
        MiniCPMGR00TArgs,
        MiniCPMGR00TRequest,
        MiniCPMRobotAdapter,
        MiniCPMRobotArgs,
        MiniCPMRobotConfig,
        MiniCPMRobotRequest,
    )

__all__ = [
    "MiniCPMGR00TArgs",
    "MiniCPMGR00TRequest",
    "MiniCPMRobotAdapter",
    "MiniCPMRobotArgs",
    "MiniCPMRobotConfig",
    "MiniCPMRobotRequest",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phyai.models.minicpm_robot import main_minicpm_robot

    return getattr(main_minicpm_robot, name)
