"""The ranks of one replica: their mesh, the groups along its axes, and how heads are shared out."""

from phyai.parallel.checks import check_axes
from phyai.parallel.groups import SOLE, Group, Traffic
from phyai.parallel.heads import HeadShards
from phyai.parallel.mesh import AXES, Mesh
from phyai.parallel.service import ParallelService

__all__ = [
    "AXES",
    "SOLE",
    "Group",
    "HeadShards",
    "Mesh",
    "ParallelService",
    "Traffic",
    "check_axes",
]
