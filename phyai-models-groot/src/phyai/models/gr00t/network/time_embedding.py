"""The two sinusoidal embeddings of a timestep bucket; they differ in order and in spacing.

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
"""Width of the transformer's time embedding before its own two layers; the released one's."""
_MAX_PERIOD = 10000.0
_UNIFORM = 1e-6
"""How far a noise level may be from k/N to count as step k of the uniform grid."""


def timestep_buckets(sigmas: Sequence[float], buckets: int) -> list[int]:
    """Return the integer time of each step, from 0 (noise) to ``buckets`` (data).

    Step k of the uniform grid of N steps has int(k / N * buckets), in Python floats; on any other
    grid it is the bucket that 1 - sigma is in.

    >>> timestep_buckets([1.0, 2 / 3, 1 / 3], 1000)
    [0, 333, 666]
    """
    count = len(sigmas)
    if all(abs(1.0 - k / count - sigma) < _UNIFORM for k, sigma in enumerate(sigmas)):
        return [int(k / count * buckets) for k in range(count)]
    return [int((1.0 - sigma) * buckets + _UNIFORM * buckets) for sigma in sigmas]


def action_time(times: Sequence[int], width: int) -> Tensor:
    """Return [N, width] float32 for the action encoder: sines, then cosines."""
    half = width // 2
    exponent = -torch.arange(half, dtype=torch.float32) * (
        torch.log(torch.tensor(_MAX_PERIOD)) / half
    )
    angles = torch.tensor(times, dtype=torch.float32)[:, None] * _exp(exponent)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def transformer_time(times: Sequence[int], width: int) -> Tensor:
    """Return [N, width] float32 for the diffusion transformer: cosines, then sines."""
    half = width // 2
    exponent = -math.log(_MAX_PERIOD) * torch.arange(half, dtype=torch.float32) / (half - 1)
    angles = torch.tensor(times, dtype=torch.float32)[:, None] * _exp(exponent)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _exp(exponent: Tensor) -> Tensor:
    """Return e^exponent in float32, correctly rounded."""
    return exponent.double().exp().float()
