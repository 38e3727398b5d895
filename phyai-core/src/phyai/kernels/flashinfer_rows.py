"""Rows of the optional package flashinfer-python; importing this imports none of it.

They stand behind our own Triton rows, which know our layouts and roundings, and before torch's:
long queries on a GPU are where they come in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phyai.kernels.rows import OPTIMIZED, KernelRow
from phyai.kernels.triton_rows import gpu

PACKAGE = "phyai.kernels.flashinfer"
HEAD_DIMS = (64, 128, 256)
HALF = ("bfloat16", "float16")
PRIORITY = OPTIMIZED - 50


def installed(facts: Mapping[str, Any]) -> bool | str:
    """Accept machines with the package and a GPU it supports, where rounding is free."""
    if not facts.get("lib.flashinfer"):
        return "needs the package flashinfer-python, which is not installed"
    if facts["rounding"] != "free":
        return "rounds elsewhere than the official implementations; needs rounding='free'"
    return gpu(facts)


def plain_attention(facts: Mapping[str, Any]) -> bool | str:
    """Accept unmasked attention of head dims the package has kernels for."""
    fits = installed(facts)
    if fits is not True:
        return fits
    if facts["masked"]:
        return "takes no mask"
    dim = facts["head_dim"]
    return dim in HEAD_DIMS or f"needs a head_dim of {', '.join(map(str, HEAD_DIMS))}; got {dim}"


FLASHINFER_ROWS: tuple[KernelRow, ...] = (
    KernelRow(
        "rms_norm",
        "flashinfer.rms_norm",
        f"{PACKAGE}:rms_norm",
        devices=("cuda",),
        dtypes=HALF,
        predicate=installed,
        priority=PRIORITY,
        capture_safe=False,
    ),
    KernelRow(
        "attention",
        "flashinfer.attention",
        f"{PACKAGE}:attention",
        devices=("cuda",),
        dtypes=HALF,
        predicate=plain_attention,
        priority=PRIORITY,
        capture_safe=False,
        params=("backend",),
    ),
)
"""capture_safe is False until a capture of them has been seen to work."""
