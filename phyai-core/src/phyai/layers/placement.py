"""Where a module's parameters live, in which dtype, and which kernels it uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from phyai.kernels import KernelTable


@dataclass(frozen=True)
class Placement:
    """Device, dtype and kernel table handed to every layer at construction.

    rounding: ``official`` keeps the rounding points of the official implementations in low
    precision, ``free`` lets a kernel keep more bits between them.
    role: the part of the model, such as ``vision``; kernel policies may ask for it.

    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.bfloat16)
    >>> at.with_dtype(torch.float32).parameter(2, 3).dtype
    torch.float32
    """

    kernels: KernelTable
    device: torch.device
    dtype: torch.dtype
    rounding: str = "official"
    role: str = ""

    def with_dtype(self, dtype: torch.dtype) -> Placement:
        return replace(self, dtype=dtype)

    def with_role(self, role: str) -> Placement:
        return replace(self, role=role)

    def select(self, op: str, **facts: Any) -> Callable[..., Any]:
        """Return the implementation of ``op`` for this place; decided once, at construction."""
        if self.role:
            facts = {"role": self.role, **facts}
        return self.kernels.select(
            op, device=self.device, dtype=self.dtype, rounding=self.rounding, **facts
        )

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return an uninitialised parameter; weights come from a checkpoint or ``randomize``."""
        data = torch.empty(*shape, device=self.device, dtype=dtype or self.dtype)
        return nn.Parameter(data, requires_grad=False)
