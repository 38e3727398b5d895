"""Latents to folded pixels, one latent frame at a time."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from phyai.layers import Placement
from phyai.models.cosmos3.vae.blocks import ChannelNorm, MiddleBlock, ResidualBlock
from phyai.models.cosmos3.vae.config import VAEConfig
from phyai.models.cosmos3.vae.convs import CausalConv, FrameConv
from phyai.models.cosmos3.vae.history import History
from phyai.models.cosmos3.vae.resampling import SpreadingShortcut, Upsampler


class UpLevel(nn.Module):
    """Residual blocks and a step up, with a shortcut past both. in_time: None = neither."""

    def __init__(
        self, name: str, into: int, out: int, blocks: int, at: Placement, in_time: bool | None
    ) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            ResidualBlock(f"{name}.resnets.{i}", into if i == 0 else out, out, at)
            for i in range(blocks)
        )
        self.upsampler: Upsampler | None = None
        self.shortcut: SpreadingShortcut | None = None
        if in_time is not None:
            self.upsampler = Upsampler(f"{name}.upsampler", out, at, in_time=in_time)
            self.shortcut = SpreadingShortcut(out, time=2 if in_time else 1, space=2)

    def forward(self, x: Tensor, history: History) -> Tensor:
        y = x
        for block in self.resnets:
            y = block(y, history)
        if self.upsampler is not None and self.shortcut is not None:
            y = self.upsampler(y, history).add_(self.shortcut(x, history))
        return y


class Decoder(nn.Module):
    """Latents [T * rows, z_dim, h, w] -> folded pixels [T' * rows, out_channels, H, W].

    The first chunk is one frame and stays one; of later ones each frame becomes
    ``scale_factor_temporal``.
    """

    def __init__(self, config: VAEConfig, at: Placement) -> None:
        super().__init__()
        widths, latent = config.decoder_widths, config.z_dim
        steps = (*reversed(config.temperal_downsample), None)
        self.post_quant_conv = FrameConv(
            "post_quant_conv", latent, latent, at, side=1, over_time=True
        )
        self.conv_in = CausalConv("decoder.conv_in", latent, widths[0], at)
        self.middle = MiddleBlock("decoder.mid_block", widths[0], at)
        self.levels = nn.ModuleList(
            UpLevel(f"decoder.up_blocks.{i}", into, out, config.num_res_blocks + 1, at, steps[i])
            for i, (into, out) in enumerate(pairwise(widths))
        )
        self.norm_out = ChannelNorm("decoder.norm_out", widths[-1], at)
        self.conv_out = CausalConv("decoder.conv_out", widths[-1], config.out_channels, at)

    def forward(self, x: Tensor, history: History) -> Tensor:
        x = self.middle(self.conv_in(self.post_quant_conv(x), history), history)
        for level in self.levels:
            x = level(x, history)
        out: Tensor = self.conv_out(functional.silu(self.norm_out(x), inplace=True), history)
        history.first = False
        return out
