"""The golden door of preprocessing: what it compares, and that it notices what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.golden import Comparison
from phyai.models.gr00t.golden.preprocess import image_recipe, preprocess_runs
from tests.conftest import GOLDEN

ROOT = GOLDEN / "groot"
IMAGES, STATES, PIPELINE = (
    f"preprocess_{name}.safetensors" for name in ("images", "state_action", "pipeline")
)
SETTINGS = "preprocess_state_action.json"

Edit = Callable[[dict[str, Tensor]], None]


def _compare(path: Path, root: Path = ROOT) -> list[Comparison]:
    (run,) = preprocess_runs(path, root)
    return run.compare(None, None, {})


def _case(
    tmp_path: Path, name: str, edit: Edit | None = None, metadata: dict[str, str] | None = None
) -> list[Comparison]:
    """Return the comparisons of an edited copy, in a folder of its own beside the settings."""
    with safe_open(ROOT / name, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        known = dict(file.metadata() or {})
    if edit is not None:
        edit(tensors)
    save_file(tensors, tmp_path / name, {**known, **(metadata or {})})
    settings = tmp_path / SETTINGS
    if not settings.exists():
        settings.write_bytes((ROOT / SETTINGS).read_bytes())
    return _compare(tmp_path / name)


def _failed(rows: list[Comparison]) -> list[str]:
    return [row.name for row in rows if not row.ok]


def _outputs(name: str) -> list[str]:
    raw = re.compile(r"in\..*|.*\.in|.*\.(state_in|action_norm_in)\..*")
    with safe_open(ROOT / name, "pt") as file:
        return [n for n in file.keys() if not raw.fullmatch(n)]  # noqa: SIM118


@pytest.mark.parametrize("name", [IMAGES, STATES, PIPELINE])
def test_every_output_is_compared_and_right(name: str) -> None:
    rows = _compare(ROOT / name)
    assert _failed(rows) == []
    assert sorted(row.name for row in rows if row.name != "texts") == sorted(_outputs(name))


def test_settings_are_compared() -> None:
    rows = _compare(ROOT / SETTINGS)
    assert len(rows) == 6
    assert _failed(rows) == []


@pytest.mark.parametrize("name", [IMAGES, STATES, PIPELINE])
def test_every_output_is_looked_at(name: str, tmp_path: Path) -> None:
    def nudge(tensors: dict[str, Tensor]) -> None:
        for output in _outputs(name):
            tensor = tensors[output]
            wrong = tensor.flatten().clone()
            # uint8: two levels, one of which torchvision's tolerance forgives
            wrong[0] = wrong[0] + (1e-4 if tensor.is_floating_point() else 2)
            tensors[output] = wrong.view(tensor.shape)

    assert sorted(_failed(_case(tmp_path, name, nudge))) == sorted(_outputs(name))


def test_one_level_is_too_much_for_area_recipes_only(tmp_path: Path) -> None:
    def nudge(tensors: dict[str, Tensor]) -> None:
        for output in _outputs(IMAGES):
            tensor = tensors[output].clone()
            tensor[0, 0, 0] = tensor[0, 0, 0] ^ 1
            tensors[output] = tensor

    failed = _failed(_case(tmp_path, IMAGES, nudge))
    area = [name for name in _outputs(IMAGES) if "torchvision" not in name]
    assert set(area) <= set(failed)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        (IMAGES, "img_48x64.newer_short64_blurred"),
        (STATES, "libero_sim.pct0.rel0.state_norm.elbow"),
        (STATES, "libero_sim.something"),
        (PIPELINE, "out.token_type_ids"),
        (PIPELINE, "out.action.elbow"),
    ],
)
def test_unknown_results_are_infinitely_wrong(name: str, extra: str, tmp_path: Path) -> None:
    rows = _case(tmp_path, name, lambda tensors: tensors.update({extra: torch.zeros(3)}))
    (row,) = (row for row in rows if not row.ok)
    assert row.name.startswith(extra)
    assert row.error == float("inf")


@pytest.mark.parametrize(
    ("label", "want"),
    [
        ("newer_short64_frac095", {"short_side": 64, "crop_fraction": 0.95, "letterbox": False}),
        ("newer_short224_frac09_letterbox", {"crop_fraction": 0.9, "letterbox": True}),
        ("newer_short32_frac1", {"crop_fraction": 1.0}),
        ("release_short256_frac095", {"short_side": 256, "letterbox": True}),
        ("newer_target48_crop40", {"short_side": None, "target": (48, 48), "letterbox": False}),
        ("release_target64_crop58", {"crop_fraction": 58 / 64, "letterbox": True}),
        ("torchvision_release", {"area": False, "crop": (58, 58), "letterbox": True}),
        ("torchvision_newer", {"area": False, "letterbox": False}),
        ("torchvision_release_target32_crop28", {"target": (32, 32), "crop": (28, 28)}),
    ],
)
def test_recipes_by_name(label: str, want: dict[str, Any]) -> None:
    recipe = image_recipe(label)
    assert recipe is not None
    assert {name: getattr(recipe, name) for name in want} == want


def test_other_tags_keys_and_statistics(tmp_path: Path) -> None:
    """The file's own names count: nothing is known by heart."""
    data = json.loads((ROOT / SETTINGS).read_text("utf-8"))
    for part in data.values():
        part["my_robot"] = part.pop("libero_sim")
    renamed = json.loads(json.dumps(data).replace('"rot"', '"wrist"'))
    (tmp_path / SETTINGS).write_text(json.dumps(renamed), "utf-8")

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            new = name.replace("libero_sim", "my_robot")
            new = new.removesuffix(".rot") + ".wrist" if new.endswith(".rot") else new
            tensors[new] = tensors.pop(name)

    rows = _case(tmp_path, STATES, rename)
    assert any(row.name == "my_robot.pct1.rel1.state_norm.wrist" for row in rows)
    assert _failed(rows) == []


@pytest.mark.parametrize(
    ("metadata", "wrong"),
    [
        ({"use_percentiles": "false"}, {"out.state", "out.action.gripper_position"}),
        (
            {"use_relative_action": "False"},
            {"out.action.eef_9d", "out.action.joint_position"},
        ),
        ({"exclude_state": "true"}, {"out.state"}),
        ({"formalize_language": "false"}, {"out.input_ids", "out.attention_mask", "texts"}),
        ({"crop_fraction": "0.8"}, {"out.pixel_values"}),
    ],
)
def test_metadata_is_obeyed(metadata: dict[str, str], wrong: set[str], tmp_path: Path) -> None:
    assert {n.split(" ")[0] for n in _failed(_case(tmp_path, PIPELINE, None, metadata))} == wrong


def test_files_of_no_kind_are_refused(tmp_path: Path) -> None:
    odd = tmp_path / "preprocess_odd.safetensors"
    save_file({"x": torch.zeros(1)}, odd)
    with pytest.raises(CheckpointError, match="one known kind"):
        preprocess_runs(odd, ROOT)
    odd.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="readable safetensors"):
        preprocess_runs(odd, ROOT)
    (tmp_path / "preprocess_odd.json").write_text("{}", "utf-8")
    with pytest.raises(CheckpointError, match="modality_configs"):
        _compare(tmp_path / "preprocess_odd.json")


def test_inputs_that_results_need_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must hold 'img_48x64\.in'"):
        _case(tmp_path, IMAGES, lambda tensors: tensors.__delitem__("img_48x64.in"))
