"""MiniCPM-RobotTrack: adapter, arguments and request (imported lazily; plugin is torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phyai.models.minicpm_robot_track.main_minicpm_robot_track import (
        MiniCPMRobotTrackAdapter,
        MiniCPMRobotTrackArgs,
        MiniCPMRobotTrackConfig,
        MiniCPMRobotTrackRequest,
    )

__all__ = [
    "MiniCPMRobotTrackAdapter",
    "MiniCPMRobotTrackArgs",
    "MiniCPMRobotTrackConfig",
    "MiniCPMRobotTrackRequest",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phyai.models.minicpm_robot_track import main_minicpm_robot_track

    return getattr(main_minicpm_robot_track, name)
