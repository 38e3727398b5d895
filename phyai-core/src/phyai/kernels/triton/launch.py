"""Where a kernel runs: launching it, recording the launch, and what launchers ask of the device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from phyai.errors import ConfigError

OLDEST_ARCH = 80
_INTERPRETER_PROCESSORS = 16  # makes the attention split its keys also in small tests


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch: the kernel, its run-time arguments, its constants and options."""

    kernel: Any
    args: tuple[Any, ...]
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Target:
    arch: int
    launches: list[Launch] | None


_target: ContextVar[_Target | None] = ContextVar("triton_target", default=None)


@contextmanager
def assume(arch: int, *, record: bool = False) -> Iterator[list[Launch]]:
    """Let launchers plan for ``arch`` where there is no GPU; with ``record`` nothing is run."""
    launches: list[Launch] = []
    token = _target.set(_Target(arch, launches if record else None))
    try:
        yield launches
    finally:
        _target.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run ``kernel`` over ``grid`` on the device of its first argument; an empty grid is fine."""
    target = _target.get()
    if target is not None and target.launches is not None:
        target.launches.append(Launch(kernel, args, meta))
        return
    if 0 in grid:
        return
    if args[0].is_cuda:
        with torch.cuda.device(args[0].device):
            kernel[grid](*args, **meta)
    else:
        kernel[grid](*args, **meta)


def interpreted(kernel: Any) -> bool:
    """Return whether the kernel was decorated under TRITON_INTERPRET."""
    return not isinstance(kernel, JITFunction)


def arch_of(tensor: Tensor) -> int:
    """Return the compute capability times ten of the tensor's device, such as 90."""
    if tensor.is_cuda:
        return capability(tensor.device)
    target = _target.get()
    return OLDEST_ARCH if target is None else target.arch


@functools.cache
def capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def processors(tensor: Tensor) -> int:
    """Return the number of multiprocessors of the tensor's device."""
    return _processors(tensor.device) if tensor.is_cuda else _INTERPRETER_PROCESSORS


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def as_rows(x: Tensor) -> Tensor:
    """Return x [..., W] as [N, W] with unit stride in W; a view where the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def packed(x: Tensor) -> Tensor:
    """Return x with unit stride in its last dim; a copy only where it has another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def spread(x: Tensor, like: Tensor) -> Tensor:
    """Return x broadcast to ``like`` [..., T, W] as [B, T, W], unit stride in W, strides 0 kept."""
    wide = x.expand(like.shape) if x.shape[-1] == like.shape[-1] else x.expand(like.shape).clone()
    if wide.dim() != 3:
        wide = wide.reshape(-1, like.shape[-2] if like.dim() > 1 else 1, like.shape[-1])
    return packed(wide)


def block_of(width: int) -> int:
    """Return the smallest power of two that holds ``width``, at least 16."""
    return max(16, int(triton.next_power_of_2(width)))


def warps_of(block: int) -> int:
    """Return the number of warps for one row of ``block`` elements."""
    return min(16, max(1, block // 256))


def check(fits: bool, thing: str, rule: str, *got: Any) -> None:
    """Raises: ConfigError when a launcher's arguments do not fit together."""
    if not fits:
        shapes = ", ".join(str(tuple(g.shape) if isinstance(g, Tensor) else g) for g in got)
        raise ConfigError(f"{thing} {rule}; got {shapes}. Pass tensors of matching shapes.")
