"""A source that looks at what it reads: a broken download is told, not computed with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.weights.tensor_source import Region, TensorInfo, TensorSource


class FiniteSource:
    """A source that refuses tensors with NaN or infinity.

    Results of such a checkpoint are NaN, or worse: wrong where a norm or a maximum hides it. Of a
    tensor that ranks share, each looks at what it reads.
    trusted: names that are not looked at.

    >>> import tempfile
    >>> from phyai.weights import FiniteSource, open_source, save_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = save_safetensors({"a": torch.ones(2)}, f"{folder}/model.safetensors")
    ...     FiniteSource(open_source(file)).read("a").tolist()
    [1.0, 1.0]
    """

    def __init__(self, inner: TensorSource, trusted: Collection[str] = ()) -> None:
        self.inner, self.trusted = inner, frozenset(trusted)
        self.stays_valid = getattr(inner, "stays_valid", False)

    @property
    def label(self) -> str:
        return self.inner.label

    def infos(self) -> Mapping[str, TensorInfo]:
        return self.inner.infos()

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return the tensor.  Raises: CheckpointError when it is not finite."""
        tensor = self.inner.read(name, region)
        if name not in self.trusted and not is_finite(tensor):
            raise CheckpointError(
                f"tensor {name!r} of {self.label} must be finite; got NaN or infinity. "
                "Download the checkpoint again."
            )
        return tensor


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity.

    One pass without a mask or a copy: NaN comes through, and an infinity is an extreme.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    try:
        low, high = torch.aminmax(tensor)
    except NotImplementedError:  # of types that torch stores but does not compare, as 8-bit floats
        low, high = torch.aminmax(tensor.float())
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))
