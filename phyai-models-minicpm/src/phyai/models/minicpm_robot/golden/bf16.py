"""The bfloat16 run of a case with actions: how near its cosine must be to one.

A head alone is well-conditioned. A whole model of random weights is not: rounding to bfloat16 moves
its actions by any amount, and the official implementation's by the same. How much, is seen from
copies of the row whose pixels differ by less than bfloat16 can hold.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from phyai.adapter import Adapter
from phyai.golden import Comparison, GoldenRun, Records, absolute
from phyai.models.minicpm_robot.args import MiniCPMRobotArgs
from phyai.models.minicpm_robot.golden.cases import Case
from phyai.models.minicpm_robot.request import MiniCPMRobotRequest

COSINE = 1e-3
"""Allowed distance of the cosine from one, as published with the fixtures."""
COPIES = 4
JITTER = 2.0**-7
SPREAD = 10.0
"""Allowed distance by the largest one between two copies. Of 24 random prompts none needed 1, the
fixtures need 3: their weights are rounded alike in all copies."""
ACTIONS = "actions"


def bf16_run(case: Case, args: MiniCPMRobotArgs, request: MiniCPMRobotRequest) -> GoldenRun:
    """Return the run; args: with the precisions it is about."""
    want = case.tensors[ACTIONS]
    copies = COPIES if case.kind == "e2e" else 0

    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        got = result.float().cpu()
        if got.shape[1:] != want.shape[1:]:
            return [absolute(f"{ACTIONS} [bf16]", got, want, 0.0)]
        rows = got.view(1 + copies, len(want), -1).transpose(0, 1)
        worst = max(
            (_allowed(row, one.flatten()) for row, one in zip(rows, want, strict=True)),
            key=lambda pair: pair[0] / pair[1],
        )
        return [Comparison(f"{ACTIONS} [bf16, 1 - cosine]", *worst)]

    rows = (1 + copies) * len(want)
    args = replace(args, max_batch_size=max(args.max_batch_size, rows))
    repeated = _copied(request, copies) if copies else request
    return GoldenRun(f"{case.path.stem}[bf16]", compare, args, repeated, records=())


def _allowed(copies: Tensor, want: Tensor) -> tuple[float, float]:
    """Return the distance of the first copy [N] from what is wanted, and the largest allowed."""
    pairs = combinations(copies, 2)
    spread = max((_distance(one, other) for one, other in pairs), default=0.0)
    return _distance(copies[0], want), max(COSINE, SPREAD * spread)


def _distance(one: Tensor, other: Tensor) -> float:
    return 1.0 - float(functional.cosine_similarity(one.double(), other.double(), dim=0))


def _copied(request: MiniCPMRobotRequest, copies: int) -> MiniCPMRobotRequest:
    """Return the request with its rows once more for each copy, whose pixels are a bit off."""
    random = torch.Generator().manual_seed(0)
    given: dict[str, Any] = vars(request)
    changed: dict[str, Any] = {
        name: torch.cat([value] * (1 + copies))
        for name, value in given.items()
        if isinstance(value, Tensor) and name != "pixel_values"
    }
    pixels = given["pixel_values"]
    off = [
        pixels * (1 + JITTER * (2 * torch.rand(pixels.shape, generator=random) - 1))
        for _ in range(copies)
    ]
    return replace(request, **changed, pixel_values=torch.cat([pixels, *off], dim=-1))
