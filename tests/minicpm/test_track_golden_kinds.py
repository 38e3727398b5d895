"""Golden cases of the tracker: every tensor is compared, and a wrong one is told by its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phyai.errors import CheckpointError
from phyai.models.minicpm_robot_track.golden import golden_runs
from phyai.models.minicpm_robot_track.golden.runs import POLICY_INPUTS, POOLING_INPUTS
from phyai.testing.golden import GoldenRunner, golden_runner
from tests.conftest import GOLDEN

ROOT = GOLDEN / "minicpm"
POLICY, POOL = "track_case_policy.safetensors", "track_case_pool.safetensors"


@pytest.fixture(scope="module")
def runner() -> Iterator[GoldenRunner]:
    with golden_runner("minicpm_robot_track") as made:
        yield made


@pytest.mark.parametrize(("name", "inputs"), [(POLICY, POLICY_INPUTS), (POOL, POOLING_INPUTS)])
def test_every_tensor_is_compared(name: str, inputs: tuple[str, ...], runner: GoldenRunner) -> None:
    (result,) = runner.run(ROOT / name, ROOT)
    assert {c.name for c in result.comparisons} == set(load_file(ROOT / name)) - set(inputs)
    assert result.ok, [c for c in result.comparisons if not c.ok]


@pytest.mark.parametrize(
    ("name", "spoilt"),
    [(POLICY, n) for n in load_file(ROOT / POLICY) if n not in POLICY_INPUTS]
    + [(POOL, "coarse"), (POOL, "siglip_resized")],
)
def test_a_spoilt_tensor_is_told(
    name: str, spoilt: str, tmp_path: Path, runner: GoldenRunner
) -> None:
    tensors = load_file(ROOT / name)
    tensors[spoilt].view(-1)[-1] += 1e-3
    save_file(tensors, tmp_path / "track_case_other_name.safetensors")
    (result,) = runner.run(tmp_path / "track_case_other_name.safetensors", ROOT)
    assert [c.name for c in result.comparisons if not c.ok] == [spoilt]


def test_rows_of_a_batch_and_padding_are_those_of_the_row(
    tmp_path: Path, runner: GoldenRunner
) -> None:
    """The same row twice, in a layout padded in front."""
    tensors = load_file(ROOT / POLICY)
    doubled = {n: t if n == "rope_inv_freq" else torch.cat([t, t]) for n, t in tensors.items()}
    ids = doubled["input_ids"]
    front = torch.zeros(2, 3, dtype=torch.int64)
    doubled["input_ids"] = torch.cat([front, ids], dim=1)
    doubled["attention_mask"] = torch.cat([front, torch.ones_like(ids)], dim=1)
    for name, tensor in doubled.items():
        if tensor.ndim == 3 and tensor.shape[1] == 49:
            doubled[name] = torch.cat([tensor[:, :3] * 0 + 7.0, tensor], dim=1)
    save_file(doubled, tmp_path / POLICY)
    (result,) = runner.run(tmp_path / POLICY, ROOT)
    assert result.ok, [c for c in result.comparisons if not c.ok]


def test_cases_of_the_other_plugin_have_no_run() -> None:
    names = sorted(path.name for path in ROOT.glob("case_*"))
    assert len(names) > 5
    assert all(golden_runs(ROOT / name, ROOT) == [] for name in names)


def test_an_unknown_result_fails_and_a_foreign_case_is_refused(
    tmp_path: Path, runner: GoldenRunner
) -> None:
    tensors = load_file(ROOT / POLICY)
    tensors["act.something"] = torch.zeros(1)
    save_file(tensors, tmp_path / POLICY)
    (result,) = runner.run(tmp_path / POLICY, ROOT)
    (wrong,) = [c for c in result.comparisons if not c.ok]
    assert wrong.name.startswith("act.something")
    save_file({"x": torch.zeros(1)}, tmp_path / POOL)
    with pytest.raises(CheckpointError, match="policy case"):
        golden_runs(tmp_path / POOL, ROOT)
    with pytest.raises(CheckpointError, match="safetensors"):
        golden_runs(tmp_path / "track_case_x.json", ROOT)
