"""RMSNorm of each head, gated by silu of another tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.triton.launch import block_of, check, launch, packed, warps_of


@triton.jit
def gated_rms_norm_kernel(
    x_ptr,
    z_ptr,
    weight_ptr,
    out_ptr,
    heads,
    width,
    x_token,
    x_head,
    z_token,
    z_head,
    eps,
    BLOCK: tl.constexpr,
):
    """out = x * rsqrt(mean(x^2) + eps) * weight * silu(z). One program per token and head."""
    token = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    x_at = x_ptr + token * x_token + head * x_head + cols
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    z_at = z_ptr + token * z_token + head * z_head + cols
    z = tl.load(z_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight
    out = normed * (z / (1.0 + tl.exp(-z)))
    out_at = out_ptr + (token * heads + head) * width + cols
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``reference.gated_rms_norm``, with its roundings."""
    heads, width = x.shape[-2:]
    check(x.shape == z.shape, "gated_rms_norm x and z", "must have one shape", x, z)
    check(weight.shape == (width,), "gated_rms_norm weight", "must be as wide as x", weight, x)
    rows, gates = packed(x).reshape(-1, heads, width), packed(z).reshape(-1, heads, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = block_of(width)
    launch(
        gated_rms_norm_kernel,
        (rows.shape[0] * heads,),
        rows,
        gates,
        weight.contiguous(),
        out,
        heads,
        width,
        rows.stride(0),
        rows.stride(1),
        gates.stride(0),
        gates.stride(1),
        eps,
        BLOCK=block,
        num_warps=warps_of(block),
    )
    return out
