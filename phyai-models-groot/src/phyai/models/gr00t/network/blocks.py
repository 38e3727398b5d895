"""Parts both transformers of the head are made of: a feed-forward, norms without weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from phyai.layers import Linear, Placement

EPS = 1e-5
"""Of every layer norm of the head but the last."""


class Stream(NamedTuple):
    """Activations x [..., W] and what is still to be added to them, None = nothing.

    The sum is made together with the norm that reads it.
    """

    x: Tensor
    y: Tensor | None = None

    def total(self) -> Tensor:
        """Return the sum, for those who want it without the norm."""
        return self.x if self.y is None else self.x + self.y


class FeedForward(nn.Module):
    """fc2(gelu_tanh(fc1(x))) under the names ``<name>.net.0.proj`` and ``<name>.net.2``."""

    def __init__(self, name: str, width: int, at: Placement) -> None:
        super().__init__()
        self.fc1 = Linear(
            f"{name}.net.0.proj", width, 4 * width, at, bias=True, epilogue="gelu_tanh"
        )
        self.fc2 = Linear(f"{name}.net.2", 4 * width, width, at, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x))
        return out


class ModulatedLayerNorm(nn.Module):
    """n = LN(s) * (1 + scale) + shift of s = x + y; no weights of its own.

    A module, so that what listens to a model's leaves hears it.
    """

    one: Tensor

    def __init__(self, width: int, eps: float, at: Placement) -> None:
        super().__init__()
        self.eps = eps
        # The residual has no gate here: a gate of one changes no bit.
        self.register_buffer("one", torch.ones(width, device=at.device), persistent=False)
        self._norm = at.select("ada_layer_norm", width=width)
        self._add_norm = at.select("gated_ada_layer_norm", width=width)

    def forward(self, stream: Stream, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return s and n [B, T, W]; scale, shift float32 [W]."""
        if stream.y is None:
            return stream.x, self._norm(stream.x, scale, shift, self.eps)
        out: tuple[Tensor, Tensor] = self._add_norm(
            stream.x, stream.y, self.one, scale, shift, self.eps
        )
        return out


class BareLayerNorm(nn.Module):
    """n = LN(s) of s = x + y, neither scaled nor shifted."""

    zero: Tensor

    def __init__(self, width: int, eps: float, at: Placement) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros(width, device=at.device), persistent=False)
        self.norm = ModulatedLayerNorm(width, eps, at)

    def forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return s and n [B, T, W]."""
        out: tuple[Tensor, Tensor] = self.norm(stream, self.zero, self.zero)
        return out
