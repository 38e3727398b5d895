"""Layers of the sound decoder: weight-normalised convolutions and the periodic activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.layers import Placement
from phyai.weights import Loader, claim

_TINY = 1e-9


@dataclass(frozen=True)
class Direction(Loader):
    """The direction of a weight-normalised tensor; remembers that its length is not applied."""

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        param.copy_(tensor)
        attributes: Any = param
        attributes.has_length = False


class NormedWeight(nn.Module):
    """A weight stored as length and direction, w = g * v / |v|; combined in place after loading.

    The norm runs over all dims but the first. The file holds ``weight_g`` and ``weight_v``.
    Source: Salimans and Kingma, Weight Normalization (2016).
    """

    def __init__(self, name: str, shape: tuple[int, int, int], at: Placement) -> None:
        super().__init__()
        self.weight = claim(at.parameter(*shape), f"{name}.weight_v", loader=Direction())
        self.length = claim(at.parameter(shape[0], 1, 1, dtype=torch.float32), f"{name}.weight_g")
        self._applied: Tensor | None = None

    def post_load(self) -> None:
        """Give the weight its length; a new length alone rescales what is there."""
        attributes: Any = self.weight
        if self._applied is None or not getattr(self.weight, "has_length", False):
            norm = self.weight.float().flatten(1).norm(dim=1).view(self.length.shape)
            old = norm.clamp_min(torch.finfo(torch.float32).tiny)
        else:
            old = torch.where(self._applied == 0, torch.ones_like(self._applied), self._applied)
        self.weight.mul_(self.length / old)
        attributes.has_length = True
        self._applied = self.length.clone()


class SoundConv(nn.Module):
    """A 1-D convolution that keeps the length. Shapes: x [B, in, T] -> [B, out, T]."""

    def __init__(
        self,
        name: str,
        into: int,
        out: int,
        at: Placement,
        *,
        taps: int,
        dilation: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.dilation, self.padding = dilation, taps // 2 * dilation
        self.norm = NormedWeight(name, (out, into, taps), at)
        self.bias = claim(at.parameter(out), f"{name}.bias") if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv1d(
            x, self.norm.weight, self.bias, padding=self.padding, dilation=self.dilation
        )


class StretchConv(nn.Module):
    """A transposed convolution over time. Shapes: x [B, in, T] -> [B, out, stride * T]."""

    def __init__(self, name: str, into: int, out: int, stride: int, at: Placement) -> None:
        super().__init__()
        self.stride = stride
        # The first dim of a transposed convolution's weight is its input.
        self.norm = NormedWeight(name, (into, out, 2 * stride), at)
        self.bias = claim(at.parameter(out), f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        padding, rest = (self.stride + 1) // 2, self.stride % 2
        return functional.conv_transpose1d(
            x, self.norm.weight, self.bias, self.stride, padding, rest
        )


class SnakeBeta(nn.Module):
    """x + sin^2(exp(alpha) x) / (exp(beta) + 1e-9) per channel; the file holds the logarithms.

    Shapes: x [B, C, T] -> the same.
    Source: BigVGAN (arXiv 2206.04658), snake activation with a magnitude of its own.
    """

    def __init__(self, name: str, width: int, at: Placement) -> None:
        super().__init__()
        self.alpha = claim(at.parameter(1, width, 1, dtype=torch.float32), f"{name}.alpha")
        self.beta = claim(at.parameter(1, width, 1, dtype=torch.float32), f"{name}.beta")
        for buffer in ("frequency", "size"):
            self.register_buffer(buffer, at.parameter(1, width, 1).data, persistent=False)
        self.frequency: Tensor
        self.size: Tensor

    def post_load(self) -> None:
        """Turn the logarithms into factors, in place."""
        self.frequency.copy_(self.alpha.exp())
        self.size.copy_((self.beta.exp() + _TINY).reciprocal())

    def forward(self, x: Tensor) -> Tensor:
        wave = (x * self.frequency).sin_().square_().mul_(self.size)
        return wave.add_(x)
