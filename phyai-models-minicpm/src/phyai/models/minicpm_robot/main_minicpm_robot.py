"""MiniCPM-RobotManip: the names its plugin module and its users import."""

from __future__ import annotations

from phyai.models.minicpm_robot.adapter import MiniCPMRobotAdapter
from phyai.models.minicpm_robot.args import MiniCPMRobotArgs
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.cost import MiniCPMRobotCost
from phyai.models.minicpm_robot.request import MiniCPMRobotRequest

__all__ = [
    "MiniCPMGR00TArgs",
    "MiniCPMGR00TRequest",
    "MiniCPMRobotAdapter",
    "MiniCPMRobotArgs",
    "MiniCPMRobotConfig",
    "MiniCPMRobotRequest",
    "cost",
]

# The names of the first release of this runtime.
MiniCPMGR00TArgs = MiniCPMRobotArgs
MiniCPMGR00TRequest = MiniCPMRobotRequest


def cost(args: MiniCPMRobotArgs) -> MiniCPMRobotCost:
    """Return what a checkpoint costs by its sizes."""
    return MiniCPMRobotCost(args)
