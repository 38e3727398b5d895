"""What the configs of a checkpoint say cannot be is told before any weights are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from phyai.errors import CheckpointError, ConfigError
from phyai.models.cosmos3.checkpoint import Cosmos3Weights
from phyai.models.cosmos3.sound import SoundDecoder
from phyai.models.cosmos3.vae import WanVAE
from phyai.parallel import HeadShards
from phyai.weights import save_safetensors
from tests.cosmos.cosmos_engines import GENERATION, POLICY, ROOT, engine_of

WEIGHTS = "diffusion_pytorch_model.safetensors"


def checkpoint(folder: Path, part: str, **changes: Any) -> Path:
    """Return a copy of the golden checkpoint with another config of one part; weights are links."""
    for path in ROOT.iterdir():
        if path.is_dir() and path.name != part:
            (folder / path.name).symlink_to(path)
    shutil.copy(ROOT / "model_index.json", folder)
    (folder / part).mkdir()
    for path in (ROOT / part).iterdir():
        if path.name != "config.json":
            (folder / part / path.name).symlink_to(path)
    config = json.loads((ROOT / part / "config.json").read_text())
    (folder / part / "config.json").write_text(json.dumps(config | changes))
    return folder


CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "no action heads": (
        POLICY, "transformer", {"action_gen": False}, {}, CheckpointError, "must have action heads",
    ),
    "no sound heads": (
        GENERATION, "transformer", {"sound_gen": False}, {"load_sound": True}, ConfigError,
        "load_sound needs",
    ),
    "sound of another width": (
        GENERATION, "sound_tokenizer", {"vocoder_input_dim": 7}, {}, ConfigError,
        "sound decoder must take 6 channels",
    ),
    "latents of another width": (
        GENERATION, "vae", {"z_dim": 2, "latents_mean": [0.0] * 2, "latents_std": [1.0] * 2}, {},
        CheckpointError, "autoencoder must have 8 latent channels",
    ),
    "chunk": (POLICY, "vae", {}, {"chunk_size": 6}, ConfigError, "must be a multiple of 4"),
    "embodiment": (
        POLICY, "vae", {}, {"domain": "robotwin"}, ConfigError, r"id in \[0, 12\).*got 17",
    ),
    "tiles": (GENERATION, "vae", {}, {"vae_tile": 100}, ConfigError, "multiples of 16"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts_that_do_not_fit_are_told_before_weights_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, part, changes, args, kind, rule = CASES[name]

    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Cosmos3Weights, "load_into", too_late)
    monkeypatch.setattr(WanVAE, "load", too_late)
    monkeypatch.setattr(SoundDecoder, "load", too_late)
    folder = checkpoint(tmp_path, part, **changes)
    with (
        pytest.raises(kind, match=rule),
        engine_of(plugin, checkpoint_dir=str(folder), **args),
    ):
        pass


def test_a_layout_that_cannot_be_is_told_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    def refused(*_: Any) -> None:
        raise ConfigError("tp_size must fit")

    monkeypatch.setattr(WanVAE, "load", too_late)
    monkeypatch.setattr(HeadShards, "of", refused)
    with pytest.raises(ConfigError, match="tp_size must fit"), engine_of(GENERATION):
        pass


def broken(folder: Path, file: str) -> Path:
    """Return a checkpoint's part with NaN in one tensor."""
    tensors = load_file(folder / file)
    name = sorted(name for name in tensors if name.startswith(("decoder.", "encoder.")))[0]
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    (folder / file).unlink()
    save_safetensors(tensors, folder / file)
    return folder


@pytest.mark.parametrize("part", ["vae", "sound_tokenizer"])
def test_damaged_pictures_and_sound_are_refused(part: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, part)
    broken(folder / part, WEIGHTS)
    with (
        pytest.raises(CheckpointError, match="must be finite; got NaN or infinity"),
        engine_of(GENERATION, checkpoint_dir=str(folder)),
    ):
        pass
