"""The gated delta rule over chunks of tokens: matrix products instead of a step per token.

Within a chunk, with G_i the sum of g up to token i and S the state in front of the chunk, what
token i adds to the state, u_i, follows from a triangular system:
    u_i = beta_i (v_i - exp(G_i) S^T k_i - sum_{j<i} exp(G_i - G_j) (k_i . k_j) u_j)
and out_i = exp(G_i) S^T q_i + sum_{j<=i} exp(G_i - G_j) (q_i . k_j) u_j.
Source: Yang et al., Gated Delta Networks (2024), section 3.3.

Sums of g are float64: near the end of a chunk they are large, their differences small. Only
differences that are at most 0 become exponents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phyai.models.minicpm_robot.ops.reference import NORM_EPS, check_heads

CHUNK = 64
LEAST = -87.0
"""Exponents below it are taken as it: exp would return subnormal numbers, slowly."""
LEAST_LOG = -1e4
"""Decays below it are taken as it: all of them forget everything, and infinite ones have no
difference."""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    final: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return ``reference.gated_delta_rule``, within the rounding of fp32 sums.

    The chunks start at multiples of their size whatever the length, so that padding behind a row
    changes nothing in front of it.
    """
    check_heads(k, v)
    rows, tokens, heads, width = v.shape
    group, dim = heads // k.shape[2], k.shape[3]
    # keys and queries [B, K, T, D], and what makes each of them as long as the rule wants it
    sides = [(x.transpose(1, 2), _unit(x)) for x in (k, q)]
    sides[1][1].mul_(dim**-0.5)
    values, out = v.transpose(1, 2), torch.empty_like(v, memory_format=torch.contiguous_format)
    logs = g.transpose(1, 2).reshape(rows * heads, tokens).double().clamp(min=LEAST_LOG)
    rates = beta.transpose(1, 2).reshape(rows * heads, tokens, 1).float()
    held = None if state is None else state.float().reshape(rows * heads, dim, width)
    size = min(CHUNK, tokens)
    past = torch.ones(size, size, dtype=torch.float32, device=v.device).tril()
    for start in range(0, tokens, CHUNK):
        span = slice(start, start + CHUNK)
        last = start + CHUNK >= tokens
        pair = _pair([(x[:, :, span], length[:, :, span]) for x, length in sides])
        read, held = _chunk(
            pair,
            values[:, :, span],
            logs[:, span],
            rates[:, span],
            held,
            past,
            group,
            final or not last,
        )
        out[:, span] = read.view(rows, heads, read.shape[1], width).transpose(1, 2)
    if final and held is None:  # no token at all
        held = v.new_zeros(rows * heads, dim, width, dtype=torch.float32)
    return out, held.view(rows, heads, dim, width) if final and held is not None else None


def _unit(x: Tensor) -> Tensor:
    """Return 1 / |x| of x [B, T, K, D] as [B, K, T, 1]."""
    length = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return torch.rsqrt(length * length + NORM_EPS).transpose(1, 2).unsqueeze(-1)


def _pair(sides: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the products of each side, one above the other: [B * K, 2 C, D]."""
    rows, heads, count, dim = sides[0][0].shape
    shape = (rows, heads, 2, count, dim)
    pair = torch.empty(shape, dtype=torch.float32, device=sides[0][0].device)
    for side, (x, factor) in enumerate(sides):
        pair[:, :, side].copy_(x).mul_(factor)  # out= of a slice stops inductor
    return pair.view(rows * heads, 2 * count, dim)


def _chunk(
    pair: Tensor,
    v: Tensor,
    logs: Tensor,
    rates: Tensor,
    state: Tensor | None,
    past: Tensor,
    group: int,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return what the tokens of one chunk read [N, C, E], and the state behind it.

    pair: keys above queries [N / group, 2 C, D]; v [B, H, C, E]; logs [N, C]; rates [N, C, 1];
    state [N, D, E] or zero; past [>= C, >= C], one up to the diagonal, zero behind it.
    """
    count = logs.shape[1]
    sums = logs.cumsum(dim=1)
    decay = (sums[:, :, None] - sums[:, None]).float().clamp_(LEAST, 0.0).exp_()
    decay *= past[:count, :count]
    products = _each_value_head(torch.bmm(pair, pair[:, :count].mT), group)
    pair = _each_value_head(pair, group)
    system, reads = (products.view(-1, 2, count, count) * decay[:, None]).unbind(1)
    shape = (len(pair), count, v.shape[3])
    wanted = torch.empty(shape, dtype=torch.float32, device=v.device)
    wanted.view(v.shape).copy_(v).mul_(rates.view(*v.shape[:3], 1))
    since = sums.clamp(min=LEAST).exp().float()[..., None]
    known = None if state is None else torch.bmm(pair, state)
    if known is not None:
        wanted.addcmul_(known[:, :count], since * rates, value=-1.0)
    added = torch.linalg.solve_triangular(system * rates, wanted, upper=False, unitriangular=True)
    out = torch.bmm(reads, added)
    if known is not None:
        out.addcmul_(known[:, count:], since)
    if not final:
        return out, None
    until = (sums[:, -1:] - sums).clamp_(min=LEAST).exp_().float()[..., None]
    keys, added = pair[:, :count].mT, added * until
    if state is None:
        return out, torch.bmm(keys, added)
    return out, torch.baddbmm(state * since[:, -1:], keys, added)


def _each_value_head(x: Tensor, group: int) -> Tensor:
    return x if group == 1 else x.repeat_interleave(group, dim=0)
