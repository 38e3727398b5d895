"""How the row kernels are called: one block of 64-bit arguments each, packed by ``struct``.

Packing some twenty arguments costs a fifth of what ctypes takes to convert them one by one.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from phyai.kernels.native.library import library

CODES = {torch.float32: 0, torch.bfloat16: 1}
"""dtype -> its code in the C interface, of rows and of packed weights."""


_compiling = torch.compiler.is_compiling
_watchers: Callable[[], int] = torch._C._len_torch_dispatch_stack


def watched() -> bool:
    """Return whether somebody must see torch operators: a tracer, or a counter of operations."""
    return _compiling() or _watchers() > 0


@functools.cache
def entry(name: str) -> Callable[[bytes], int]:
    """Return a C function that takes a block of arguments and returns 0 when it has run.

    Raises: KernelUnavailable when there is no library.
    """
    function = getattr(library(), name)
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_int
    called: Callable[[bytes], int] = function
    return called


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x [..., W], copied only if it must be, and the distance of its rows in elements."""
    if x.is_contiguous():
        return x, x.shape[-1]
    shape, stride = x.shape, x.stride()
    if stride[-1] == 1:
        if len(shape) == 2:
            return x, stride[0]
        if len(shape) == 3 and (shape[0] == 1 or stride[0] == shape[1] * stride[1]):
            return x, stride[1]
    return x.contiguous(), shape[-1]


def empty_rows(x: Tensor) -> Tensor:
    """Return a new contiguous tensor of the shape and dtype of x."""
    if x.is_contiguous():
        return torch.empty_like(x)
    return x.new_empty(x.shape)


def last_dense(x: Tensor) -> Tensor:
    """Return x, copied if its last dim is strided."""
    return x if x.stride(-1) == 1 else x.contiguous()
