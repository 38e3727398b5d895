"""The built-in rows of the op table."""

from __future__ import annotations

from phyai.kernels import cpu, onednn, reference
from phyai.kernels.flashinfer_rows import FLASHINFER_ROWS
from phyai.kernels.native_rows import NATIVE_ROWS
from phyai.kernels.quant_rows import QUANT_ROWS
from phyai.kernels.rows import FLOATS, GENERAL, OPTIMIZED, REFERENCE, KernelRow
from phyai.kernels.triton_rows import TRITON_ROWS

_TORCH_OPS = (
    "linear",
    "rms_norm",
    "add_rms_norm",
    "ada_rms_norm",
    "ada_layer_norm",
    "gated_residual",
    "gated_ada_rms_norm",
    "gated_ada_layer_norm",
    "layer_norm",
    "add_layer_norm",
    "gelu_tanh",
    "gelu_erf",
    "gelu_tanh_mul",
    "bias_gelu_tanh",
    "scale_bias",
    "silu",
    "silu_mul",
    "rope_cos_sin",
    "apply_rope",
    "apply_rope_fp32",
    "rms_norm_rope",
    "attention",
    "causal_attention",
    "kv_write",
    "rope_kv_write",
)


def _reference_row(op: str) -> KernelRow:
    name = f"eager.{op}" if op.endswith("attention") else f"torch.{op}"
    dtypes = ("*",) if op == "kv_write" else FLOATS
    fn = getattr(reference, op)
    return KernelRow(op, name, fn, dtypes=dtypes, priority=REFERENCE, reference=True)


CATALOGUE: tuple[KernelRow, ...] = (
    *(_reference_row(op) for op in _TORCH_OPS),
    KernelRow(
        "linear",
        "onednn.linear",
        onednn.linear,
        devices=("cpu",),
        dtypes=("float32", "bfloat16"),
        predicate=onednn.fits,
        priority=OPTIMIZED,
        pack=onednn.pack,
    ),
    KernelRow(
        "linear",
        "onednn.linear_fused",
        onednn.linear,
        devices=("cpu",),
        dtypes=("float32", "bfloat16"),
        predicate=onednn.fits_fused,
        priority=OPTIMIZED + 1,
        pack=onednn.pack,
        epilogues=("none", "gelu_tanh"),
    ),
    KernelRow(
        "linear",
        "upcast.linear",
        cpu.upcast_linear,
        devices=("cpu",),
        dtypes=("bfloat16",),
        predicate=cpu.no_16_bit_arithmetic,
        priority=GENERAL,
    ),
    KernelRow(
        "attention",
        "upcast.attention",
        cpu.upcast_attention,
        devices=("cpu",),
        dtypes=("bfloat16",),
        predicate=cpu.no_16_bit_arithmetic,
        priority=GENERAL - 1,  # where rounding is free the fused operator is faster still
    ),
    KernelRow(
        "attention",
        "sdpa.attention",
        cpu.sdpa_attention,
        devices=("cpu", "cuda"),
        predicate=cpu.rounding_may_differ,
        priority=GENERAL,
    ),
    KernelRow(
        "causal_attention",
        "sdpa.causal_attention",
        cpu.sdpa_causal_attention,
        devices=("cpu", "cuda"),
        predicate=cpu.rounding_may_differ,
        priority=GENERAL,
    ),
    *NATIVE_ROWS,
    *TRITON_ROWS,
    *FLASHINFER_ROWS,
    *QUANT_ROWS,
)
