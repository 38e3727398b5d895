"""Run a native kernel beside its reference, sure which of the two did the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.errors import KernelUnavailable
from phyai.kernels import reference
from phyai.kernels.native import available
from phyai.kernels.native.build import find_compiler

DTYPES = (torch.float32, torch.bfloat16)


def _needs_native() -> pytest.MarkDecorator:
    """Skip where nothing can compile; where something can, kernels that do not work are a failure.

    Raises: KernelUnavailable with the reason, which ends the collection of the module.
    """
    found = available()
    if found is True:
        return pytest.mark.skipif(False, reason="")
    try:
        find_compiler(os.environ)
    except KernelUnavailable as error:
        return pytest.mark.skip(reason=str(error))
    raise KernelUnavailable(f"there is a compiler, so native kernels must work; got: {found}")


needs_native = _needs_native()

# fp32: another order of sums. bf16: the same roundings, so one unit in the last place at the most
# where a sum was close to a tie, and that seldom.
TOLERANCE = {torch.float32: (1e-5, 2e-6), torch.bfloat16: (2.0**-7, 1e-6)}
EQUAL = 0.98


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def close(got: Tensor, want: Tensor, atol: float | None = None) -> None:
    """Compare one result; in bf16 most entries must be equal to the last bit."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    rtol, usual = TOLERANCE[want.dtype]
    torch.testing.assert_close(
        got, want, rtol=rtol, atol=usual if atol is None else atol, equal_nan=True
    )
    if want.dtype == torch.bfloat16 and want.numel() > 1 / (1 - EQUAL):
        same = (got == want) | (got.isnan() & want.isnan())
        assert same.double().mean() >= EQUAL


def native(op: Callable[..., Any], *args: Any) -> Any:
    """Run the kernel; fail if it hands the work to the reference."""

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail(f"{op.__name__} went to the reference")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, op.__name__, refuse)
        return op(*args)


def parity(op: Callable[..., Any], *args: Any, atol: float | None = None) -> Any:
    """The kernel and the reference agree, with 1 and 2 threads, and no argument changes."""
    before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    want = getattr(reference, op.__name__)(*args)
    got = native(op, *args)
    for mine, theirs in zip(tensors(got), tensors(want), strict=True):
        close(mine, theirs, atol)
    with threads(2):
        again = native(op, *args)
    for one, two in zip(tensors(got), tensors(again), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    for old, new in zip(before, args, strict=True):
        if isinstance(old, Tensor):
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
    return got


def falls_through(op: Callable[..., Any], *args: Any) -> None:
    """The reference does the work, and its result comes back."""
    calls = []
    truth = getattr(reference, op.__name__)
    want = truth(*args)

    def spy(*given: Any) -> Any:
        calls.append(given)
        return truth(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, op.__name__, spy)
        got = op(*args)
    assert calls
    for mine, theirs in zip(tensors(got), tensors(want), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def compiles(op: Callable[..., Any], *args: Any) -> None:
    """torch.compile takes the whole function: it sees the reference."""
    want = tensors(getattr(reference, op.__name__)(*args))
    torch.compiler.reset()
    got = tensors(torch.compile(op, backend="eager", fullgraph=True)(*args))
    torch.compiler.reset()
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
