"""Golden cases of other shapes than the set's own: what a file leaves out is not asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from phyai.models.gr00t.golden.inputs import input_runs
from phyai.models.gr00t.golden.runs import REQUIRED, read_case
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


@pytest.mark.parametrize("changed", ["in.pixel_values", "in.input_ids", "in.image_grid_thw"])
def test_inputs_are_made_anew_from_images_and_instructions(changed: str, tmp_path: Path) -> None:
    """A recorded input that does not follow from them is told."""
    path = ROOT / "case_b2_2cam_pad_4steps.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    tensors[changed] = tensors[changed].clone()
    tensors[changed].view(-1)[-1] += 1
    case = read_case(save(tensors, metadata, tmp_path / path.name), ROOT)
    (run,) = input_runs(case)
    wrong = [c.name for c in run.compare(None, None, {}) if not c.ok]
    assert wrong == [changed]


def save(tensors: dict[str, Tensor], metadata: dict[str, str], path: Path) -> Path:
    save_file(tensors, path, metadata)
    return path
