"""The released layout: one file or shards, tolerated tensors, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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
from phyai.models.gr00t.config import GrootConfig
from phyai.weights import save_sharded
from tests.groot.groot_engines import ROOT, engine_of, random_rows, request_of

LAST = "backbone.model.model.language_model.layers.4.mlp.down_proj.weight"
BANK = "action_head.action_encoder.W2.W"


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return load_file(ROOT / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the golden checkpoint without weights."""
    for name in ("config.json", "qwen3_vl_config.json"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def request() -> Any:
    return request_of(random_rows([[(1, 4, 4)]], [5]))


def actions(folder: Path, **changes: Any) -> Tensor:
    with engine_of(checkpoint_dir=str(folder), **changes) as engine:
        out: Tensor = engine.step(request())
    return out


@pytest.fixture(scope="module")
def want() -> Tensor:
    return actions(ROOT)


def test_shards_and_unused_tensors_change_nothing(
    folder: Path, tensors: dict[str, Tensor], want: Tensor
) -> None:
    surplus = {LAST.replace(".layers.4.", f".layers.{i}."): torch.zeros(1) for i in (5, 6)}
    save_sharded({**tensors, **surplus}, folder, 1_000_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(actions(folder), want)


def test_head_and_final_norm_may_be_absent(
    folder: Path, tensors: dict[str, Tensor], want: Tensor
) -> None:
    unused = ("lm_head.weight", "language_model.norm.weight")
    used = {n: t for n, t in tensors.items() if not n.endswith(unused)}
    save_file(used, folder / "model.safetensors")
    assert torch.equal(actions(folder), want)


def test_remapped_names_load(folder: Path, tensors: dict[str, Tensor], want: Tensor) -> None:
    save_file({f"policy.{n}": t for n, t in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(actions(folder, weight_remap={"policy.": ""}), want)


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], type[Exception], str]] = {
    "missing layer": (lambda t: t.pop(LAST), MissingTensors, "layers.4.mlp.down_proj"),
    "missing bank": (lambda t: t.pop(BANK), MissingTensors, "action_encoder.W2.W"),
    "extra": (lambda t: t.update(extra=torch.zeros(1)), UnexpectedTensors, "extra"),
    "misspelt": (lambda t: t.update({BANK + "x": t.pop(BANK)}), MissingTensors, "W2.Wx"),
    "too few embodiments": (lambda t: t.update({BANK: t[BANK][:5].clone()}), ShapeMismatch, "W2.W"),
    "transposed": (
        lambda t: t.update({LAST: t[LAST].T.contiguous()}),
        ShapeMismatch,
        "down_proj.weight",
    ),
    "NaN": (
        lambda t: t.update({BANK: torch.full_like(t[BANK], float("nan"))}),
        CheckpointError,
        "W2.W.*must be finite",
    ),
    "infinity": (
        lambda t: t.update({LAST: t[LAST].clone().index_fill_(0, torch.tensor([3]), float("inf"))}),
        CheckpointError,
        "down_proj.*must be finite",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_names_the_tensor(
    fault: str, folder: Path, tensors: dict[str, Tensor]
) -> None:
    spoil, error, message = FAULTS[fault]
    spoilt = dict(tensors)
    spoil(spoilt)
    save_file(spoilt, folder / "model.safetensors")
    with pytest.raises(error, match=message):
        actions(folder)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "N1.6": ({"model_type": "Gr00tN1d6"}, CheckpointError, "GR00T N1.6"),
    "another model": ({"model_type": "pi05"}, CheckpointError, "must be 'Gr00tN1d7'"),
    "tactile": ({"use_tactile": True}, CheckpointError, "use_tactile"),
    "padding mask": ({"strict_action_padding_mask": True}, CheckpointError, "strict_action"),
    "backbone": ({"model_name": "org/eagle"}, CheckpointError, "model_name"),
    "select_layer": ({"select_layer": 8}, ConfigError, "select_layer must be at most"),
    "string size": ({"action_horizon": "8"}, ConfigError, "action_horizon must be a positive"),
    "huge": ({"action_horizon": 10**9}, ConfigError, "action_horizon must be at most"),
    "widths": ({"input_embedding_dim": 50}, ConfigError, "input_embedding_dim must equal"),
    "flag": ({"use_vlln": 1}, CheckpointError, "use_vlln"),
    "dit": ({"diffusion_model_cfg": {"num_layers": 8}}, ConfigError, "attention_head_dim"),
    "positions": ({"max_seq_len": 7}, ConfigError, "max_seq_len"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_cannot_run_is_refused(case: str, folder: Path) -> None:
    changes, error, message = REFUSED[case]
    data = json.loads((ROOT / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, **changes}))
    with pytest.raises(error, match=message):
        GrootConfig.from_folder(folder)


def test_absent_keys_have_the_class_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "Gr00tN1d7"}')
    config = GrootConfig.from_folder(tmp_path)
    assert (config.select_layer, config.diffusion_model_cfg.num_layers) == (12, 16)
    assert config.vl_self_attention_cfg is None
    assert config.backbone == GrootConfig.released().backbone


def test_backbone_folder_is_read_and_checked(folder: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("backbone")
    with pytest.raises(CheckpointNotFound, match="backbone_dir must hold"):
        GrootConfig.from_folder(folder, other)
    shutil.copy(ROOT / "qwen3_vl_config.json", other / "config.json")
    assert GrootConfig.from_folder(folder, other) == GrootConfig.from_folder(folder)
    shutil.copy(ROOT / "config.json", other / "config.json")
    with pytest.raises(CheckpointError, match="must be the config of a Qwen3-VL model"):
        GrootConfig.from_folder(folder, other)


def test_an_unknown_weight_update_is_refused() -> None:
    with engine_of() as engine, pytest.raises(WeightUpdateError, match="unknown name"):
        engine.adapter.update_weights([("action_head.vlln.wieght", torch.zeros(64))])
