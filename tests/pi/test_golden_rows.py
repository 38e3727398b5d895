"""Golden model cases through every kernel row that runs on this CPU, one row at a time.

The reference rows of all ops are one more run. A row that no layer of these models reaches fails
here: it would be checked nowhere on the main path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from phyai.engine_config import DeviceConfig, EngineConfig, KernelConfig
from phyai.kernels import CATALOGUE, KernelRow, KernelTable
from phyai.testing.golden import golden_runner
from tests.conftest import GOLDEN
from tests.golden_cases import GoldenCase, discover

SETS = ("pi0", "pi05")
KINDS = ("base", "rtc_guided", "rtc_trained", "bf16")
CASES = {name: [c for c in discover(GOLDEN / name) if c.kind in KINDS] for name in SETS}
# Ops these models do not use: other tests run their rows.
UNUSED = {"silu_mul", "ada_layer_norm", "gated_ada_layer_norm", "scale_bias", "bias_gelu_tanh",
          "gated_residual", "gelu_erf", "apply_rope_fp32", "rms_norm_rope",
          "causal_attention"}  # fmt: skip
# By op: the model whose layers never ask for it.
ELSEWHERE = {"ada_rms_norm": "pi0", "gated_ada_rms_norm": "pi0"}
# Ops that are asked for only where no linear row does them in its own pass.
AFTER_LINEAR = {"gelu_tanh", "gelu_tanh_mul"}
LINEAR = next(row for row in CATALOGUE if row.op == "linear" and row.reference)


def runs_here(row: KernelRow) -> bool:
    """Return whether dispatch could choose the row on this machine for some dtype."""
    if row.op in UNUSED or "" not in row.formats or not {"cpu", "*"} & set(row.devices):
        return False
    table = KernelTable(force={row.op: row.name})
    facts = {"packed": True, "rounding": "free", "epilogue": "gelu_tanh", "head_dim": 32,
             "queries": 10, "width": 64}  # fmt: skip
    found = [
        table.explain_one(row.op, device="cpu", dtype=dtype, **facts).row
        for dtype in ("float32", "bfloat16")
    ]
    return row.name in found


FAST = [row for row in CATALOGUE if not row.reference and runs_here(row)]
REFERENCES = [row for row in CATALOGUE if row.reference]


def check(model: str, rows: Sequence[KernelRow], cases: Sequence[GoldenCase]) -> set[str]:
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
                assert [c for c in result.comparisons if not c.ok] == [], case.path.stem
        for engine in runner.engines:
            choices = engine.core.services.kernels.choices
            chosen |= {choice.row for choice in choices if choice.row is not None}
    return chosen


def few(cases: Sequence[GoldenCase]) -> list[GoldenCase]:
    """Return one float32 and one bfloat16 case; the slow tests run all of them."""
    kinds = {case.kind: case for case in reversed(cases)}
    return [kinds["base"], kinds["bf16"]]


def through_one_row(row: KernelRow, model: str, cases: Sequence[GoldenCase]) -> None:
    rows = [row, LINEAR] if row.op in AFTER_LINEAR else [row]
    chosen = check(model, rows, cases)
    assert row.name in chosen or ELSEWHERE.get(row.op) == model


@pytest.mark.parametrize("model", SETS)
@pytest.mark.parametrize("row", FAST, ids=lambda row: f"{row.op}-{row.name}")
def test_golden_through_one_row(row: KernelRow, model: str) -> None:
    through_one_row(row, model, few(CASES[model]))


@pytest.mark.slow
@pytest.mark.parametrize("model", SETS)
@pytest.mark.parametrize("row", FAST, ids=lambda row: f"{row.op}-{row.name}")
def test_every_golden_case_through_one_row(row: KernelRow, model: str) -> None:
    through_one_row(row, model, CASES[model])


@pytest.mark.parametrize("model", SETS)
def test_golden_through_the_references(model: str) -> None:
    chosen = check(model, REFERENCES, CASES[model])
    assert chosen <= {row.name for row in REFERENCES}
