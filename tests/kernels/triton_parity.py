"""Run a Triton row under the interpreter, chosen by dispatch as on a GPU, beside its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phyai.kernels import KernelTable, reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The interpreter truncates to bfloat16 where the reference rounds to nearest.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def chosen(op: str, dtype: torch.dtype, arch: int = 90, **facts: Any) -> Callable[..., Any]:
    """Return what dispatch picks for an op on a GPU of that architecture; must be a Triton row."""
    table = KernelTable()
    fn = table.select(op, device="cuda", dtype=dtype, **{"device.arch": f"sm{arch}"}, **facts)
    assert table.choices[-1].row == f"triton.{op}", table.explain()
    return fn


def close(got: Tensor, want: Tensor, factor: float = 1.0) -> None:
    """Compare with the tolerance of the result's dtype; shapes and dtypes are equal."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    tol = TOLERANCE[want.dtype] * factor
    torch.testing.assert_close(got.double(), want.double(), rtol=tol, atol=tol)


def parity(op: str, dtype: torch.dtype, args: tuple[Any, ...], **facts: Any) -> None:
    """The chosen row and the reference agree on ``args``; no argument is changed."""
    before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    got, want = chosen(op, dtype, **facts)(*args), getattr(reference, op)(*args)
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for mine, theirs in pairs:
        close(mine, theirs)
    for old, new in zip(before, args, strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new
