"""Vision features -> tokens of the decoder's width, and the markers that say when a frame was."""

from __future__ import annotations

from torch import Tensor, nn

from phyai.layers import LayerNorm, Linear, Placement
from phyai.models.minicpm_robot_track.config import MiniCPMRobotTrackConfig
from phyai.weights import claim

EPS = 1e-5


class VisionProjector(nn.Module):
    """fc2(gelu(fc1(LN(features)))), float32. Shapes: [..., features] -> [..., W]."""

    def __init__(self, name: str, features: int, width: int, at: Placement) -> None:
        super().__init__()
        self.norm = LayerNorm(f"{name}.layers.0", features, EPS, at)
        self.fc1 = Linear(f"{name}.layers.1", features, width, at, bias=True, epilogue="gelu_erf")
        self.fc2 = Linear(f"{name}.layers.3", width, width, at, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(self.norm(features)))
        return out


class TemporalMarkers(nn.Module):
    """One marker token per frame: its time, its stream (0 history, 1 current), its camera."""

    def __init__(self, name: str, config: MiniCPMRobotTrackConfig, at: Placement) -> None:
        super().__init__()
        width = config.backbone.hidden_size
        for part, rows in (
            ("time_embedding", config.max_time_steps),
            ("stream_embedding", 2),
            ("camera_embedding", 1),
        ):
            table = claim(at.parameter(rows, width), f"{name}.{part}.weight")
            self.register_parameter(part, table)

    def forward(self, times: Tensor, stream: int) -> Tensor:
        """Return markers [B, N, W] of time indices int64 [B, N]."""
        time = nn.functional.embedding(times, self.time_embedding)  # type: ignore[arg-type]
        out: Tensor = time + self.stream_embedding[stream] + self.camera_embedding[0]  # type: ignore[index]
        return out
