"""Where a module's parameters live, in which dtype, and which kernels it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from phyai.kernels import Kernel, KernelTable
from phyai.kernels.policy_quant import QuantScheme
from phyai.parallel import SOLE, Group


@dataclass(frozen=True)
class Placement:
    """Device, dtype and kernel table handed to every layer at construction.

    rounding: ``official`` keeps the rounding points of the official implementations in low
    precision, ``free`` lets a kernel keep more bits between them.
    role: the part of the model, such as ``vision``; kernel policies may ask for it.
    rows: how many rows of activations a layer sees per call, 0 = not known beforehand.
    tp: the ranks that share the layers of ``phyai.layers.parallel``.

    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.bfloat16)
    >>> at.with_dtype(torch.float32).parameter(2, 3).dtype
    torch.float32
    """

    kernels: KernelTable
    device: torch.device
    dtype: torch.dtype
    rounding: str = "official"
    role: str = ""
    rows: int = 0
    tp: Group = SOLE

    def with_dtype(self, dtype: torch.dtype) -> Placement:
        return replace(self, dtype=dtype)

    def with_role(self, role: str, rows: int = 0) -> Placement:
        return replace(self, role=role, rows=rows)

    def select(self, op: str, **facts: Any) -> Callable[..., Any]:
        """Return the implementation of ``op`` for this place; decided once, at construction."""
        return self.choose(op, **facts).fn

    def choose(self, op: str, **facts: Any) -> Kernel:
        """Return the function of ``select`` with its row."""
        known: dict[str, Any] = {}
        if self.role:
            known["role"] = self.role
        if self.rows:
            known["rows"] = self.rows
        return self.kernels.choose(
            op,
            device=self.device,
            dtype=self.dtype,
            rounding=self.rounding,
            **{**known, **facts},
        )

    def scheme(self, names: Sequence[str], module_cls: str) -> QuantScheme | None:
        """Return the quantised format the kernel policy wants for a layer; None = none.

        Raises: ConfigError when fused layers ``names`` are not treated alike.
        """
        policy = self.kernels.policy
        return None if policy is None else policy.policy.quantization.scheme_for(names, module_cls)

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return an uninitialised parameter; weights come from a checkpoint or ``randomize``."""
        data = torch.empty(*shape, device=self.device, dtype=dtype or self.dtype)
        return nn.Parameter(data, requires_grad=False)
