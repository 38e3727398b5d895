"""Writes a golden checkpoint again in other layouts, or with one thing wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from phyai import Engine
from phyai.weights import save_safetensors, save_sharded
from tests.pi.preset_engines import open_engine

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = ("pi0", "pi05")
SETS = {"pi0": "pi0", "pi05": "pi05"}

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]


def golden_tensors(model: str) -> Tensors:
    """Return the golden weights by their names without the leading ``model.``."""
    stored = load_file(GOLDEN / SETS[model] / "model.safetensors")
    assert all(name.startswith("model.") for name in stored)
    return {name.removeprefix("model."): tensor for name, tensor in stored.items()}


def golden_config(model: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDEN / SETS[model] / "config.json").read_text())
    return config


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))


def lerobot_folder(
    folder: Path,
    model: str,
    *,
    prefix: str = "model.",
    tensors: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = 0,
) -> Path:
    """Write the golden checkpoint as LeRobot does; returns ``folder``.

    prefix: of every tensor name.  shard_bytes: 0 = one file.  Processor files come along.
    """
    source = GOLDEN / SETS[model]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dict(golden_config(model) if config is None else config))
    shutil.copy(source / "arch.json", folder)
    for file in (source / "processors_abs").iterdir():
        shutil.copy(file, folder)
    shutil.copytree(source / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    named = {
        prefix + name: tensor
        for name, tensor in (golden_tensors(model) if tensors is None else tensors).items()
    }
    if shard_bytes:
        save_sharded(named, folder, shard_bytes)
    else:
        save_safetensors(named, folder / "model.safetensors")
    return folder


def openpi_folder(
    folder: Path, model: str, *, stats: Mapping[str, Any] | None = None, asset: str = "lab/arm"
) -> Path:
    """Write the golden checkpoint as openpi's PyTorch converter does; returns ``folder``.

    stats: content of norm_stats.json; None = statistics of the model's full width.
    """
    source, config = GOLDEN / SETS[model], golden_config(model)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "config.json",
        {
            "action_dim": config["max_action_dim"],
            "action_horizon": config["chunk_size"],
            "paligemma_variant": "gemma_2b",
            "action_expert_variant": "gemma_300m",
            "precision": "float32",
        },
    )
    shutil.copy(source / "arch.json", folder)
    shutil.copytree(source / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    save_safetensors(golden_tensors(model), folder / "model.safetensors")
    place = folder / "assets" / asset
    place.mkdir(parents=True)
    write_json(place / "norm_stats.json", full_stats(model) if stats is None else stats)
    return folder


def full_stats(model: str, state: int | None = None, actions: int | None = None) -> dict[str, Any]:
    """Return the content of a norm_stats.json; lengths default to the model's widths."""
    config = golden_config(model)
    sizes = {
        "state": state or config["max_state_dim"],
        "actions": actions or config["max_action_dim"],
    }
    return {
        "norm_stats": {
            name: {
                "mean": [0.1 * i for i in range(size)],
                "std": [1.0 + 0.1 * i for i in range(size)],
                "q01": [-1.0 - 0.1 * i for i in range(size)],
                "q99": [1.0 + 0.2 * i for i in range(size)],
            }
            for name, size in sizes.items()
        }
    }


def golden_request(model: str, case: str = "case_b3_c3_s4") -> Any:
    """Return the model request of a golden case, noise included."""
    import importlib

    tensors = load_file(GOLDEN / SETS[model] / f"{case}.safetensors")
    module = importlib.import_module(f"phyai.models.{model}.main_{model}")
    fields: dict[str, Any] = {
        "pixel_values": tensors["in.images"],
        "image_masks": tensors["in.image_masks"].bool(),
        "input_ids": tensors["in.tokens"].long(),
        "lang_lens": tensors["in.token_mask"].sum(dim=1),
        "noise": tensors["in.noise"],
        "num_steps": len(tensors["steps.time"]),
    }
    if model == "pi0":
        fields["state"] = tensors["in.state"]
    return getattr(module, f"{model.upper()}Request")(**fields)


def golden_actions(model: str, case: str = "case_b3_c3_s4") -> Tensor:
    return load_file(GOLDEN / SETS[model] / f"{case}.safetensors")["actions"]


def run(model: str, folder: Path, **args: Any) -> Tensor:
    """Return the actions of the golden request on the checkpoint in ``folder``."""
    with open_engine(model, checkpoint_dir=folder, max_batch_size=4, **args) as engine:
        return actions_of(engine, model)


def actions_of(engine: Engine, model: str) -> Tensor:
    result = engine.step(golden_request(model))
    assert isinstance(result, torch.Tensor)
    return result
