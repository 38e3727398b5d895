"""Rows of quantised linear layers, and of the norms that round their inputs. Imports no triton."""

from __future__ import annotations

from phyai.kernels import quant_linear, quant_norm
from phyai.kernels.policy_quant import COMBINATIONS
from phyai.kernels.rows import GENERAL, OPTIMIZED, REFERENCE, KernelRow, Predicate
from phyai.kernels.triton_rows import PACKAGE, gpu, narrow_row

FORMATS = tuple(
    dict.fromkeys(
        dtype if taken is None else f"{dtype}:{taken}"
        for (dtype, _, _), inputs in COMBINATIONS.items()
        for taken in inputs
    )
)
"""Every quantised format, as ``rows.quant_format`` writes it."""

NORMS = ("rms_norm", "add_rms_norm", "ada_rms_norm", "gated_ada_rms_norm")
"""Norms that can hand int8 tokens to the layers behind them: the op ``<norm>_quant``."""


def _norm_reference(op: str) -> KernelRow:
    fn = getattr(quant_norm, op)
    return KernelRow(op, f"torch.{op}", fn, priority=REFERENCE, reference=True)


def _triton(
    op: str, name: str, file: str, predicate: Predicate, *, formats: tuple[str, ...] = ("",)
) -> KernelRow:
    linear = op == "linear"
    return KernelRow(
        op,
        f"triton.{name}",
        f"{PACKAGE}.{file}:{name}",
        devices=("cuda",),
        predicate=predicate,
        priority=OPTIMIZED,
        pack=quant_linear.pack if linear else None,
        formats=formats,
        rounded_inputs=linear,
    )


QUANT_ROWS: tuple[KernelRow, ...] = (
    KernelRow(
        "linear",
        "dequant.linear",
        quant_linear.linear,
        priority=GENERAL,
        pack=quant_linear.pack,
        formats=FORMATS,
        rounded_inputs=True,
    ),
    _triton("linear", "int8_linear", "quant_linear", gpu, formats=("int8:int8",)),
    _triton("linear", "int8_weight_linear", "quant_linear", gpu, formats=("int8",)),
    *(_norm_reference(f"{norm}_quant") for norm in NORMS),
    _triton("rms_norm_quant", "rms_norm_quant", "norm", narrow_row),
    _triton("add_rms_norm_quant", "add_rms_norm_quant", "norm", narrow_row),
    _triton("ada_rms_norm_quant", "ada_rms_norm_quant", "modulation", narrow_row),
    _triton("gated_ada_rms_norm_quant", "gated_ada_rms_norm_quant", "modulation", narrow_row),
)
