"""Golden cases of other shapes than the set's own: what a file leaves out is not asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from phyai.models.gr00t.golden.runs import REQUIRED
from phyai.testing.golden import GoldenRunner, golden_runner
from tests.groot.groot_engines import ROOT

PADDED = "case_b2_1cam_3steps"


@pytest.fixture(scope="module")
def runner() -> Iterator[GoldenRunner]:
    with golden_runner("gr00t_n17") as made:
        yield made


def test_a_padded_case_without_solo_rows_is_that_of_official_padding(
    tmp_path: Path, runner: GoldenRunner
) -> None:
    """Its bf16 run, too: rows alone would be far from it."""
    with safe_open(ROOT / f"{PADDED}.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in REQUIRED}
        metadata = file.metadata()
    path = tmp_path / f"{PADDED}.safetensors"
    save_file(tensors, path, metadata)
    results = runner.run(path, ROOT)
    assert [result.label for result in results] == [
        f"{PADDED}[official padding]",
        f"{PADDED}[bf16]",
    ]
    for result in results:
        assert result.comparisons
        assert all(c.ok for c in result.comparisons), result
