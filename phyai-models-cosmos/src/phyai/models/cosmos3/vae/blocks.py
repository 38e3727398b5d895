"""What encoder and decoder are built of: residual blocks, and attention within a frame."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.layers import Placement
from phyai.models.cosmos3.vae.convs import CausalConv, Flat, FrameConv
from phyai.models.cosmos3.vae.history import History
from phyai.weights import claim

_TINIEST_NORM = 1e-12


class ChannelNorm(nn.Module):
    """y = x / max(|x|, 1e-12) * sqrt(C) * gamma over the channels of a pixel, in float32.

    trailing: dims of size one behind the channels in the file.
    Shapes: x [N, C, H, W] channels-last -> the same.
    """

    def __init__(self, name: str, width: int, at: Placement, *, trailing: int = 3) -> None:
        super().__init__()
        self.gamma = claim(
            at.parameter(width, dtype=torch.float32),
            f"{name}.gamma",
            loader=Flat(trailing),
        )
        # |x|^2 is C times the mean square; the floor only keeps a pixel of zeros from 0 / 0.
        self._eps = _TINIEST_NORM**2 / width
        self._norm = at.select("rms_norm", width=width)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x).permute(0, 3, 1, 2)

    def rows(self, x: Tensor) -> Tensor:
        """Return the norm as [N, H, W, C]."""
        pixels = x.permute(0, 2, 3, 1).contiguous()
        out: Tensor = self._norm(pixels, self.gamma, self._eps, offset=0.0)
        return out


class ResidualBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), the first x through a 1x1 where widths differ.

    Shapes: x [T * rows, in, H, W] -> [T * rows, out, H, W].
    """

    def __init__(self, name: str, into: int, out: int, at: Placement) -> None:
        super().__init__()
        self.norm1 = ChannelNorm(f"{name}.norm1", into, at)
        self.conv1 = CausalConv(f"{name}.conv1", into, out, at)
        self.norm2 = ChannelNorm(f"{name}.norm2", out, at)
        self.conv2 = CausalConv(f"{name}.conv2", out, out, at)
        self.shortcut: FrameConv | None = None
        if into != out:
            self.shortcut = FrameConv(
                f"{name}.conv_shortcut", into, out, at, side=1, over_time=True
            )

    def forward(self, x: Tensor, history: History) -> Tensor:
        y = self.conv1(functional.silu(self.norm1(x), inplace=True), history)
        y = self.conv2(functional.silu(self.norm2(y), inplace=True), history)
        out: Tensor = y.add_(x if self.shortcut is None else self.shortcut(x))
        return out


class FrameAttention(nn.Module):
    """x + attention of one head among the pixels of a frame.

    Shapes: x [N, C, H, W] -> the same.
    """

    def __init__(self, name: str, width: int, at: Placement) -> None:
        super().__init__()
        self.norm = ChannelNorm(f"{name}.norm", width, at, trailing=2)
        flat = Flat(2)
        self.qkv = claim(at.parameter(3 * width, width), f"{name}.to_qkv.weight", loader=flat)
        self.qkv_bias = claim(at.parameter(3 * width), f"{name}.to_qkv.bias")
        self.proj = claim(at.parameter(width, width), f"{name}.proj.weight", loader=flat)
        self.proj_bias = claim(at.parameter(width), f"{name}.proj.bias")

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm.rows(x)
        qkv = functional.linear(rows.flatten(1, 2), self.qkv, self.qkv_bias)
        q, k, v = qkv.unsqueeze(1).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v).squeeze(1)
        mixed = functional.linear(mixed, self.proj, self.proj_bias)
        return x + mixed.view(rows.shape).permute(0, 3, 1, 2)


class MiddleBlock(nn.Module):
    """Residual block, attention, residual block, at the coarsest level."""

    def __init__(self, name: str, width: int, at: Placement) -> None:
        super().__init__()
        self.before = ResidualBlock(f"{name}.resnets.0", width, width, at)
        self.attention = FrameAttention(f"{name}.attentions.0", width, at)
        self.after = ResidualBlock(f"{name}.resnets.1", width, width, at)

    def forward(self, x: Tensor, history: History) -> Tensor:
        x = self.attention(self.before(x, history))
        out: Tensor = self.after(x, history)
        return out
