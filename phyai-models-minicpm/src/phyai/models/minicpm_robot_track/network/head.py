"""The trajectory head: control state -> waypoints, float32 in every precision."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import LayerNorm, Linear, Placement
from phyai.models.minicpm_robot_track.config import MiniCPMRobotTrackConfig
from phyai.models.minicpm_robot_track.network.vision_tokens import EPS
from phyai.timers import Profile
from phyai.types import Prediction, Step

if TYPE_CHECKING:
    from phyai.types import Tensors

NAME = "trajectory_head"


class TrajectoryHead(nn.Module):
    """The denoiser: one call predicts the waypoints themselves, in metres and radians.

    Checkpoint names count the activations and dropouts between the layers, too.
    """

    prediction: Prediction = "clean"
    scale: Tensor

    def __init__(self, config: MiniCPMRobotTrackConfig, at: Placement, profile: Profile) -> None:
        super().__init__()
        self.config, self.profile = config, profile
        widths = [config.backbone.hidden_size, *config.trajectory_hidden_dims]
        self.norm_in = LayerNorm(f"{NAME}.layers.0", widths[0], EPS, at)
        self.hidden = nn.ModuleList(
            Linear(f"{NAME}.layers.{1 + 3 * i}", into, out, at, bias=True, epilogue="gelu_erf")
            for i, (into, out) in enumerate(pairwise(widths))
        )
        behind = 1 + 3 * len(self.hidden)
        self.norm_out = LayerNorm(f"{NAME}.layers.{behind}", widths[-1], EPS, at)
        outputs = config.num_waypoints * config.action_dim
        self.out = Linear(f"{NAME}.layers.{behind + 1}", widths[-1], outputs, at, bias=True)
        scale = torch.tensor(config.output_scale, device=at.device)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        """Return {"action": waypoints [B, waypoints, 3]}; x holds no information."""
        raw = self.trajectory(cache["control"])
        trajectory = raw * self.scale
        if self.profile.recorder.active:
            self.profile.recorder.put("trajectory_head", raw[: cache.rows])
            self.profile.recorder.put("trajectory", trajectory[: cache.rows])
        return {"action": trajectory}

    def trajectory(self, control: Tensor) -> Tensor:
        """Return the head's own output [B, waypoints, 3] of control states [B, W]."""
        h = self.norm_in(control)
        for layer in self.hidden:
            h = layer(h)
        out: Tensor = self.out(self.norm_out(h))
        if self.config.use_tanh_actions:
            out = torch.tanh(out)
        return out.view(-1, self.config.num_waypoints, self.config.action_dim)
