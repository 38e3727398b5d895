"""What a loader reads from: named tensors whose dtype and shape are known before their data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits per element of every dtype name a safetensors header may hold."""

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
"""Header dtype name -> torch dtype, for those torch can hold."""

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_FLOATING = frozenset({"F16", "BF16", "F32", "F64"})


class Region(NamedTuple):
    """``length`` entries of dimension ``dim``, beginning at ``start``."""

    dim: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of one tensor. ``file`` and ``start`` say where its bytes are.

    >>> from phyai.weights import TensorInfo
    >>> TensorInfo("BF16", (4, 8), "model.safetensors").nbytes
    64
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors, readable one by one; ``load_pretrained`` takes any object of this shape.

    Optional attribute ``stays_valid`` (False): what ``read`` returns outlives the next ``read``.
    """

    @property
    def label(self) -> str:
        """What messages call this source."""
        ...

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return every name's info; reads headers only."""
        ...

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a CPU tensor, or the part ``region`` of it; valid until the next ``read``."""
        ...


def dtype_name(dtype: torch.dtype) -> str:
    """Return the header name of a torch dtype, or torch's own name when it has none."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def castable(source: str, target: str) -> bool:
    """Return whether values may change dtype on loading: equal, or both plain floating point."""
    return source == target or (source in _FLOATING and target in _FLOATING)
