"""Golden cases of other names and contents than the set's own, and what a wrong one is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.models.minicpm_robot.golden import golden_runs
from phyai.models.minicpm_robot.golden.cases import read_case, runs_of
from phyai.models.minicpm_robot.golden.runs import model_runs
from phyai.models.minicpm_robot.main_minicpm_robot import MiniCPMRobotRequest
from phyai.testing.golden import GoldenRunner, golden_runner
from tests.minicpm.minicpm_engines import IMAGE_TOKEN, ROOT, engine_of

MODEL_CASES = ("case_vision", "case_vlm", "case_action_b3", "case_action_shared_head", "case_e2e")
PART_CASES = ("case_gdn_op", "case_text_layers", "case_preprocess")


@pytest.fixture(scope="module")
def runner() -> Iterator[GoldenRunner]:
    with golden_runner("minicpm_robot") as made:
        yield made


def changed(value: Tensor) -> Tensor:
    """Return the tensor with one entry far from what it was."""
    out = value.clone()
    out.view(-1)[-1] += 1 if not out.is_floating_point() else 0.01
    return out


@pytest.mark.parametrize("name", [*MODEL_CASES, *PART_CASES])
def test_every_wrong_tensor_is_told_by_name(name: str, runner: GoldenRunner) -> None:
    """Alone: each of a case's tensors is compared with what the engine made of its inputs."""
    case = read_case(ROOT / f"{name}.safetensors", ROOT)
    run = runs_of(case)[0]
    outcome = runner.outcome(run)
    assert not [c for c in run.compare(*outcome) if not c.ok]
    held = case.tensors
    assert isinstance(held, dict)
    for wrong, value in case.outputs().items():
        if "pixel_values" in wrong:  # a picture's resize may differ by a level
            held[wrong] = value + 0.1
        else:
            held[wrong] = changed(value)
        told = [c.name for c in run.compare(*outcome) if not c.ok]
        held[wrong] = value
        assert told == [wrong]


@pytest.mark.parametrize("name", ["case_robotwin_layout", "case_preprocess"])
def test_every_wrong_fact_is_told_by_name(name: str, tmp_path: Path) -> None:
    path = ROOT / f"{name}.json"
    data = json.loads(path.read_text("utf-8"))
    (run,) = golden_runs(path, ROOT)
    names = [c.name for c in run.compare(None, None, {})]
    assert len(set(names)) == len(names)
    where, key = ("cases", "packed_state80") if "layout" in name else ("images", "raw_grid")
    data[where][1][key][0] = [9, 9] if key == "raw_grid" else 9.0
    copy = tmp_path / path.name
    copy.write_text(json.dumps(data), "utf-8")
    (run,) = golden_runs(copy, ROOT)
    assert [c.name for c in run.compare(None, None, {}) if not c.ok] == [f"{where}.1.{key}"]


def test_an_unknown_result_is_infinitely_wrong(tmp_path: Path, runner: GoldenRunner) -> None:
    tensors = load_file(ROOT / "case_action.safetensors")
    tensors["act.step0.no_such_tensor"] = torch.zeros(1)
    (result, _) = runner.run(save(tensors, tmp_path / "case_x.safetensors"), ROOT)
    wrong = [c for c in result.comparisons if not c.ok]
    assert [c.name.partition(" ")[0] for c in wrong] == ["act.step0.no_such_tensor"]
    assert wrong[0].error == float("inf")


def test_other_batches_and_names_are_the_same_kinds(tmp_path: Path, runner: GoldenRunner) -> None:
    """A head case with its rows in another order and twice: ids are the rows' own."""
    tensors = load_file(ROOT / "case_action_b3.safetensors")
    order = torch.tensor([2, 0, 1, 2, 1])
    rows = {n: t[order] if t.dim() and len(t) == 3 else t for n, t in tensors.items()}
    (fp32, bf16) = runner.run(save(rows, tmp_path / "case_zzz_b5.safetensors"), ROOT)
    assert [c for c in (*fp32.comparisons, *bf16.comparisons) if not c.ok] == []


def test_layers_of_a_batch(tmp_path: Path, runner: GoldenRunner) -> None:
    """Rows of one prompt twice: results per token come twice, rotary tables may come once."""
    tensors = load_file(ROOT / "case_text_layers.safetensors")
    once = ("cos", "sin", "mrope_cos", "mrope_sin", "mrope_positions", "attn_layer_index")
    twice = {n: t if n in once else torch.cat([t, t]) for n, t in tensors.items()}
    (result,) = runner.run(save(twice, tmp_path / "case_t.safetensors"), ROOT)
    assert [c for c in result.comparisons if not c.ok] == []


def test_a_batch_end_to_end_of_unequal_rows(tmp_path: Path, runner: GoldenRunner) -> None:
    """The case's row beside a shorter one of the engine's own, padded on the left."""
    tensors = load_file(ROOT / "case_e2e.safetensors")
    grid, ids = tensors["target_sizes"][:1], tensors["input_ids"][0]
    patches = int(grid.prod())
    short = torch.tensor([1, *[IMAGE_TOKEN] * (patches // 16), 2, 3])
    args = ("state", "noise", "embodiment_id")
    one = MiniCPMRobotRequest(
        input_ids=short[None],
        pixel_values=tensors["pixel_values"][..., : 14 * patches],
        target_sizes=grid,
        **{name: tensors[name] for name in args},
    )
    with engine_of() as engine:
        actions = engine.step(one)
    padded = torch.zeros_like(ids)
    padded[-len(short) :] = short
    mask = torch.ones(2, len(ids), dtype=torch.int64)
    mask[1, : -len(short)] = 0
    batch = {
        **{name: torch.cat([tensors[name]] * 2) for name in args},
        "input_ids": torch.stack([ids, padded]),
        "attention_mask": mask,
        "pixel_values": torch.cat([tensors["pixel_values"], one.pixel_values], dim=-1),
        "target_sizes": torch.cat([tensors["target_sizes"], grid]),
        "actions": torch.cat([tensors["actions"], actions]),
    }
    (fp32, bf16) = runner.run(save(batch, tmp_path / "case_b2.safetensors"), ROOT)
    assert [c for c in (*fp32.comparisons, *bf16.comparisons) if not c.ok] == []


def test_steps_come_from_the_case(tmp_path: Path) -> None:
    tensors = load_file(ROOT / "case_action.safetensors")
    tensors["act.step1.t"] = torch.tensor(7 / 8)
    case = read_case(save(tensors, tmp_path / "case_a.safetensors"), ROOT)
    assert model_runs(case)[0].request.num_steps == 8


def test_a_set_whose_checkpoint_has_a_shared_head_needs_no_other(
    tmp_path: Path, runner: GoldenRunner
) -> None:
    tensors = load_file(ROOT / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if ".action_encoder." not in n}
    kept = {n: t for n, t in kept.items() if ".action_decoder." not in n}
    kept.update(load_file(ROOT / "shared_head_override.safetensors"))
    save(kept, tmp_path / "model.safetensors")
    for name in ("config.json", "case_action_shared_head.safetensors"):
        shutil.copy(ROOT / name, tmp_path)
    (fp32, bf16) = runner.run(tmp_path / "case_action_shared_head.safetensors", tmp_path)
    assert [c for c in (*fp32.comparisons, *bf16.comparisons) if not c.ok] == []


def test_a_shared_head_beside_tensors_under_the_names_of_a_wrapper(
    tmp_path: Path, runner: GoldenRunner
) -> None:
    for name in ("model.safetensors", "shared_head_override.safetensors"):
        wrapped = {f"module.{n}": t for n, t in load_file(ROOT / name).items()}
        save(wrapped, tmp_path / name)
    for name in ("config.json", "case_action_shared_head.safetensors"):
        shutil.copy(ROOT / name, tmp_path)
    (fp32, bf16) = runner.run(tmp_path / "case_action_shared_head.safetensors", tmp_path)
    assert [c for c in (*fp32.comparisons, *bf16.comparisons) if not c.ok] == []


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b"no header"),
        lambda path: save_file({"in.images": torch.zeros(1)}, path),
        lambda path: save_file({}, path),
    ],
    ids=["broken", "of another model", "empty"],
)
def test_a_foreign_case_is_refused(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path = tmp_path / "case_a.safetensors"
    write(path)
    with pytest.raises(CheckpointError, match=r"case_a\.safetensors"):
        golden_runs(path, ROOT)


def test_a_set_without_the_shared_head_says_so(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "case_action_shared_head.safetensors"):
        shutil.copy(ROOT / name, tmp_path)
    with pytest.raises(CheckpointError, match="shared action head"):
        golden_runs(tmp_path / "case_action_shared_head.safetensors", tmp_path)


def save(tensors: dict[str, Tensor], path: Path) -> Path:
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    return path
