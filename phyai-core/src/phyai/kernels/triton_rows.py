"""Rows of the Triton kernels: which op, on which GPU, for which shapes. Imports no triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phyai.kernels.rows import OPTIMIZED, KernelRow, Predicate

PACKAGE = "phyai.kernels.triton"
OLDEST_ARCH = 80
WIDEST_ROW = 8192
"""Norms keep a whole row in registers."""
LONGEST_QUERY = 128
"""Above it the fused operator of torch fills the GPU without splitting the keys."""


def gpu(facts: Mapping[str, Any]) -> bool | str:
    """Accept GPUs with tensor cores for bfloat16."""
    arch = str(facts["device.arch"])
    number = int(arch.removeprefix("sm")) if arch.removeprefix("sm").isdecimal() else 0
    return number >= OLDEST_ARCH or f"needs sm{OLDEST_ARCH} or newer; got {arch}"


def narrow_row(facts: Mapping[str, Any]) -> bool | str:
    """Accept rows that fit the registers of one program."""
    fits = gpu(facts)
    if fits is not True:
        return fits
    width = facts["width"]
    return width <= WIDEST_ROW or f"needs a width of at most {WIDEST_ROW}; got {width}"


def short_query(facts: Mapping[str, Any]) -> bool | str:
    """Accept short queries of common head dims, where the caller gave up official rounding."""
    fits = gpu(facts)
    if fits is not True:
        return fits
    if facts["dtype"] != "float32" and facts["rounding"] != "free":
        return f"keeps scores in fp32, not in {facts['dtype']}; needs rounding='free'"
    dim, queries = facts["head_dim"], facts["queries"]
    if not (64 <= dim <= 128 or dim == 256):
        return f"needs a head_dim of 64 to 128, or 256; got {dim}"
    return queries <= LONGEST_QUERY or f"needs at most {LONGEST_QUERY} queries; got {queries}"


def _row(op: str, file: str, predicate: Predicate) -> KernelRow:
    return KernelRow(
        op,
        f"triton.{op}",
        f"{PACKAGE}.{file}:{op}",
        devices=("cuda",),
        predicate=predicate,
        priority=OPTIMIZED,
    )


TRITON_ROWS: tuple[KernelRow, ...] = (
    _row("rms_norm", "norm", narrow_row),
    _row("add_rms_norm", "norm", narrow_row),
    _row("layer_norm", "layer_norm", narrow_row),
    _row("add_layer_norm", "layer_norm", narrow_row),
    _row("ada_rms_norm", "modulation", narrow_row),
    _row("ada_layer_norm", "modulation", narrow_row),
    _row("gated_ada_rms_norm", "modulation", narrow_row),
    _row("gated_ada_layer_norm", "modulation", narrow_row),
    _row("gated_residual", "modulation", gpu),
    _row("gelu_tanh_mul", "gate", gpu),
    _row("silu_mul", "gate", gpu),
    _row("bias_gelu_tanh", "epilogue", gpu),
    _row("scale_bias", "epilogue", gpu),
    _row("apply_rope", "rope", gpu),
    _row("apply_rope_fp32", "rope", gpu),
    _row("rms_norm_rope", "head_norm", gpu),
    _row("rope_kv_write", "rope", gpu),
    _row("kv_write", "rope", gpu),
    _row("attention", "attention", short_query),
)
