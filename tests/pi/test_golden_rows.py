"""Golden model cases through every kernel row that runs on this CPU, one row at a time.

The reference rows of all ops are one more run. A row that no layer of these models reaches fails
here: it would be checked nowhere on the main path.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from phyai.kernels import CATALOGUE, KernelRow
from tests.conftest import GOLDEN
from tests.golden_cases import GoldenCase, discover
from tests.golden_rows import LINEAR, fast_rows, row_name, through_rows

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
USED = [row for row in CATALOGUE if row.op not in UNUSED]
FAST = fast_rows(USED, head_dim=32, queries=10)
REFERENCES = [row for row in CATALOGUE if row.reference]


def few(cases: Sequence[GoldenCase]) -> list[GoldenCase]:
    """Return one float32 and one bfloat16 case; the slow tests run all of them."""
    kinds = {case.kind: case for case in reversed(cases)}
    return [kinds["base"], kinds["bf16"]]


def through_one_row(row: KernelRow, model: str, cases: Sequence[GoldenCase]) -> None:
    rows = [row, LINEAR] if row.op in AFTER_LINEAR else [row]
    chosen = through_rows(model, rows, cases)
    assert row.name in chosen or ELSEWHERE.get(row.op) == model


@pytest.mark.parametrize("model", SETS)
@pytest.mark.parametrize("row", FAST, ids=row_name)
def test_golden_through_one_row(row: KernelRow, model: str) -> None:
    through_one_row(row, model, few(CASES[model]))


@pytest.mark.slow
@pytest.mark.parametrize("model", SETS)
@pytest.mark.parametrize("row", FAST, ids=row_name)
def test_every_golden_case_through_one_row(row: KernelRow, model: str) -> None:
    through_one_row(row, model, CASES[model])


@pytest.mark.parametrize("model", SETS)
def test_golden_through_the_references(model: str) -> None:
    chosen = through_rows(model, REFERENCES, CASES[model])
    assert chosen <= {row.name for row in REFERENCES}
