"""Golden model cases through every kernel row that runs on this CPU, one row at a time.

The reference rows of all ops are one more run. Rows of ops this model does not use are left to
other tests; a row of an op it uses has to be reached.
"""

from __future__ import annotations

import pytest

from phyai.kernels import CATALOGUE, KernelRow
from tests.golden_cases import discover
from tests.golden_rows import LINEAR, chosen_ops, fast_rows, row_name, through_rows
from tests.groot.groot_engines import PLUGIN, ROOT, engine_of

CASES = [case for case in discover(ROOT) if case.kind == "groot"]
REFERENCES = [row for row in CATALOGUE if row.reference]
FAST = fast_rows(CATALOGUE, head_dim=16, queries=9, masked=False)
# Ops that are asked for only where no linear row does them in its own pass.
AFTER_LINEAR = {"gelu_tanh", "gelu_erf", "silu_mul"}


def used_ops() -> set[str]:
    """Return the ops that layers of this model choose kernels for."""
    with engine_of() as engine:
        return chosen_ops(engine) | AFTER_LINEAR


@pytest.mark.slow
@pytest.mark.parametrize("row", FAST, ids=row_name)
def test_golden_through_one_row(row: KernelRow) -> None:
    chosen = through_rows(
        PLUGIN, [row, LINEAR] if row.op in AFTER_LINEAR else [row], CASES[:1] + CASES[-1:]
    )
    assert row.name in chosen or row.op not in used_ops()


@pytest.mark.slow
def test_golden_through_the_references() -> None:
    chosen = through_rows(PLUGIN, REFERENCES, CASES)
    assert chosen <= {row.name for row in REFERENCES}
