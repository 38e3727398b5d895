"""Everything in front of the diffusion transformer: vision tower, language layers, VL attention.

Only valid tokens are computed (see ``plan``); the images of all rows go through the tower as one
batch. The features are the output of the last language layer there is, before the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phyai.backbones.qwen3_vl import TextStack, VisionTower, rope_tables, text_positions
from phyai.cache import Cache
from phyai.layers import Placement
from phyai.models.gr00t.checkpoint import LANGUAGE, VISION
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.network.plan import BatchPlan, RowShape, plan_batch
from phyai.models.gr00t.network.vl import VLProjection
from phyai.timers import Profile
from phyai.types import BufferSpec, Prepared
