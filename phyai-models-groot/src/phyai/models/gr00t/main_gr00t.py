"""GR00T N1.7: the names its plugin module and its users import."""

from __future__ import annotations

from phyai.models.gr00t.adapter import GrootAdapter
from phyai.models.gr00t.args import GrootArgs
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.cost import GrootCost
from phyai.models.gr00t.request import GrootRequest

__all__ = ["GrootAdapter", "GrootArgs", "GrootConfig", "GrootRequest", "cost"]


def cost(args: GrootArgs) -> GrootCost:
    """Return what a checkpoint costs by its sizes."""
    return GrootCost(args)
