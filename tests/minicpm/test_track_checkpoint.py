"""The released layout, the names before it, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from phyai.errors import (
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    MissingTensors,
    ShapeMismatch,
    UnexpectedTensors,
    WeightUpdateError,
)
from phyai.models.minicpm_robot_track import MiniCPMRobotTrackArgs, MiniCPMRobotTrackConfig
from phyai.models.minicpm_robot_track.presets.tiny_checkpoint import CONFIG
from phyai.models.minicpm_robot_track.vision import write_tiny_towers
from phyai.weights import save_sharded
from tests.minicpm.track_engines import (
    Stream,
    engine_of,
    random_windows,
    request_of,
    tiny_tensors,
    update,
    write_tiny,
)

DOWN = "backbone.layers.2.mlp.down_proj.weight"
LEGACY = {
    "backbone.": "llm.",
    "vision_projector.layers.": "proj.net.",
    "temporal_markers.time_embedding.": "tvi.time_emb.",
    "temporal_markers.camera_embedding.": "tvi.view_emb.",
    "temporal_markers.stream_embedding.": "tvi.kind_emb.",
    "trajectory_head.layers.": "planner.mlp.",
    "control_query": "act_token",
    "output_scale": "alpha_task",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the tiny checkpoint; a test writes its weights anew."""
    return write_tiny(tmp_path / "tiny")


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return tiny_tensors()


def actions(folder: Path, **changes: Any) -> Tensor:
    with engine_of(folder, **changes) as engine:
        out: Tensor = engine.step(request_of(random_windows(CONFIG, [5])))
    return out


def legacy_name(name: str) -> str:
    return next(old + name[len(new) :] for new, old in LEGACY.items() if name.startswith(new))


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("wrapper", ["", "model.", "module."])
@pytest.mark.parametrize("legacy", [False, True])
def test_every_released_form_loads(
    wrapper: str, legacy: bool, folder: Path, tensors: dict[str, Tensor]
) -> None:
    want = actions(folder)
    names = {name: wrapper + (legacy_name(name) if legacy else name) for name in tensors}
    stored = {names[name]: tensor for name, tensor in tensors.items()}
    if legacy:
        for part in ("angle_proj", "bbox_proj"):
            stored |= {f"{wrapper}tvi.{part}.weight": torch.ones(2, 2)}
    assert torch.equal(actions(write(folder, stored)), want)


def test_shards_and_a_missing_output_scale_change_nothing(
    folder: Path, tensors: dict[str, Tensor]
) -> None:
    want = actions(folder)
    (folder / "model.safetensors").unlink()
    save_sharded({n: t for n, t in tensors.items() if n != "output_scale"}, folder, 200_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(actions(folder), want)


def test_a_scale_in_low_precision_is_the_configs_rounded(
    folder: Path, tensors: dict[str, Tensor]
) -> None:
    config = {**CONFIG, "xy_scale": 0.3}  # no number of bfloat16
    (folder / "config.json").write_text(json.dumps(config))
    scale = torch.tensor([0.3, 0.3, 1.0])
    want = actions(write(folder, {**tensors, "output_scale": scale}))
    stored = {**tensors, "output_scale": scale.bfloat16()}
    assert torch.equal(actions(write(folder, stored)), want)
    stored["output_scale"] = torch.tensor([0.302, 0.3, 1.0]).bfloat16()
    with pytest.raises(CheckpointError, match="xy_scale"):
        actions(write(folder, stored))


def test_one_file_with_a_config_loads(folder: Path) -> None:
    want = actions(folder)
    config = MiniCPMRobotTrackConfig.from_folder(folder)
    file = folder / "model.safetensors"
    assert torch.equal(actions(folder, checkpoint_dir=str(file), config=config), want)
    with pytest.raises(ConfigError, match="no config is given"):
        actions(folder, checkpoint_dir=str(file))


def test_remapped_names_load(folder: Path, tensors: dict[str, Tensor]) -> None:
    want = actions(folder)
    write(folder, {f"policy.{name}": tensor for name, tensor in tensors.items()})
    assert torch.equal(actions(folder, weight_remap={"policy.": ""}), want)


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], type[Exception], str]] = {
    "missing": (lambda t: t.pop(DOWN), MissingTensors, "layers.2.mlp.down_proj"),
    "missing marker": (
        lambda t: t.pop("temporal_markers.camera_embedding.weight"),
        MissingTensors,
        "camera_embedding",
    ),
    "extra": (lambda t: t.update(extra=torch.zeros(1)), UnexpectedTensors, "extra"),
    "another layer": (
        lambda t: t.update({DOWN.replace("2", "3"): t[DOWN].clone()}),
        UnexpectedTensors,
        "layers.3",
    ),
    "misspelt": (
        lambda t: t.update({DOWN + "x": t.pop(DOWN)}),
        MissingTensors,
        "down_proj.weightx",
    ),
    "transposed": (lambda t: t.update({DOWN: t[DOWN].T}), ShapeMismatch, "down_proj.weight"),
    "NaN": (
        lambda t: t.update({DOWN: torch.full_like(t[DOWN], float("nan"))}),
        CheckpointError,
        "down_proj.*must be finite",
    ),
    "output scale": (
        lambda t: t.update(output_scale=torch.tensor([[[2.0, 2.5, 1.0]]])),
        CheckpointError,
        "output_scale.*xy_scale",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_names_the_tensor(
    fault: str, folder: Path, tensors: dict[str, Tensor]
) -> None:
    spoil, error, message = FAULTS[fault]
    spoil(tensors)
    with pytest.raises(error, match=message):
        actions(write(folder, tensors))


# ---------------------------------------------------------------- config


def nested(**changes: Any) -> dict[str, Any]:
    return {"backbone_config": {**CONFIG["backbone_config"], **changes}}


ROPE = CONFIG["backbone_config"]["rope_scaling"]
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another model": ({"model_type": "llama"}, CheckpointError, "minicpm_robot_track"),
    "grid": ({"fine_tokens_current_frame": 15}, ConfigError, "square"),
    "action_dim": ({"action_dim": 4}, ConfigError, "action_dim"),
    "string size": ({"num_waypoints": "8"}, ConfigError, "num_waypoints"),
    "huge": ({"max_text_tokens": 10**9}, ConfigError, "max_text_tokens must be at most"),
    "times": ({"max_time_steps": 7}, ConfigError, "max_time_steps"),
    "flag": ({"use_tanh_actions": 1}, ConfigError, "use_tanh_actions"),
    "hidden": ({"trajectory_hidden_dims": []}, ConfigError, "trajectory_hidden_dims"),
    "scale": ({"xy_scale": 0}, ConfigError, "xy_scale"),
    "act": (nested(hidden_act="gelu"), CheckpointError, "hidden_act"),
    "heads": (nested(num_key_value_heads=3), ConfigError, "num_key_value_heads"),
    "odd width": (nested(hidden_size=66), CheckpointError, "hidden_size"),
    "bias": (nested(attention_bias=True), CheckpointError, "attention_bias"),
    "rope": (nested(rope_scaling={"type": "linear"}), CheckpointError, "longrope"),
    "factors": (
        nested(rope_scaling={**ROPE, "short_factor": [1.0] * 3}),
        ConfigError,
        "short_factor",
    ),
    "original": (
        nested(rope_scaling={**ROPE, "original_max_position_embeddings": 1}),
        ConfigError,
        "original_max_position_embeddings must be at least 2",
    ),
    "no sizes": ({"backbone_config": {}}, CheckpointError, "hidden_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_cannot_run_is_refused(case: str, tmp_path: Path) -> None:
    changes, error, message = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(error, match=message):
        MiniCPMRobotTrackConfig.from_folder(tmp_path)


def test_absent_keys_have_the_released_values(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert MiniCPMRobotTrackConfig.from_folder(tmp_path) == MiniCPMRobotTrackConfig.released()
    assert MiniCPMRobotTrackConfig.released().use_tanh_actions
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        MiniCPMRobotTrackConfig.from_folder(tmp_path / "nothing")


def test_tanh_follows_the_config(folder: Path) -> None:
    bounded = actions(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "use_tanh_actions": False}))
    scale = torch.tensor([2.0, 2.0, 1.0])
    torch.testing.assert_close(torch.tanh(actions(folder) / scale) * scale, bounded)


# ---------------------------------------------------------------- arguments and updates


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dino_dir": "x"}, "given together"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_text_tokens": True}, "max_text_tokens"),
        ({"velocity_limits": (0.1,)}, "velocity_limits"),
        ({"velocity_limits": (0.1, -1)}, "velocity_limits"),
        ({"checkpoint_dir": "x", "towers_random": True}, "towers_random"),
    ],
)
def test_arguments_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MiniCPMRobotTrackArgs(**changes)


def test_precision_is_checked_and_bf16_stays_near(folder: Path) -> None:
    with pytest.raises(ConfigError, match="precision must be one of"):
        actions(folder, precision="fp16")
    want, got = actions(folder), actions(folder, precision="bf16")
    assert not torch.equal(got, want)
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    assert cosine > 0.999


def test_towers_of_other_widths_are_refused(folder: Path) -> None:
    write_tiny_towers(folder, dino={"hidden_size": 64})
    with pytest.raises(ConfigError, match="vision_feature_dim"):
        actions(folder)


def test_a_weight_update_counts_and_is_checked(folder: Path, tensors: dict[str, Tensor]) -> None:
    row = Stream(2).window(1)
    changed = {DOWN: 2 * tensors[DOWN], "dino.norm.bias": torch.full((32,), 3.0)}
    write_tiny_towers(folder)
    with engine_of(folder) as engine:
        before = engine.step(row).actions
        update(engine, changed)
        assert abs(engine.step(row).actions - before).max() > 1e-3
        update(engine, {"model.llm." + DOWN.removeprefix("backbone."): tensors[DOWN]})
        assert (engine.step(row).actions == before).all()
        update(engine, {"output_scale": torch.tensor([[[2.0, 2.0, 1.0]]])})
        for name, value in (("backbone.nrom.weight", 1.0), ("output_scale", 3.0)):
            with pytest.raises(WeightUpdateError, match=name.split(".")[0]):
                engine.adapter.update_weights([(name, torch.full((64,), value))])
