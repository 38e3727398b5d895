"""What the denoisers share: action heads, expert, and tables that depend on weights and grid."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Linear, Placement
from phyai.models.pi.config import PiConfig
from phyai.models.pi.network.expert import Expert
from phyai.models.pi.network.precision import Precision
from phyai.models.pi.network.segment import Segment
from phyai.models.pi.network.time_embedding import time_embedding
from phyai.timers import Profile
from phyai.types import BufferSpec, Grid, Prediction, Step

Tables = dict[str, Tensor]


class PiDenoiser(nn.Module):
    """Velocity of the action leaf [B, T, A] float32 from the prefix K/V in the cache.

    tables: per grid, everything that depends only on weights and noise levels; row k belongs to
    step k, the last row to sigma 0 (tokens that are already clean).
    """

    prediction: Prediction = "velocity"
    capture_safe = True
    approximate = False
    adaptive = False
    state_tokens = 0

    def __init__(
        self, config: PiConfig, precision: Precision, at: Placement, profile: Profile
    ) -> None:
        super().__init__()
        self.config, self.profile = config, profile
        self.heads = at.with_dtype(torch.float32).with_role("heads")
        stack = at.with_dtype(precision.stack).with_role("expert", config.chunk_size)
        width = config.expert.hidden_size
        self.expert = Expert(
            config.expert, stack, adaptive=self.adaptive, split_kv=self.state_tokens > 0
        )
        self.action_in = Linear(
            "action_in_proj", config.max_action_dim, width, self.heads, bias=True
        )
        self.action_out = Linear(
            "action_out_proj", width, config.max_action_dim, self.heads, bias=True
        )
        self.actions = Segment(
            "suffix",
            self.state_tokens,
            config.chunk_size,
            config.expert,
            stack,
            precision.rope_freq,
        )
        self.tables: dict[tuple[float, ...], Tables] = {}
        self._silu = self.heads.select("silu")

    def cache_buffers(self, stride: int) -> Mapping[str, BufferSpec]:
        return self.actions.cache_buffers(stride)

    def encode(self, cache: Cache) -> None:
        """Fill what the steps need besides the prefix K/V; once per request."""
        self.actions.encode(cache)

    def prepare_grid(self, grid: Grid) -> None:
        """Build the tables of a new grid; several caches of one grid share them."""
        sigmas = grid[0].grid
        if sigmas not in self.tables:
            self.tables[sigmas] = self._fresh_tables(sigmas)

    def release_grid(self, grid: Grid) -> None:
        """Drop the tables of a grid: num_steps is a request's choice, so they would pile up."""
        self.tables.pop(grid[0].grid, None)

    def refresh(self) -> None:
        """Rewrite every grid's tables in place, after a weight update."""
        for sigmas, tables in self.tables.items():
            for name, fresh in self._fresh_tables(sigmas).items():
                tables[name].copy_(fresh)

    def _fresh_tables(self, sigmas: tuple[float, ...]) -> Tables:
        device = self.action_in.weight.device
        with torch.no_grad():
            levels = torch.tensor([*sigmas, 0.0], dtype=torch.float32, device=device)
            embedding = time_embedding(
                levels,
                self.config.expert.hidden_size,
                self.config.min_period,
                self.config.max_period,
            )
            self.profile.count("time_table_rows", embedding.shape[0])
            self.profile.count("time_table_builds")
            return self.build_tables(embedding)

    @abstractmethod
    def build_tables(self, embedding: Tensor) -> Tables:
        """Return tables from the time embedding [N+1, W] float32; rows as in ``tables``."""

    def record_step(self, name: str, step: Step, value: Tensor, cache: Cache) -> None:
        """Put a tensor of the first step into the recorder."""
        if step.index == 0:
            self.profile.recorder.put(f"step0.{name}", value[: cache.rows])
