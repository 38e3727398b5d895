"""Rows of the C++ kernels: which op, for which dtypes. Compiles nothing until one is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phyai.kernels.packing import EPILOGUES
from phyai.kernels.rows import OPTIMIZED, KernelRow

PACKAGE = "phyai.kernels.native"


def compiled(facts: Mapping[str, Any]) -> bool | str:
    """Accept machines where the C++ kernels compile and pass their check."""
    from phyai.kernels.native import available

    return available()


def _int8(name: str, form: str) -> KernelRow:
    return KernelRow(
        "linear",
        name,
        f"{PACKAGE}.quant_linear:linear_int8",
        devices=("cpu",),
        dtypes=("float32", "bfloat16"),
        predicate=compiled,
        priority=OPTIMIZED,
        pack=f"{PACKAGE}.quant_linear:pack_int8",
        epilogues=EPILOGUES,
        formats=(form,),
    )


def _row(op: str, file: str) -> KernelRow:
    return KernelRow(
        op,
        f"native.{op}",
        f"{PACKAGE}.{file}:{op}",
        devices=("cpu",),
        dtypes=("float32", "bfloat16"),
        predicate=compiled,
        priority=OPTIMIZED,
    )


NATIVE_ROWS: tuple[KernelRow, ...] = (
    KernelRow(
        "linear",
        "native.linear",
        f"{PACKAGE}.linear:linear",
        devices=("cpu",),
        dtypes=("float32", "bfloat16"),
        predicate=compiled,
        priority=OPTIMIZED + 2,
        pack=f"{PACKAGE}.packing:pack_weight",
        epilogues=EPILOGUES,
    ),
    _int8("native.int8_w8a8", "int8:int8"),
    _int8("native.int8_weight", "int8"),
    _row("rms_norm", "norm"),
    _row("add_rms_norm", "norm"),
    _row("layer_norm", "norm"),
    _row("add_layer_norm", "norm"),
    _row("ada_rms_norm", "norm"),
    _row("ada_layer_norm", "norm"),
    _row("gated_ada_rms_norm", "norm"),
    _row("gated_ada_layer_norm", "norm"),
    _row("gated_residual", "norm"),
    _row("gelu_tanh_mul", "elementwise"),
    _row("silu_mul", "elementwise"),
    _row("bias_gelu_tanh", "elementwise"),
    _row("apply_rope", "rope"),
    _row("apply_rope_fp32", "rope"),
    _row("rms_norm_rope", "rope"),
    _row("rope_kv_write", "rope"),
    _row("kv_write", "rope"),
    _row("attention", "attention"),
    _row("causal_attention", "attention"),
)
