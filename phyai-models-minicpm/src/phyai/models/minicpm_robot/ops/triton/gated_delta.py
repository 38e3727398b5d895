"""The gated delta rule token by token, the state of some value dims in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.kernels.triton.launch import block_of, check, launch
from phyai.models.minicpm_robot.ops.reference import NORM_EPS, check_heads

_VALUES = 16


@triton.jit
def gated_delta_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    out_ptr,
    final_ptr,
    tokens,
    heads,
    group,
    dim,
    width,
    q_row,
    q_token,
    k_row,
    k_token,
    v_row,
    v_token,
    scale,
    eps,
    DIMS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """One program per row, value head and block of value dims; see ``reference``."""
    head = tl.program_id(0) % heads
    row = (tl.program_id(0) // heads).to(tl.int64)
    d, e = tl.arange(0, DIMS), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    keys, values = d < dim, e < width
    both = keys[:, None] & values[None, :]
    place = ((row * heads + head) * dim + d)[:, None] * width + e[None, :]
    held = tl.zeros([DIMS, VALUES], dtype=tl.float32)
    if state_ptr is not None:
        held += tl.load(state_ptr + place, mask=both, other=0.0).to(tl.float32)
    q_at = q_ptr + row * q_row + (head // group) * dim + d
    k_at = k_ptr + row * k_row + (head // group) * dim + d
    v_at = v_ptr + row * v_row + head * width + e
    for t in range(tokens):
        q = tl.load(q_at + t * q_token, mask=keys, other=0.0).to(tl.float32)
        k = tl.load(k_at + t * k_token, mask=keys, other=0.0).to(tl.float32)
        v = tl.load(v_at + t * v_token, mask=values, other=0.0).to(tl.float32)
        flat = (row * tokens + t) * heads + head
        decay, beta = tl.exp(tl.load(g_ptr + flat)), tl.load(beta_ptr + flat)
        q = q * tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + eps)
        held = held * decay
        added = beta * (v - tl.sum(held * k[:, None], axis=0))
        held += k[:, None] * added[None, :]
        out = tl.sum(held * q[:, None], axis=0)
        tl.store(out_ptr + flat * width + e, out.to(out_ptr.dtype.element_ty), mask=values)
    if final_ptr is not None:
        tl.store(final_ptr + place, held, mask=both)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    final: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return ``reference.gated_delta_rule``, with its roundings."""
    check_heads(k, v)
    check(q.shape == k.shape, "gated_delta_rule q and k", "must have one shape", q, k)
    check(
        g.shape == beta.shape == v.shape[:3],
        "gated_delta_rule g and beta",
        "must have one value per token and head",
        g,
        beta,
        v,
    )
    rows, tokens, heads, width = v.shape
    dim = k.shape[3]
    q, k, v = _heads_packed(q), _heads_packed(k), _heads_packed(v)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    last = None
    if final:
        last = torch.empty(rows, heads, dim, width, dtype=torch.float32, device=v.device)
    launch(
        gated_delta_kernel,
        (rows * heads, triton.cdiv(width, _VALUES)),
        q,
        k,
        v,
        g.float().contiguous(),
        beta.float().contiguous(),
        None if state is None else state.contiguous(),
        out,
        last,
        tokens,
        heads,
        heads // k.shape[2],
        dim,
        width,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        dim**-0.5,
        NORM_EPS,
        DIMS=block_of(dim),
        VALUES=_VALUES,
        num_warps=4,
    )
    return out, last


def _heads_packed(x: Tensor) -> Tensor:
    """Return x [B, T, H, D] with its heads side by side; parts of a fused tensor are."""
    fits = x.stride(3) == 1 and x.stride(2) == x.shape[3]
    return x if fits else x.contiguous()
