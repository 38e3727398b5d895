"""Golden model cases through every kernel row that runs on this CPU, one row at a time.

The reference rows of all ops are one more run. Rows of ops this model does not use are left to
other tests; a row of an op it uses has to be reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from phyai.engine_config import DeviceConfig, EngineConfig, KernelConfig
from phyai.kernels import CATALOGUE, KernelRow, KernelTable
from phyai.models.minicpm_robot.ops import kernel_rows
from phyai.testing.golden import golden_runner
from tests.golden_cases import GoldenCase, discover
from tests.minicpm.minicpm_engines import ROOT, engine_of

ROWS = [*CATALOGUE, *kernel_rows()]
CASES = [
    case
    for case in discover(ROOT)
    if case.kind in ("minicpm_vlm", "minicpm_action", "minicpm_e2e", "minicpm_gdn_op")
]
E2E = [case for case in CASES if case.kind == "minicpm_e2e"]
REFERENCES = [row for row in ROWS if row.reference]
LINEAR = next(row for row in REFERENCES if row.op == "linear")
# Ops that are asked for only where no linear row does them in its own pass.
AFTER_LINEAR = {"gelu_tanh", "gelu_erf", "silu_mul"}
FACTS: dict[str, Any] = {
    "packed": True, "rounding": "free", "epilogue": "gelu_tanh", "head_dim": 16, "queries": 9,
    "width": 64, "masked": False, "key_dim": 16, "value_dim": 16, "taps": 4,
}  # fmt: skip


def used_ops() -> set[str]:
    """Return the ops that layers of this model choose kernels for."""
    with engine_of() as engine:
        return {choice.op for choice in engine.core.services.kernels.choices} | AFTER_LINEAR


def runs_here(row: KernelRow) -> bool:
    """Return whether dispatch could choose the row on this machine for some dtype."""
    if "" not in row.formats or not {"cpu", "*"} & set(row.devices):
        return False
    table = KernelTable(ROWS, force={row.op: row.name})
    found = [
        table.explain_one(row.op, device="cpu", dtype=dtype, **FACTS).row
        for dtype in ("float32", "bfloat16")
    ]
    return row.name in found


FAST = [row for row in ROWS if not row.reference and runs_here(row)]


def check(rows: Sequence[KernelRow], cases: Sequence[GoldenCase]) -> set[str]:
    """Run cases with ``rows`` preferred; return the names of all rows that were chosen."""
    rules = [{"id": row.op, "match": {"op": row.op}, "prefer": row.name} for row in rows]
    policy: dict[str, Any] = {"schema": "phyai.kernel/v1", "rules": rules}
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        kernel=KernelConfig(policy_config=policy),
    )
    chosen: set[str] = set()
    with golden_runner("minicpm_robot", config) as runner:
        for case in cases:
            for result in runner.run(case.path, ROOT):
                assert result.comparisons
                assert [c for c in result.comparisons if not c.ok] == [], result.label
        for engine in runner.engines:
            choices = engine.core.services.kernels.choices
            chosen |= {choice.row for choice in choices if choice.row is not None}
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("row", FAST, ids=lambda row: f"{row.op}-{row.name}")
def test_golden_through_one_row(row: KernelRow) -> None:
    chosen = check([row, LINEAR] if row.op in AFTER_LINEAR else [row], E2E)
    assert row.name in chosen or row.op not in used_ops()


@pytest.mark.slow
def test_golden_through_the_references() -> None:
    chosen = check(REFERENCES, CASES)
    assert chosen <= {row.name for row in REFERENCES}
