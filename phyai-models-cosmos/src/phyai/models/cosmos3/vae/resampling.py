"""Steps between the levels, and the shortcuts past them that only move numbers around."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.layers import Placement
from phyai.models.cosmos3.vae.convs import CausalConv, FrameConv, HalvingConv
from phyai.models.cosmos3.vae.history import History


class Downsampler(nn.Module):
    """Halves height and width, then time if asked to.

    Shapes: x [T * rows, C, H, W] -> [T' * rows, C, H/2, W/2]; T' = T/2 with ``in_time``, but 1 for
    the first chunk.
    """

    def __init__(self, name: str, width: int, at: Placement, *, in_time: bool) -> None:
        super().__init__()
        self.conv = FrameConv(f"{name}.resample.1", width, width, at, stride=2)
        self.time_conv = HalvingConv(f"{name}.time_conv", width, at) if in_time else None

    def forward(self, x: Tensor, history: History) -> Tensor:
        x = self.conv(functional.pad(x, (0, 1, 0, 1)))
        return x if self.time_conv is None else self.time_conv(x, history)


class Upsampler(nn.Module):
    """Doubles time if asked to, then height and width.

    Shapes: x [T * rows, C, H, W] -> [T' * rows, C, 2H, 2W]; T' = 2T with ``in_time``, but 1 for
    the first chunk, which the temporal convolution does not see.
    """

    def __init__(self, name: str, width: int, at: Placement, *, in_time: bool) -> None:
        super().__init__()
        self.time_conv: CausalConv | None = None
        if in_time:
            self.time_conv = CausalConv(f"{name}.time_conv", width, 2 * width, at, side=1)
        self.conv = FrameConv(f"{name}.resample.1", width, width, at, padding=1)

    def forward(self, x: Tensor, history: History) -> Tensor:
        if self.time_conv is not None and not history.first:
            x = self._doubled(self.time_conv(x, history), history.rows)
        x = functional.interpolate(x, scale_factor=2, mode="nearest")
        out: Tensor = self.conv(x)
        return out

    @staticmethod
    def _doubled(pairs: Tensor, rows: int) -> Tensor:
        """[T * rows, 2C, H, W], the earlier frame's channels first -> [2T * rows, C, H, W]."""
        frames, channels, height, width = pairs.shape
        split = pairs.permute(0, 2, 3, 1).reshape(
            frames // rows, rows, height, width, 2, channels // 2
        )
        return _channels_last(split.permute(0, 4, 1, 2, 3, 5), channels // 2, height, width)


class FoldingShortcut(nn.Module):
    """Folds ``time`` frames and ``space`` x ``space`` pixels into channels; averages down to out.

    Channels are ordered (channel, time, row, column). A first chunk gets zero frames in front.
    Shapes: x [T * rows, in, H, W] -> [ceil(T/time) * rows, out, H/space, W/space].
    Source: DC-AE (arXiv 2410.10733), non-parametric shortcut.
    """

    def __init__(self, out: int, *, time: int, space: int) -> None:
        super().__init__()
        self.out, self.time, self.space = out, time, space

    def forward(self, x: Tensor, history: History) -> Tensor:
        rows, time, space = history.rows, self.time, self.space
        frames, channels, height, width = x.shape
        if time == space == 1 and channels == self.out:
            return x
        missing = -(frames // rows) % time * rows
        if missing:
            x = torch.cat([x.new_zeros(missing, channels, height, width), x])
        height, width = height // space, width // space
        folded = x.view(-1, time, rows, channels, height, space, width, space)
        group = channels * time * space * space // self.out
        groups = folded.permute(0, 2, 4, 6, 3, 1, 5, 7).reshape(-1, height, width, self.out, group)
        return groups.mean(-1).permute(0, 3, 1, 2)


class SpreadingShortcut(nn.Module):
    """Repeats channels and spreads them over ``time`` frames and ``space`` x ``space`` pixels.

    The inverse order of FoldingShortcut. Of a first chunk only the last frame remains.
    Shapes: x [T * rows, in, H, W] -> [T * time * rows, out, H * space, W * space].
    """

    def __init__(self, out: int, *, time: int, space: int) -> None:
        super().__init__()
        self.out, self.time, self.space = out, time, space

    def forward(self, x: Tensor, history: History) -> Tensor:
        rows, time, space = history.rows, self.time, self.space
        frames, channels, height, width = x.shape
        repeats = self.out * time * space * space // channels
        repeated = x.repeat_interleave(repeats, dim=1)
        spread = repeated.view(frames // rows, rows, self.out, time, space, space, height, width)
        if history.first:
            spread = spread[:, :, :, -1:]
        # (frames, rows, out, time, row, column, H, W) -> time and pixels side by side, out last
        spread = spread.permute(0, 3, 1, 6, 4, 7, 5, 2)
        return _channels_last(spread, self.out, height * space, width * space)


def _channels_last(pixels: Tensor, channels: int, height: int, width: int) -> Tensor:
    """[..., channels] in the order of frames, rows and pixels -> [N, channels, H, W]."""
    return pixels.reshape(-1, height, width, channels).permute(0, 3, 1, 2)
