"""Rotary tables with the two sets of factors a long-context checkpoint brings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phyai.models.minicpm_robot_track.config import BackboneSizes


def inverse_frequencies(sizes: BackboneSizes, *, long: bool = False) -> Tensor:
    """Return theta^(-2i / head_dim) / factor_i, float32 [head_dim / 2].

    >>> inverse_frequencies(BackboneSizes(head_dim=4, rope_theta=100.0)).tolist()
    [1.0, 0.10000000149011612]
    """
    even = torch.arange(0, sizes.head_dim, 2, dtype=torch.int64).float() / sizes.head_dim
    power = sizes.rope_theta**even
    factors = sizes.long_factor if long else sizes.short_factor
    if factors:
        power = torch.tensor(factors, dtype=torch.float32) * power
    return 1.0 / power


class RopeTables(nn.Module):
    """cos and sin by position, float32 [2 * positions, head_dim]: short factors, then long ones.

    Which of the two a row takes hangs on its own length, so it is part of the index.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: BackboneSizes, positions: int, device: torch.device) -> None:
        super().__init__()
        self.positions, self.original = positions, sizes.original_max_position_embeddings
        at = torch.arange(positions, dtype=torch.float32)[:, None]
        halves = [at * inverse_frequencies(sizes, long=long) for long in (False, True)]
        angles = torch.cat([torch.cat((half, half), dim=-1) for half in halves])
        scaling = sizes.attention_scaling
        self.register_buffer("cos", (angles.cos() * scaling).to(device), persistent=False)
        self.register_buffer("sin", (angles.sin() * scaling).to(device), persistent=False)

    def start(self, length: int) -> int:
        """Return the table row of position 0 for a sequence of ``length`` tokens."""
        return self.positions if length > self.original else 0

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of table rows, [M, head_dim] each."""
        return self.cos.index_select(0, index), self.sin.index_select(0, index)
