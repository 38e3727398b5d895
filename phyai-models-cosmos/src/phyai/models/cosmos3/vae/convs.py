"""Convolutions over stacked frames: 2-D ones per frame, and causal ones over time.

A causal 3-D convolution is computed as one 2-D convolution per kernel slice in time. Frames lie in
front of rows, so the frames a slice reads are a view; slices that would only see the zeros in
front of a clip are left out. Activations and weights are channels-last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.layers import Placement
from phyai.models.cosmos3.vae.history import History
from phyai.weights import Loader, claim


@dataclass(frozen=True)
class ChannelsLast(Loader):
    """A convolution weight [O, I, (T,) H, W] as [(T,) O, H, W, I]. stored: dims in the file."""

    stored: int

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        if param.dim() == 5:
            taps, out, height, width, into = param.shape
            return out, into, taps, height, width
        out, height, width, into = param.shape
        sides = (height, width)
        return (out, into, *(1,) * (self.stored - 4), *sides)

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        if param.dim() == 5:
            param.copy_(tensor.permute(2, 0, 3, 4, 1))
        else:
            weight = tensor if tensor.dim() == 4 else tensor.squeeze(2)
            param.copy_(weight.permute(0, 2, 3, 1))


@dataclass(frozen=True)
class Flat(Loader):
    """A vector or matrix that the file stores with trailing dims of size one."""

    trailing: int

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        return (*param.shape, *(1,) * self.trailing)

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        param.copy_(tensor.view(param.shape))


class FrameConv(nn.Module):
    """A 2-D convolution of every frame. over_time: the file stores it with a time dim of one.

    Shapes: x [N, in, H, W] -> [N, out, H', W'], channels-last.
    """

    def __init__(
        self,
        name: str,
        into: int,
        out: int,
        at: Placement,
        *,
        side: int = 3,
        stride: int = 1,
        padding: int = 0,
        over_time: bool = False,
    ) -> None:
        super().__init__()
        self.stride, self.padding = stride, padding
        loader = ChannelsLast(5 if over_time else 4)
        self.weight = claim(at.parameter(out, side, side, into), f"{name}.weight", loader=loader)
        self.bias = claim(at.parameter(out), f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.permute(0, 3, 1, 2)
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding)


class CausalConv(nn.Module):
    """A convolution over three frames, the last of which is the current one.

    side: of its kernel within a frame.  Before the first chunk a layer has seen only zeros.
    Shapes: x [T * rows, in, H, W] -> [T * rows, out, H, W], channels-last.
    Source: Wan2.2 (arXiv 2503.20314), causal 3-D convolution with feature cache.
    """

    TAPS = 3

    def __init__(self, name: str, into: int, out: int, at: Placement, *, side: int = 3) -> None:
        super().__init__()
        self.padding = side // 2
        self.weight = claim(
            at.parameter(self.TAPS, out, side, side, into),
            f"{name}.weight",
            loader=ChannelsLast(5),
        )
        self.bias = claim(at.parameter(out), f"{name}.bias")

    def forward(self, x: Tensor, history: History) -> Tensor:
        number = x.shape[0]
        seen = history.join(self, x, keep=self.TAPS - 1)
        y = self._tap(seen[-number:], -1, self.bias)
        for lag in range(1, self.TAPS):
            end = seen.shape[0] - lag * history.rows
            used = min(number, end)
            if used > 0:
                y[number - used :] += self._tap(seen[end - used : end], -1 - lag, None)
        return y

    def _tap(self, frames: Tensor, index: int, bias: Tensor | None) -> Tensor:
        weight = self.weight[index].permute(0, 3, 1, 2)
        return functional.conv2d(frames, weight, bias, 1, self.padding)


class HalvingConv(nn.Module):
    """Every second frame from three: the last one of the previous chunk and those of this one.

    Shapes: x [T * rows, C, H, W], T even -> [T / 2 * rows, C, H, W]. The first chunk, one frame,
    passes unchanged.
    """

    def __init__(self, name: str, width: int, at: Placement) -> None:
        super().__init__()
        self.weight = claim(
            at.parameter(CausalConv.TAPS, width, 1, 1, width),
            f"{name}.weight",
            loader=ChannelsLast(5),
        )
        self.bias = claim(at.parameter(width), f"{name}.bias")

    def forward(self, x: Tensor, history: History) -> Tensor:
        seen = history.join(self, x, keep=1)
        if history.first:
            return x
        number = x.shape[0] // history.rows // 2
        by_time = seen.view(-1, history.rows, *seen.shape[1:])
        total: Tensor | None = None
        for tap in range(CausalConv.TAPS):
            frames = by_time[tap : tap + 2 * number - 1 : 2].flatten(0, 1)
            frames = frames.contiguous(memory_format=torch.channels_last)
            weight = self.weight[tap].permute(0, 3, 1, 2)
            part = functional.conv2d(frames, weight, self.bias if total is None else None)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total
