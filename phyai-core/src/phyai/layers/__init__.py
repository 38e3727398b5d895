"""Building blocks of networks: thin modules around the kernel table."""

from phyai.layers.linear import Linear
from phyai.layers.norm import LayerNorm, RMSNorm, RotatedHeadNorm, norm_op
from phyai.layers.parallel import (
    ColumnLinear,
    QKVLinear,
    RowLinear,
    VocabParallelEmbedding,
)
from phyai.layers.placement import Placement
from phyai.layers.table_linear import TableLinear
from phyai.layers.vision import VisionConfig, VisionTower

__all__ = [
    "ColumnLinear",
    "LayerNorm",
    "Linear",
    "Placement",
    "QKVLinear",
    "RMSNorm",
    "RotatedHeadNorm",
    "RowLinear",
    "TableLinear",
    "VisionConfig",
    "VisionTower",
    "VocabParallelEmbedding",
    "norm_op",
]
