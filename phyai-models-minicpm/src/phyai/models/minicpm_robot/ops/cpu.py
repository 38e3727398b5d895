"""Rows for the CPU, built from torch's operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from phyai.models.minicpm_robot.ops.reference import history

TOKENS = 16
"""Tokens at a time: what they need stays in the cache nearest to the core."""


def short_conv(x: Tensor, weight: Tensor, before: Tensor | None = None) -> Tensor:
    """Return ``reference.short_conv``, with its roundings; channels stay side by side."""
    taps, tokens = weight.shape[0], x.shape[1]
    wide = weight.float()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for start in range(0, tokens, TOKENS):
        stop = min(start + TOKENS, tokens)
        first = start - (taps - 1)
        if first < 0:
            front = history(x, taps, before)[:, start:]
            seen = torch.cat([front, x[:, :stop]], dim=1)
        else:
            seen = x[:, first:stop]
        part = out[:, start:stop]
        total = part if x.dtype == torch.float32 else torch.empty(part.shape, dtype=torch.float32)
        total.copy_(seen[:, taps - 1 :]).mul_(wide[taps - 1])  # out= of a slice stops inductor
        for tap in range(taps - 1):
            total.addcmul_(seen[:, tap : tap + stop - start], wide[tap])
        if total is not part:
            part.copy_(total)
        functional.silu(part, inplace=True)
    return out
