"""Rotary tables of three position axes, interleaved, for whole and fractional positions."""

from __future__ import annotations

import torch
from torch import Tensor

from phyai.layers import Placement
from phyai.models.cosmos3.config import Cosmos3Config


class MRope:
    """cos and sin of tokens' positions; angles in float32, since positions begin at 15000.

    Frequency j turns with the row when j mod 3 is 1 and j < 3 * mrope_section[1], with the column
    when j mod 3 is 2 and j < 3 * mrope_section[2], else with the time.

    >>> import torch
    >>> from phyai.kernels import KernelTable
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.bfloat16)
    >>> cos, sin = MRope(Cosmos3Config(), at)(torch.zeros(3, 5))
    >>> cos.shape, cos.dtype
    (torch.Size([5, 128]), torch.bfloat16)
    """

    def __init__(self, config: Cosmos3Config, at: Placement) -> None:
        self.dtype = at.dtype
        half = config.head_dim // 2
        even = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        # On the CPU, whatever the device: one ulp of a frequency is 1e-3 of angle out there.
        frequencies = 1.0 / config.rope_theta ** (even / config.head_dim)
        axis_of = torch.zeros(half, dtype=torch.int64)
        for axis in (1, 2):
            axis_of[axis : 3 * config.mrope_section[axis] : 3] = axis
        self._frequencies = frequencies.to(at.device)
        self._axis_of = axis_of.to(at.device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [..., N, head_dim] of positions [..., 3, N] float32.

        Both halves of a table are equal: a head is rotated by halves.
        """
        turned = positions.transpose(-1, -2).index_select(-1, self._axis_of)
        angles = turned * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)
