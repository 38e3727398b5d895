"""The time embedding: one row per solver step, float32 from end to end."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from phyai.layers import Placement, TableLinear
from phyai.models.cosmos3.config import Cosmos3Config

FEATURES = 256


def time_features(timesteps: Tensor, scale: float) -> Tensor:
    """Return [N, 256] float32: cosines first, then sines, of timestep * scale * w_i.

    timesteps [N]; w_i = 10000^(-i / 128).
    """
    half = FEATURES // 2
    exponents = -math.log(10_000) * torch.arange(half, dtype=torch.float32) / half
    angles = (timesteps.float() * scale)[:, None] * exponents.exp().to(timesteps.device)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class TimeEmbedding(nn.Module):
    """linear_2(silu(linear_1(features))) of integer timesteps; its results live in tables.

    Shapes: timesteps [N] -> float32 [N, hidden].
    """

    def __init__(self, config: Cosmos3Config, at: Placement) -> None:
        super().__init__()
        self.scale = config.timestep_scale
        name, width = "time_embedder", config.hidden_size
        self.linear_1 = TableLinear(f"{name}.linear_1", FEATURES, width, at)
        self.linear_2 = TableLinear(f"{name}.linear_2", width, width, at)
        self._silu = at.with_dtype(torch.float32).select("silu")

    def forward(self, timesteps: Tensor) -> Tensor:
        features = time_features(timesteps, self.scale)
        out: Tensor = self.linear_2(self._silu(self.linear_1(features)))
        return out
