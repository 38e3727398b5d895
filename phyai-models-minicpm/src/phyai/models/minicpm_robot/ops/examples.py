"""What the ahead-of-time check compiles: the rows, and calls of them without memory.

python -m phyai.kernels.aot --rows phyai.models.minicpm_robot.ops.examples
"""

from __future__ import annotations

import torch
from torch import Tensor

from phyai.kernels.triton.examples import Example
from phyai.models.minicpm_robot.ops import CONV, DELTA, NORM, kernel_rows

__all__ = ["examples", "kernel_rows"]

_ROWS, _TOKENS, _HEADS = 1, 256, 16


def examples(row: str, dtype: torch.dtype) -> list[Example]:
    """Return the calls of a row that cover the variants of its kernel; none for torch rows."""
    made = {f"triton.{DELTA}": _delta, f"triton.{CONV}": _conv, f"triton.{NORM}": _norm}
    return made[row](dtype) if row in made else []


def _new(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _delta(dtype: torch.dtype) -> list[Example]:
    found = []
    for dim in (128, 256):
        heads = _new(dtype, _ROWS, _TOKENS, _HEADS, dim)
        gates = _new(torch.float32, _ROWS, _TOKENS, _HEADS)
        state = _new(torch.float32, _ROWS, _HEADS, dim, dim)
        facts = {"key_dim": dim, "value_dim": dim}
        call = (heads, heads, heads, gates, gates)
        found.append(Example(f"D={dim}", (*call, None, False), facts))
        found.append(Example(f"D={dim}, states", (*call, state), facts))
    return found


def _conv(dtype: torch.dtype) -> list[Example]:
    width = 6144
    x, weight = _new(dtype, _ROWS, _TOKENS, width), _new(dtype, 4, width)
    facts = {"width": width, "taps": 4}
    before = _new(dtype, _ROWS, 4, width)
    return [
        Example("", (x, weight), facts),
        Example("inputs in front", (x, weight, before), facts),
    ]


def _norm(dtype: torch.dtype) -> list[Example]:
    x, weight = _new(dtype, _TOKENS, _HEADS, 128), _new(torch.float32, 128)
    wide, wide_weight = _new(dtype, _TOKENS, 1, 8192), _new(torch.float32, 8192)
    return [
        Example("", (x, x, weight, 1e-6), {"width": 128}),
        Example("widest", (wide, wide, wide_weight, 1e-6), {"width": 8192}),
    ]
