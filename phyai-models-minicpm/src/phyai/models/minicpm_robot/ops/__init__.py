"""Ops of the gated delta layers: rows for the kernel table, ``phyai_kernels()`` hands them out.

The rows name their functions; nothing is imported before one is chosen, triton least of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phyai.kernels import OPTIMIZED, REFERENCE, KernelRow, Predicate

DELTA, CONV, NORM = "gated_delta_rule", "short_conv", "gated_rms_norm"
"""Names of the ops. Facts: key_dim, value_dim (delta); width, taps (conv); width (norm)."""

OLDEST_ARCH = 80
WIDEST_STATE = 256
"""Key dims of a head that one program keeps in its registers."""
WIDEST_NORM = 8192
_HERE = __name__


def gpu(facts: Mapping[str, Any]) -> bool | str:
    """Accept the GPUs that the kernels are compiled for."""
    arch = str(facts["device.arch"])
    number = int(arch.removeprefix("sm")) if arch.removeprefix("sm").isdecimal() else 0
    return number >= OLDEST_ARCH or f"needs sm{OLDEST_ARCH} or newer; got {arch}"


def small_state(facts: Mapping[str, Any]) -> bool | str:
    """Accept heads whose state fits the registers of one program."""
    fits = gpu(facts)
    if fits is not True:
        return fits
    width = facts["key_dim"]
    return width <= WIDEST_STATE or f"needs a key_dim of at most {WIDEST_STATE}; got {width}"


def narrow_head(facts: Mapping[str, Any]) -> bool | str:
    """Accept heads that fit the registers of one program."""
    fits = gpu(facts)
    if fits is not True:
        return fits
    width = facts["width"]
    return width <= WIDEST_NORM or f"needs a width of at most {WIDEST_NORM}; got {width}"


def _reference(op: str, *facts: str) -> KernelRow:
    fn = f"{_HERE}.reference:{op}"
    return KernelRow(op, f"torch.{op}", fn, priority=REFERENCE, reference=True, facts=facts)


def _triton(op: str, file: str, predicate: Predicate) -> KernelRow:
    return KernelRow(
        op,
        f"triton.{op}",
        f"{_HERE}.triton.{file}:{op}",
        devices=("cuda",),
        predicate=predicate,
        priority=OPTIMIZED + 1,
    )


def kernel_rows() -> list[KernelRow]:
    """Return the rows of the three ops, one reference each.

    >>> from phyai.kernels import KernelTable
    >>> table = KernelTable()
    >>> table.add(kernel_rows())
    >>> table.explain_one("gated_delta_rule", device="cpu", dtype="float32").row
    'chunked.gated_delta_rule'
    """
    return [
        _reference(DELTA, "attrs.key_dim", "attrs.value_dim"),
        _reference(CONV, "attrs.taps"),
        _reference(NORM),
        KernelRow(
            DELTA,
            f"chunked.{DELTA}",
            f"{_HERE}.chunked:{DELTA}",
            devices=("cpu", "cuda"),
            priority=OPTIMIZED,
        ),
        KernelRow(
            CONV, f"blocks.{CONV}", f"{_HERE}.cpu:{CONV}", devices=("cpu",), priority=OPTIMIZED
        ),
        _triton(DELTA, "gated_delta", small_state),
        _triton(CONV, "short_conv", gpu),
        _triton(NORM, "gated_norm", narrow_head),
    ]
