"""Golden model cases through every kernel row that runs on this CPU, one row at a time.

The reference rows of all ops are one more run. Rows of ops this model does not use are left to
other tests; a row of an op it uses has to be reached.
"""

from __future__ import annotations

import pytest

from phyai.kernels import CATALOGUE, KernelRow
from phyai.models.minicpm_robot.ops import kernel_rows
from tests.golden_cases import discover
from tests.golden_rows import LINEAR, chosen_ops, fast_rows, row_name, through_rows
from tests.minicpm.minicpm_engines import PLUGIN, ROOT, engine_of

ROWS = [*CATALOGUE, *kernel_rows()]
CASES = [
    case
    for case in discover(ROOT)
    if case.kind in ("minicpm_vlm", "minicpm_action", "minicpm_e2e", "minicpm_gdn_op")
]
E2E = [case for case in CASES if case.kind == "minicpm_e2e"]
REFERENCES = [row for row in ROWS if row.reference]
FAST = fast_rows(ROWS, head_dim=16, queries=9, masked=False, key_dim=16, value_dim=16, taps=4)
# Ops that are asked for only where no linear row does them in its own pass.
AFTER_LINEAR = {"gelu_tanh", "gelu_erf", "silu_mul"}


def used_ops() -> set[str]:
    """Return the ops that layers of this model choose kernels for."""
    with engine_of() as engine:
        return chosen_ops(engine) | AFTER_LINEAR


@pytest.mark.slow
@pytest.mark.parametrize("row", FAST, ids=row_name)
def test_golden_through_one_row(row: KernelRow) -> None:
    rows = [row, LINEAR] if row.op in AFTER_LINEAR else [row]
    chosen = through_rows(PLUGIN, rows, E2E)
    assert row.name in chosen or row.op not in used_ops()


@pytest.mark.slow
def test_golden_through_the_references() -> None:
    chosen = through_rows(PLUGIN, REFERENCES, CASES)
    assert chosen <= {row.name for row in REFERENCES}
