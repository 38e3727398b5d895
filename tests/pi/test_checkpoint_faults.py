"""Broken, foreign and incomplete checkpoints: a typed error that names it, before any compute."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from phyai.errors import (
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    MissingTensors,
    PhyaiError,
    ShapeMismatch,
    UnexpectedTensors,
)
from phyai.models.pi.network.prefix import Prefix
from phyai.weights import save_safetensors
from tests.pi.checkpoint_variants import (
    GOLDEN,
    MODELS,
    full_stats,
    golden_actions,
    golden_tensors,
    lerobot_folder,
    openpi_folder,
    run,
    write_json,
)
from tests.pi.preset_engines import open_engine

OTHER = {"pi0": "pi05", "pi05": "pi0"}
NORM = "action_in_proj.weight"
LAYER = "paligemma_with_expert.paligemma.model.language_model.layers.1.mlp.up_proj.weight"


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def no_compute(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count network runs; opening a broken checkpoint must not start one."""
    calls: list[str] = []
    encode = Prefix.encode

    def counted(self: Prefix, cache: Any) -> None:
        calls.append("encode")
        encode(self, cache)

    monkeypatch.setattr(Prefix, "encode", counted)
    return calls


@pytest.fixture
def good_engine_after(model: str, no_compute: list[str]) -> Iterator[None]:
    """After the broken checkpoint, a good one in the same process gives the official actions."""
    yield
    assert no_compute == []
    torch.testing.assert_close(run(model, GOLDEN / model), golden_actions(model), atol=5e-5, rtol=0)


@dataclass(frozen=True)
class Fault:
    """One way to break a folder, the error's class, and what its message has to hold."""

    break_it: Callable[[Path, str], None]
    error: type[PhyaiError]
    message: str


def _edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, str], None]:
    def break_it(folder: Path, model: str) -> None:
        data = json.loads((folder / name).read_text())
        change(data)
        write_json(folder / name, data)

    return break_it


def _drop(field: str) -> Callable[[Path, str], None]:
    return _edit("config.json", lambda data: data.pop(field))


def _put(**fields: Any) -> Callable[[Path, str], None]:
    return _edit("config.json", lambda data: data.update(fields))


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path, str], None]:
    def break_it(folder: Path, model: str) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return break_it


def _tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path, str], None]:
    def break_it(folder: Path, model: str) -> None:
        stored = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
        change(stored)
        save_safetensors(stored, folder / "model.safetensors")

    return break_it


def _rename(tensors: dict[str, Tensor]) -> None:
    tensors["model." + LAYER.replace("up_proj", "upp_proj")] = tensors.pop("model." + LAYER)


def _pickle_only(folder: Path, model: str) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_weights(folder: Path, model: str) -> None:
    (folder / "model.safetensors").unlink()


def _no_state_file(folder: Path, model: str) -> None:
    next(folder.glob("policy_preprocessor_step_*")).unlink()


def _cut_state_file(folder: Path, model: str) -> None:
    file = next(folder.glob("policy_preprocessor_step_*"))
    file.write_bytes(file.read_bytes()[:-8])


def _one_processor_file(folder: Path, model: str) -> None:
    (folder / "policy_postprocessor.json").unlink()


def _unknown_step(data: dict[str, Any]) -> None:
    data["steps"].insert(1, {"registry_name": "secret_sauce_processor", "config": {}})


def _outside_state_file(data: dict[str, Any]) -> None:
    step = next(s for s in data["steps"] if "state_file" in s)
    step["state_file"] = "../elsewhere.safetensors"


def _text(name: str, text: str) -> Callable[[Path, str], None]:
    def break_it(folder: Path, model: str) -> None:
        (folder / name).write_text(text)

    return break_it


def _remove(name: str) -> Callable[[Path, str], None]:
    def break_it(folder: Path, model: str) -> None:
        (folder / name).unlink()

    return break_it


def _lost_shard(folder: Path, model: str) -> None:
    lerobot_folder(folder, model, shard_bytes=300_000)
    (folder / "model.safetensors").unlink()
    next(folder.glob("model-00002-of-*.safetensors")).unlink()


WEIGHTS = r"model\.safetensors"
FAULTS: dict[str, Fault] = {
    # weights
    "truncated file": Fault(
        _bytes(lambda data: data[:-1000]), CheckpointError, rf"{WEIGHTS}.*truncated"
    ),
    "truncated in the header": Fault(
        _bytes(lambda data: data[:500]), CheckpointError, rf"{WEIGHTS}.*truncated"
    ),
    "empty file": Fault(_bytes(lambda data: b""), CheckpointError, WEIGHTS),
    "header is not JSON": Fault(
        _bytes(lambda data: data[:8] + b"#" + data[9:]), CheckpointError, rf"{WEIGHTS}.*JSON"
    ),
    "appended bytes": Fault(_bytes(lambda data: data + b"abc"), CheckpointError, WEIGHTS),
    "not safetensors": Fault(
        _bytes(lambda data: b"version https://git-lfs.github.com/spec/v1\n"),
        CheckpointError,
        WEIGHTS,
    ),
    "dropped tensor": Fault(
        _tensors(lambda t: t.pop("model." + LAYER)), MissingTensors, rf"1 missing.*{LAYER}"
    ),
    "extra tensor": Fault(
        _tensors(lambda t: t.update({"model.surprise.weight": torch.ones(3)})),
        UnexpectedTensors,
        r"1 unexpected.*surprise\.weight",
    ),
    "renamed tensor": Fault(
        _tensors(_rename), MissingTensors, r"(?s)1 missing.*up_proj.*1 unexpected.*upp_proj"
    ),
    "mis-shaped tensor": Fault(
        _tensors(lambda t: t.update({"model." + LAYER: t["model." + LAYER].T.contiguous()})),
        ShapeMismatch,
        rf"{LAYER}.*\[64, 120\] instead of \[120, 64\]",
    ),
    "integer tensor": Fault(
        _tensors(lambda t: t.update({"model." + NORM: t["model." + NORM].to(torch.int64)})),
        CheckpointError,
        rf"cannot be cast.*{NORM}",
    ),
    "same tensor in both namings": Fault(
        _tensors(lambda t: t.update({NORM: t["model." + NORM].clone()})),
        CheckpointError,
        rf"distinct.*{NORM}",
    ),
    "pickle only": Fault(_pickle_only, CheckpointError, r"pytorch_model\.bin.*never opened"),
    "no weights": Fault(_no_weights, CheckpointNotFound, r"must hold \.safetensors files"),
    "lost shard": Fault(_lost_shard, CheckpointError, r"model-00002-of-"),
    # config.json
    "no config": Fault(_remove("config.json"), CheckpointNotFound, r"config\.json"),
    "config is not JSON": Fault(_text("config.json", "{"), CheckpointError, r"config\.json"),
    "config is a list": Fault(_text("config.json", "[]"), CheckpointError, r"config\.json"),
    "no type": Fault(_drop("type"), CheckpointError, r"field 'type'"),
    "unknown type": Fault(_put(type="smolvla"), CheckpointError, r"'type'.*pi0, pi05.*'smolvla'"),
    "misspelled type": Fault(_put(type="pi_05"), CheckpointError, r"'pi_05'.*Did you mean"),
    "no input features": Fault(_drop("input_features"), CheckpointError, r"'input_features'"),
    "no cameras": Fault(_put(input_features={}), CheckpointError, r"VISUAL"),
    "wrong kind of field": Fault(_put(chunk_size="ten"), CheckpointError, r"'chunk_size'.*'ten'"),
    "impossible value": Fault(_put(n_action_steps=11), ConfigError, r"n_action_steps.*11 and 10"),
    "legacy layout": Fault(
        _put(resize_imgs_with_padding=[224, 224], proj_width=1024, num_steps=10),
        CheckpointError,
        r"LeRobot 0\.4.*resize_imgs_with_padding, proj_width, num_steps",
    ),
    "adapter not there": Fault(_put(use_peft=True), CheckpointError, r"adapter_config\.json"),
    "memory variant": Fault(_put(use_visual_memory=True), CheckpointError, r"use_visual_memory"),
    "unknown variant": Fault(_put(paligemma_variant="gemma_9b"), CheckpointError, r"'gemma_9b'"),
    "broken arch": Fault(
        _edit("arch.json", lambda data: data["text_config"].update(hidden_size="64")),
        CheckpointError,
        r"arch\.json text_config.*'hidden_size'",
    ),
    "unknown normalisation": Fault(
        _put(normalization_mapping={"STATE": "SOMEHOW"}), ConfigError, r"STATE.*'SOMEHOW'"
    ),
    # processor files
    "unknown step": Fault(
        _edit("policy_preprocessor.json", _unknown_step),
        CheckpointError,
        r"policy_preprocessor\.json: step 1.*'secret_sauce_processor'",
    ),
    "missing state_file": Fault(
        _no_state_file, CheckpointNotFound, r"policy_preprocessor_step_\d_normalizer_processor"
    ),
    "truncated state_file": Fault(_cut_state_file, CheckpointError, r"policy_preprocessor_step_"),
    "state_file outside": Fault(
        _edit("policy_preprocessor.json", _outside_state_file),
        CheckpointError,
        r"'state_file'.*'\.\./elsewhere\.safetensors'",
    ),
    "one processor file": Fault(
        _one_processor_file, CheckpointError, r"policy_postprocessor\.json is missing"
    ),
    "steps is no list": Fault(
        _text("policy_postprocessor.json", '{"steps": 3}'), CheckpointError, r"'steps'.*list"
    ),
}


@pytest.mark.usefixtures("good_engine_after")
@pytest.mark.parametrize("name", list(FAULTS))
def test_broken_checkpoint(model: str, name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    folder = lerobot_folder(tmp_path / "checkpoint", model)
    fault.break_it(folder, model)
    with pytest.raises(fault.error, match=fault.message) as caught:
        open_engine(model, checkpoint_dir=folder)
    assert type(caught.value) is fault.error


# ---------------------------------------------------------------- the folder itself


@pytest.mark.usefixtures("good_engine_after")
def test_missing_folder(model: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no-such-folder"):
        open_engine(model, checkpoint_dir=tmp_path / "no-such-folder")


@pytest.mark.usefixtures("good_engine_after")
def test_file_instead_of_folder(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"folder.*model\.safetensors"):
        open_engine(model, checkpoint_dir=GOLDEN / model / "model.safetensors")


@pytest.mark.usefixtures("good_engine_after")
def test_empty_folder(model: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        open_engine(model, checkpoint_dir=tmp_path)


# ---------------------------------------------------------------- the other model


@pytest.mark.usefixtures("good_engine_after")
def test_other_model_by_its_config(model: str) -> None:
    other = OTHER[model]
    with pytest.raises(CheckpointError, match=rf"'{other}'.*--plugin {other}"):
        open_engine(model, checkpoint_dir=GOLDEN / other)


@pytest.mark.usefixtures("good_engine_after")
def test_other_model_by_its_tensors(model: str, tmp_path: Path) -> None:
    """A converted openpi config does not say which model it is; the tensors do."""
    folder = openpi_folder(tmp_path / "openpi", OTHER[model])
    with pytest.raises(
        CheckpointError, match=rf"those of {OTHER[model]} .*--plugin {OTHER[model]}"
    ):
        open_engine(model, checkpoint_dir=folder)


@pytest.mark.usefixtures("good_engine_after")
def test_other_models_tensors_under_this_config(model: str, tmp_path: Path) -> None:
    folder = lerobot_folder(tmp_path, model, tensors=golden_tensors(OTHER[model]))
    with pytest.raises(CheckpointError, match=rf"those of {OTHER[model]} "):
        open_engine(model, checkpoint_dir=folder)


# ---------------------------------------------------------------- statistics


@pytest.mark.usefixtures("good_engine_after")
@pytest.mark.parametrize(("feature", "size"), [("action", 7), ("observation.state", 5)])
@pytest.mark.parametrize("change", [-1, 1])
def test_statistics_of_wrong_length(
    model: str, feature: str, size: int, change: int, tmp_path: Path
) -> None:
    folder = lerobot_folder(tmp_path, model)
    for file in folder.glob("policy_*_step_*.safetensors"):
        stats = load_file(file)
        for name in [n for n in stats if n.startswith(f"{feature}.") and stats[n].shape == (size,)]:
            stats[name] = torch.cat([stats[name], torch.ones(1)])[: size + change]
        save_safetensors(stats, file)
    message = rf"'{feature}' must have the {size} values.*got {size + change}"
    with pytest.raises(CheckpointError, match=message):
        open_engine(model, checkpoint_dir=folder)


@pytest.mark.usefixtures("good_engine_after")
@pytest.mark.parametrize(("group", "feature"), [("actions", "action"), ("state", "state")])
def test_openpi_statistics_that_disagree_in_length(
    model: str, group: str, feature: str, tmp_path: Path
) -> None:
    stats = full_stats(model)
    stats["norm_stats"][group]["std"].pop()
    folder = openpi_folder(tmp_path / "openpi", model, stats=stats)
    with pytest.raises(CheckpointError, match=rf"norm_stats\.json.*{feature}.*one length"):
        open_engine(model, checkpoint_dir=folder)


@pytest.mark.usefixtures("good_engine_after")
def test_statistics_without_what_the_mode_needs(model: str, tmp_path: Path) -> None:
    folder = lerobot_folder(tmp_path, model)
    needed = "q99" if model == "pi05" else "std"
    for file in folder.glob("policy_*_step_*.safetensors"):
        kept = {n: t for n, t in load_file(file).items() if not n.endswith(f".{needed}")}
        save_safetensors(kept, file)
    with pytest.raises(CheckpointError, match=needed):
        open_engine(model, checkpoint_dir=folder)


@pytest.mark.usefixtures("good_engine_after")
def test_several_assets_need_a_choice(model: str, tmp_path: Path) -> None:
    folder = openpi_folder(tmp_path / "openpi", model)
    second = folder / "assets" / "droid"
    second.mkdir()
    write_json(second / "norm_stats.json", full_stats(model))
    with pytest.raises(ConfigError, match=r"droid, lab/arm"):
        open_engine(model, checkpoint_dir=folder)
    open_engine(model, checkpoint_dir=folder, asset_id="droid").close()
