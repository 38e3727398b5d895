"""Reading checkpoints: convolutions that become matrices."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from phyai.weights import Loader


@dataclass(frozen=True)
class PatchWeight(Loader):
    """A convolution's weight [out, C, p, p] as a matrix [out, C * p * p].

    kernel: (C, p, p).

    >>> import torch
    >>> PatchWeight((3, 14, 14)).shape(torch.empty(8, 588), None)
    (8, 3, 14, 14)
    """

    kernel: tuple[int, ...]

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        return (param.shape[0], *self.kernel)

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        param.copy_(tensor.reshape(param.shape))
