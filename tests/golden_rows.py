"""Golden model cases through chosen kernel rows, one row at a time or all reference rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phyai import Engine
from phyai.engine_config import DeviceConfig, EngineConfig, KernelConfig
from phyai.kernels import CATALOGUE, KernelRow, KernelTable
from phyai.testing.golden import golden_runner
from tests.golden_cases import GoldenCase

LINEAR = next(row for row in CATALOGUE if row.op == "linear" and row.reference)
FACTS: dict[str, Any] = {"packed": True, "rounding": "free", "epilogue": "gelu_tanh", "width": 64}


def row_name(row: KernelRow) -> str:
    return f"{row.op}-{row.name}"


def fast_rows(rows: Sequence[KernelRow], **facts: Any) -> list[KernelRow]:
    """Return the rows beside the references that dispatch could choose on this CPU.

    facts: what layers of the model tell dispatch, such as ``head_dim``.
    """
    return [row for row in rows if not row.reference and _runs_here(row, rows, {**FACTS, **facts})]


def _runs_here(row: KernelRow, rows: Sequence[KernelRow], facts: Mapping[str, Any]) -> bool:
    """Return whether dispatch could choose the row on this machine for some dtype."""
    if "" not in row.formats or not {"cpu", "*"} & set(row.devices):
        return False
    table = KernelTable(rows, force={row.op: row.name})
    found = [
        table.explain_one(row.op, device="cpu", dtype=dtype, **facts).row
        for dtype in ("float32", "bfloat16")
    ]
    return row.name in found


def chosen_ops(engine: Engine) -> set[str]:
    """Return the ops that layers of the engine's model choose kernels for."""
    return {choice.op for choice in engine.core.services.kernels.choices}


def through_rows(model: str, rows: Sequence[KernelRow], cases: Sequence[GoldenCase]) -> set[str]:
    """Run cases with ``rows`` preferred; return the names of all rows that were chosen."""
    rules = [{"id": row.op, "match": {"op": row.op}, "prefer": row.name} for row in rows]
    policy: dict[str, Any] = {"schema": "phyai.kernel/v1", "rules": rules}
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        kernel=KernelConfig(policy_config=policy),
    )
    chosen: set[str] = set()
    with golden_runner(model, config) as runner:
        for case in cases:
            assert case.set_root is not None
            for result in runner.run(case.path, case.set_root):
                assert result.comparisons
                assert [c for c in result.comparisons if not c.ok] == [], result.label
        for engine in runner.engines:
            choices = engine.core.services.kernels.choices
            chosen |= {choice.row for choice in choices if choice.row is not None}
    return chosen
