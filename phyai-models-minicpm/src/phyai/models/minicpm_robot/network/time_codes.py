"""The integer time of each step and its two sinusoidal codes; they differ in order and spacing.

Both are computed on the CPU, with float32 roundings in the official order: angles reach 1000 rad,
where the same formula rounded otherwise is 5e-5 away. The exponential is rounded correctly, where
vector units differ between machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TIME_CHANNELS = 256
"""Width of the transformer's time code before its own two layers; the released one's."""

_MAX_PERIOD = 10000.0
_UNIFORM = 1e-6
"""How far a noise level may be from (N - k)/N to count as step k of the uniform grid."""


def step_times(sigmas: Sequence[float]) -> list[float]:
    """Return the official time of each step, 1 (noise) towards 0: its noise level.

    On the uniform grid of N steps it is (N - k)/N in Python floats, however sigma was rounded.

    >>> step_times([1.0, 0.6666666865348816, 0.3333333432674408])
    [1.0, 0.6666666666666666, 0.3333333333333333]
    """
    count = len(sigmas)
    uniform = [(count - k) / count for k in range(count)]
    if all(abs(a - b) < _UNIFORM for a, b in zip(uniform, sigmas, strict=True)):
        return uniform
    return [float(sigma) for sigma in sigmas]


def discretized(times: Sequence[float], buckets: int) -> list[int]:
    """Return the integer times: truncated, below ``buckets``.

    >>> discretized([1.0, 0.75, 0.5, 0.25], 1000)
    [999, 750, 500, 250]
    """
    return [min(int(buckets * t), buckets - 1) for t in times]


def action_code(times: Sequence[int], width: int) -> Tensor:
    """Return [N, width] float32 for the action encoder: sines, then cosines."""
    half = width // 2
    exponent = -torch.arange(half, dtype=torch.float32) * (
        torch.log(torch.tensor(_MAX_PERIOD)) / half
    )
    angles = torch.tensor(times, dtype=torch.float32)[:, None] * _exp(exponent)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def transformer_code(times: Sequence[int]) -> Tensor:
    """Return [N, TIME_CHANNELS] float32 for the transformer: cosines, then sines."""
    half = TIME_CHANNELS // 2
    exponent = -math.log(_MAX_PERIOD) * torch.arange(half, dtype=torch.float32) / (half - 1)
    angles = torch.tensor(times, dtype=torch.float32)[:, None] * _exp(exponent)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _exp(exponent: Tensor) -> Tensor:
    """Return e^exponent in float32, correctly rounded."""
    return exponent.double().exp().float()
