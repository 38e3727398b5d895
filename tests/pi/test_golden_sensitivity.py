"""A wrong value in any result of a golden case is noticed, under the name of its tensor or key.

Model cases run once; then one value of each stored tensor is moved in turn, just beyond what its
comparison allows, and the comparison of that tensor has to fail.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phyai.golden import Comparison
from phyai.models.pi.adapter import PiAdapter
from phyai.models.pi.golden.case import Case, read_case
from phyai.models.pi.golden.runs import case_runs, runs_of
from phyai.models.pi0.main_pi0 import PI0Adapter
from phyai.models.pi05.main_pi05 import PI05Adapter
from phyai.testing.golden import GoldenRunner
from tests.conftest import GOLDEN
from tests.golden_cases import GoldenCase, discover, outputs

ADAPTERS: dict[str, type[PiAdapter]] = {"pi0": PI0Adapter, "pi05": PI05Adapter}
FOUND = [case for name in ADAPTERS for case in discover(GOLDEN / name) if case.kind != "rl"]
MODEL_CASES = [case for case in FOUND if case.path.name.startswith("case_")]
PREPROCESS = [case for case in FOUND if case.path.name.startswith("preprocess_")]
# The allowed distance of these follows from themselves, so the engine's result is moved instead.
BF16_RESULTS = ("actions", "fp32.actions")
# An absolute tolerance may be at most this share of a tensor's largest value.
MAX_SHARE = 0.05


def _name(case: GoldenCase) -> str:
    assert case.set_root is not None
    return f"{case.set_root.name}-{case.path.stem}"


def _of(name: str, comparisons: Sequence[Comparison]) -> list[Comparison]:
    return [c for c in comparisons if c.name == name or c.name.startswith(f"{name} ")]


def _moved(tensor: Tensor, index: tuple[int, ...], allowed: Sequence[Comparison]) -> Tensor:
    """Return the tensor with one value moved by three times what its comparisons allow."""
    out = tensor.clone()
    if tensor.dtype == torch.bool:
        out[index] = ~out[index]
        return out
    scale = float(tensor.double().abs().max())
    by = 1e-3 * scale if tensor.is_floating_point() else 1.0
    for comparison in allowed:
        size = float(tensor.double().norm()) if comparison.kind == "rel" else 1.0
        by = max(by, 3.0 * comparison.tolerance * size)
        # "(max)" rows bound single entries of bf16 results, which a relative norm already holds
        if comparison.kind == "abs" and not comparison.name.endswith("(max)"):
            assert comparison.tolerance <= MAX_SHARE * scale, comparison
    value = float(out[index])
    out[index] = value + by if tensor.is_floating_point() or value < 128 else value - by
    return out


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[str, GoldenRunner]]:
    made = {plugin: GoldenRunner(plugin) for plugin in ADAPTERS}
    yield made
    for runner in made.values():
        runner.close()


@pytest.mark.parametrize("found", MODEL_CASES, ids=_name)
def test_every_result_of_a_model_case_counts(
    found: GoldenCase, runners: dict[str, GoldenRunner]
) -> None:
    assert found.set_root is not None
    plugin = found.set_root.name
    case = read_case(found.path, found.set_root, ADAPTERS[plugin])
    for number, run in enumerate(case_runs(case)):
        adapter, result, records = runners[plugin].outcome(run)
        right = run.compare(adapter, result, records)
        assert all(c.ok for c in right)
        for name in outputs(found):
            allowed = _of(name, right)
            if case.kind == "bf16" and name in BF16_RESULTS:
                wrong = _moved(result, (-1,) * result.ndim, allowed)
                after = run.compare(adapter, wrong, records)
            else:
                tensor = _moved(case.tensors[name], _index(case, name), allowed)
                tensors = {**case.tensors, name: tensor}
                changed = case_runs(replace(case, tensors=tensors))[number]
                after = changed.compare(adapter, result, records)
            assert any(not c.ok for c in _of(name, after)), name
        extra = {**case.tensors, "step9.extra": torch.zeros(2)}
        after = case_runs(replace(case, tensors=extra))[number].compare(adapter, result, records)
        assert [c.error for c in _of("step9.extra", after)] == [float("inf")]


@pytest.mark.parametrize("found", [c for c in MODEL_CASES if c.kind == "bf16"], ids=_name)
def test_bf16_result_may_be_another_draw_of_the_same_noise(
    found: GoldenCase, runners: dict[str, GoldenRunner]
) -> None:
    assert found.set_root is not None
    plugin = found.set_root.name
    case = read_case(found.path, found.set_root, ADAPTERS[plugin])
    run = next(run for run in case_runs(case) if "bf16_lerobot" in run.label)
    adapter, _, records = runners[plugin].outcome(run)
    fp32 = case.tensors["fp32.actions"]
    noise = fp32 - case.tensors["actions"]
    for multiple, ok in ((1.5, True), (2.5, False)):
        compared = run.compare(adapter, fp32 + multiple * noise, records)
        assert all(c.ok for c in _of("fp32.actions", compared)) is ok


def _index(case: Case, name: str) -> tuple[int, ...]:
    """Return the last value of a tensor that counts: rows of padding in the prefix do not."""
    tensor = case.tensors[name]
    if not name.startswith("prefix.") or name == "prefix.pad_mask":
        return (-1,) * tensor.ndim
    position = int(case.tensors["prefix.pad_mask"][-1].nonzero()[-1])
    if name.startswith(("prefix.k.", "prefix.v.")):
        return (-1, -1, position, -1)
    return (-1, position, *(-1,) * (tensor.ndim - 2))


@pytest.mark.parametrize("key", ["prompt_after_preprocess", "missing_camera"])
@pytest.mark.parametrize("found", [case for case in MODEL_CASES if case.kind == "e2e"], ids=_name)
def test_prompt_and_missing_cameras_count(
    found: GoldenCase, key: str, runners: dict[str, GoldenRunner]
) -> None:
    assert found.set_root is not None
    plugin = found.set_root.name
    case = read_case(found.path, found.set_root, ADAPTERS[plugin])
    (run,) = case_runs(case)
    outcome = runners[plugin].outcome(run)
    changed = replace(case, metadata={**case.metadata, key: "observation.images.base_0_rgb"})
    after = case_runs(changed)[0].compare(*outcome)
    assert [c.name for c in after if not c.ok] == [key.removesuffix("_after_preprocess")]


def _copied(found: GoldenCase, folder: Path) -> tuple[Path, Path]:
    """Return (case file, root) of a copy of the set without weights and model cases."""
    assert found.set_root is not None
    root = folder / "renamed"
    shutil.copytree(found.set_root, root, ignore=shutil.ignore_patterns("case_*", "model.*s"))
    return root / found.path.relative_to(found.set_root), root


def _compare(path: Path, root: Path) -> list[Comparison]:
    (run,) = runs_of(path, root, PiAdapter)
    assert run.request is None
    return run.compare(None, None, {})


@pytest.mark.parametrize(
    "found", [case for case in PREPROCESS if case.path.suffix == ".safetensors"], ids=_name
)
def test_every_result_of_a_preprocessing_file_counts(found: GoldenCase, tmp_path: Path) -> None:
    path, root = _copied(found, tmp_path)
    tensors = load_file(path)
    right = _compare(path, root)
    assert all(c.ok for c in right)
    for name in outputs(found):
        # The first camera of a mask is always sent; see the rule of the ALOHA mask.
        place = 0 if tensors[name].dtype == torch.bool else -1
        index = (place,) * tensors[name].ndim
        changed = _moved(tensors[name], index, _of(name, right))
        save_file({**tensors, name: changed}, path)
        assert any(not c.ok for c in _of(name, _compare(path, root))), name
    save_file({**tensors, "img9.extra": torch.zeros(2)}, path)
    assert [c.error for c in _of("img9.extra", _compare(path, root))] == [float("inf")]


@pytest.mark.parametrize(
    "found", [case for case in PREPROCESS if case.path.suffix == ".json"], ids=_name
)
def test_every_result_of_a_prompts_file_counts(found: GoldenCase, tmp_path: Path) -> None:
    path, root = _copied(found, tmp_path)
    records = json.loads(path.read_text(encoding="utf-8"))
    assert all(c.ok for c in _compare(path, root))
    for index in range(len(records)):
        for key in outputs(found):
            if key not in records[index]:
                continue
            changed = copy.deepcopy(records)
            changed[index][key] = _other(records[index][key])
            path.write_text(json.dumps(changed), encoding="utf-8")
            (wrong,) = [c for c in _compare(path, root) if not c.ok]
            assert _of(key, [wrong]), key
            assert f"record {index}," in wrong.name
    path.write_text(json.dumps([*records[:1], {**records[1], "extra": 1}]), encoding="utf-8")
    assert [c.error for c in _of("extra", _compare(path, root))] == [float("inf")]


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + " "
    return [*value[:-1], _other(value[-1])]
