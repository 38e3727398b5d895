"""Depthwise causal convolution over a few tokens, and its activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.triton.launch import check, launch, packed

_TOKENS, _CHANNELS = 16, 128


@triton.jit
def short_conv_kernel(
    x_ptr,
    weight_ptr,
    before_ptr,
    out_ptr,
    tokens,
    width,
    held,
    blocks,
    x_row,
    x_token,
    before_row,
    before_token,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """out[t] = silu(sum_j weight[j] x[t - TAPS + 1 + j]). One program per tokens x channels."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    t = (tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < width
    total = tl.zeros([TOKENS, CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        at = t + (tap - TAPS + 1)
        own = ((at >= 0) & (at < tokens))[:, None] & inside[None, :]
        x_at = x_ptr + row * x_row + at[:, None] * x_token + c[None, :]
        x = tl.load(x_at, mask=own, other=0.0).to(tl.float32)
        if before_ptr is not None:
            earlier = (at < 0)[:, None] & inside[None, :]
            old_at = before_ptr + row * before_row + (at + held)[:, None] * before_token
            x += tl.load(old_at + c[None, :], mask=earlier, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + tap * width + c, mask=inside, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    narrow: tl.constexpr = out_ptr.dtype.element_ty
    total = total.to(narrow).to(tl.float32)
    active = total / (1.0 + tl.exp(-total))
    out_at = out_ptr + (row * tokens + t)[:, None] * width + c[None, :]
    tl.store(out_at, active.to(narrow), mask=(t < tokens)[:, None] & inside[None, :])


def short_conv(x: Tensor, weight: Tensor, before: Tensor | None = None) -> Tensor:
    """Return ``reference.short_conv``, with its roundings."""
    rows, tokens, width = x.shape
    taps = weight.shape[0]
    check(weight.shape[1] == width, "short_conv weight", "must have x's channels", weight, x)
    x = packed(x)
    held = 0
    if before is not None:
        held, before = before.shape[1], packed(before)
        check(held >= taps - 1, "short_conv before", "must fill the taps", before, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(tokens, _TOKENS)
    launch(
        short_conv_kernel,
        (rows * blocks, triton.cdiv(width, _CHANNELS)),
        x,
        weight.contiguous(),
        before,
        out,
        tokens,
        width,
        held,
        blocks,
        x.stride(0),
        x.stride(1),
        0 if before is None else before.stride(0),
        0 if before is None else before.stride(1),
        TAPS=taps,
        TOKENS=_TOKENS,
        CHANNELS=_CHANNELS,
        num_warps=4,
    )
    return out
