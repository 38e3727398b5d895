"""Folded pixels to latent moments, one chunk of frames at a time."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from phyai.layers import Placement
from phyai.models.cosmos3.vae.blocks import ChannelNorm, MiddleBlock, ResidualBlock
from phyai.models.cosmos3.vae.config import VAEConfig
from phyai.models.cosmos3.vae.convs import CausalConv, FrameConv
from phyai.models.cosmos3.vae.history import History
from phyai.models.cosmos3.vae.resampling import Downsampler, FoldingShortcut


class DownLevel(nn.Module):
    """Residual blocks, a step down, and a shortcut past both. in_time: None = no step down."""

    def __init__(
        self, name: str, into: int, out: int, blocks: int, at: Placement, in_time: bool | None
    ) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            ResidualBlock(f"{name}.resnets.{i}", into if i == 0 else out, out, at)
            for i in range(blocks)
        )
        self.downsampler: Downsampler | None = None
        if in_time is not None:
            self.downsampler = Downsampler(f"{name}.downsampler", out, at, in_time=in_time)
        self.shortcut = FoldingShortcut(
            out, time=2 if in_time else 1, space=1 if in_time is None else 2
        )

    def forward(self, x: Tensor, history: History) -> Tensor:
        y = x
        for block in self.resnets:
            y = block(y, history)
        if self.downsampler is not None:
            y = self.downsampler(y, history)
        out: Tensor = y + self.shortcut(x, history)
        return out


class Encoder(nn.Module):
    """Chunks [T * rows, in_channels, H, W] -> moments [T' * rows, 2 * z_dim, h, w].

    The first chunk is one frame, every other one a multiple of ``scale_factor_temporal``.
    """

    def __init__(self, config: VAEConfig, at: Placement) -> None:
        super().__init__()
        widths, moments = config.encoder_widths, 2 * config.z_dim
        steps = (*config.temperal_downsample, None)
        self.conv_in = CausalConv("encoder.conv_in", config.in_channels, widths[0], at)
        self.levels = nn.ModuleList(
            DownLevel(f"encoder.down_blocks.{i}", into, out, config.num_res_blocks, at, steps[i])
            for i, (into, out) in enumerate(pairwise(widths))
        )
        self.middle = MiddleBlock("encoder.mid_block", widths[-1], at)
        self.norm_out = ChannelNorm("encoder.norm_out", widths[-1], at)
        self.conv_out = CausalConv("encoder.conv_out", widths[-1], moments, at)
        self.quant_conv = FrameConv("quant_conv", moments, moments, at, side=1, over_time=True)

    def forward(self, x: Tensor, history: History) -> Tensor:
        x = self.conv_in(x, history)
        for level in self.levels:
            x = level(x, history)
        x = self.middle(x, history)
        x = self.conv_out(functional.silu(self.norm_out(x), inplace=True), history)
        history.first = False
        out: Tensor = self.quant_conv(x)
        return out
