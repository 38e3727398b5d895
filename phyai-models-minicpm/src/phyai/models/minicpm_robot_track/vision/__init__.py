"""The two vision towers of the tracker and the features it takes from them."""

from phyai.models.minicpm_robot_track.vision.checkpoint import (
    load_towers,
    tower_update_name,
)
from phyai.models.minicpm_robot_track.vision.dinov3 import DinoConfig, DinoTower
from phyai.models.minicpm_robot_track.vision.features import VisionTowers
from phyai.models.minicpm_robot_track.vision.pixels import PixelScale, resize
from phyai.models.minicpm_robot_track.vision.pooling import GridPool, pool_features
from phyai.models.minicpm_robot_track.vision.sizes import TowerSizes
from phyai.models.minicpm_robot_track.vision.tiny import write_tiny_towers

__all__ = [
    "DinoConfig",
    "DinoTower",
    "GridPool",
    "PixelScale",
    "TowerSizes",
    "VisionTowers",
    "load_towers",
    "pool_features",
    "resize",
    "tower_update_name",
    "write_tiny_towers",
]
