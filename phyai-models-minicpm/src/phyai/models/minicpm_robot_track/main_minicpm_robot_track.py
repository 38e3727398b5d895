"""MiniCPM-RobotTrack: the names its plugin module and its users import."""

from __future__ import annotations

from phyai.models.minicpm_robot_track.adapter import MiniCPMRobotTrackAdapter
from phyai.models.minicpm_robot_track.args import MiniCPMRobotTrackArgs
from phyai.models.minicpm_robot_track.config import MiniCPMRobotTrackConfig
from phyai.models.minicpm_robot_track.request import MiniCPMRobotTrackRequest

__all__ = [
    "MiniCPMRobotTrackAdapter",
    "MiniCPMRobotTrackArgs",
    "MiniCPMRobotTrackConfig",
    "MiniCPMRobotTrackRequest",
]
