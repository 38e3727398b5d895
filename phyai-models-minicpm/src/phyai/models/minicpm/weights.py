"""Reading checkpoints: renaming, a look at every value, convolutions that become matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.weights import Loader, Region, Remap, TensorInfo, TensorSource


def remapper(remap: Remap) -> Callable[[str], str | None]:
    """Return the caller's own renaming of stored tensors as a function.

    >>> remapper({"policy.": ""})("policy.norm.weight")
    'norm.weight'
    """
    if callable(remap):
        return remap
    pairs = tuple(remap.items()) if remap is not None else ()

    def replace(name: str) -> str:
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    return replace


class FiniteSource:
    """A source that refuses tensors with NaN or infinity, such as those of a broken download.

    Actions of such a checkpoint are NaN, or worse: wrong where a norm or a maximum hides it.
    trusted: names that are not looked at.

    >>> import tempfile
    >>> from phyai.weights import open_source, save_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = save_safetensors({"a": torch.ones(2)}, f"{folder}/model.safetensors")
    ...     FiniteSource(open_source(file)).read("a").tolist()
    [1.0, 1.0]
    """

    def __init__(self, inner: TensorSource, trusted: frozenset[str] | None = None) -> None:
        self.inner, self.trusted = inner, trusted or frozenset()
        self.stays_valid = getattr(inner, "stays_valid", False)

    @property
    def label(self) -> str:
        return self.inner.label

    def infos(self) -> Mapping[str, TensorInfo]:
        return self.inner.infos()

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return the tensor; CheckpointError when it is not finite."""
        tensor = self.inner.read(name, region)
        if name in self.trusted or not tensor.is_floating_point():
            return tensor
        # One pass without a mask: a sum is finite exactly when no entry is NaN or infinite.
        if not bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
            raise CheckpointError(
                f"tensor {name!r} of {self.label} must be finite; got NaN or infinity. "
                "Download the checkpoint again."
            )
        return tensor


@dataclass(frozen=True)
class PatchWeight(Loader):
    """A convolution's weight [out, C, p, p] as a matrix [out, C * p * p].

    kernel: (C, p, p).

    >>> PatchWeight((3, 14, 14)).shape(torch.empty(8, 588), None)
    (8, 3, 14, 14)
    """

    kernel: tuple[int, ...]

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        return (param.shape[0], *self.kernel)

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        param.copy_(tensor.reshape(param.shape))
