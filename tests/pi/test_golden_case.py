"""Reading golden case files: kinds come from the content, and what fits none is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from phyai.errors import CheckpointError
from phyai.models.pi.golden.case import Case, beside, case_args
from phyai.models.pi.golden.runs import runs_of
from phyai.models.pi05.main_pi05 import PI05Adapter
from tests.conftest import GOLDEN


def _save(path: Path, *names: str, **metadata: str) -> Path:
    save_file({name: torch.zeros(1) for name in names}, path, metadata)
    return path


@pytest.mark.parametrize(
    ("names", "metadata", "word"),
    [
        (("in.images",), {"kind": "pi0"}, "'pi0'"),
        (("in.images",), {}, "kind 'pi05'"),
        (("something",), {"kind": "pi05"}, "known kind"),
        (("in.prev_chunk_left_over",), {"kind": "pi05", "schedule": "EXP"}, "kind rtc_guided"),
    ],
)
def test_model_cases_that_cannot_run(
    tmp_path: Path, names: tuple[str, ...], metadata: dict[str, str], word: str
) -> None:
    path = _save(tmp_path / "case_a.safetensors", *names, **metadata)
    with pytest.raises(CheckpointError, match=word):
        runs_of(path, tmp_path, PI05Adapter)


@pytest.mark.parametrize("names", [("in.state",), ("rel.in_state", "droid.state")])
def test_preprocessing_of_no_or_two_kinds(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = _save(tmp_path / "preprocess_lerobot.safetensors", *names)
    with pytest.raises(CheckpointError, match="one known kind"):
        runs_of(path, tmp_path, PI05Adapter)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[1]",
        "[]",
        '[{"prompt": "a"}]',
        '[{"hf_tokens_8": [2]}]',
        '[{"prompt": "a", "hf_tokens_8": [2], "pi0_tokens_8": [2]}]',
    ],
)
def test_prompts_that_are_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "preprocess_prompts_lerobot.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=path.name):
        runs_of(path, tmp_path, PI05Adapter)


def test_unreadable_files(tmp_path: Path) -> None:
    for name in ("case_a.safetensors", "preprocess_a.safetensors", "case_a.json"):
        (tmp_path / name).write_bytes(b"{}")
        with pytest.raises(CheckpointError, match=name):
            runs_of(tmp_path / name, tmp_path, PI05Adapter)


def test_input_that_a_result_needs(tmp_path: Path) -> None:
    path = _save(tmp_path / "preprocess_a.safetensors", "rel.in_state", "rel.relative")
    (run,) = runs_of(path, tmp_path, PI05Adapter)
    with pytest.raises(CheckpointError, match=r"rel\.in_action"):
        run.compare(None, None, {})


def test_beside_is_the_nearest_up_to_the_root(tmp_path: Path) -> None:
    (tmp_path / "stats.json").touch()  # above the root: not looked at
    root = tmp_path / "set"
    path = root / "one/two/case_a.safetensors"
    path.parent.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"stats\.json"):
        beside(path, root, "stats.json")
    for folder in (root, root / "one"):
        (folder / "stats.json").write_text(json.dumps({}))
        assert beside(path, root, "stats.json") == folder / "stats.json"


def test_engine_fits_a_case_with_more_rows_and_cameras_than_the_config_lists() -> None:
    root = GOLDEN / "pi05"
    tensors = {"in.noise": torch.zeros(17, 10, 8), "in.images": torch.zeros(17, 4, 3, 56, 56)}
    case = Case(root / "case_a.safetensors", root, PI05Adapter, "base", tensors, {})
    args = case_args(case, "fp32")
    assert (args.max_batch_size, len(args.inputs_image_shape or ())) == (17, 4)
