"""Random tensors of the presets: each from its own name, in any order, on any machine."""

from __future__ import annotations

import hashlib
import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float32]


class Draw:
    """Collects named random tensors.

    seed: a text; another one gives other numbers under the same names.

    >>> Draw("a").weight("x.weight", (2, 3)).shape
    (2, 3)
    """

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.tensors: dict[str, Array] = {}

    def weight(self, name: str, shape: tuple[int, ...], gain: float = 1.0) -> Array:
        """Add a matrix or kernel [out, in, ...] whose outputs are about ``gain`` as large."""
        fan_in = math.prod(shape[1:]) or 1
        return self._keep(name, self._normal(name, shape) * gain / math.sqrt(fan_in))

    def bias(self, name: str, shape: tuple[int, ...]) -> Array:
        """Add small numbers around 0."""
        return self._keep(name, self._normal(name, shape) * 0.05)

    def norm(self, name: str, shape: tuple[int, ...]) -> Array:
        """Add factors around 1."""
        return self._keep(name, 1.0 + 0.1 * self._normal(name, shape))

    def linear(self, name: str, out: int, fan_in: int, *, bias: bool = True) -> None:
        """Add a linear layer's weight, and its bias."""
        self.weight(f"{name}.weight", (out, fan_in))
        if bias:
            self.bias(f"{name}.bias", (out,))

    def conv(self, name: str, shape: tuple[int, ...]) -> None:
        """Add a convolution's weight [out, in, ...] and its bias."""
        self.weight(f"{name}.weight", shape)
        self.bias(f"{name}.bias", shape[:1])

    def _normal(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        random = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        return random.standard_normal(shape)

    def _keep(self, name: str, values: NDArray[np.float64]) -> Array:
        self.tensors[name] = np.ascontiguousarray(values, dtype=np.float32)
        return self.tensors[name]
