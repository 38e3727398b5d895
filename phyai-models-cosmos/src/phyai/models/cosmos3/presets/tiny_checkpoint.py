"""Writes the presets' folders, in the layout of the released checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from phyai.models.cosmos3.presets import tiny_sound, tiny_transformer, tiny_vae
from phyai.models.cosmos3.presets.drawing import Array
from phyai.models.cosmos3.presets.tiny_tokenizer import write_tiny_tokenizer

SHARDS = 2
_WEIGHTS = "diffusion_pytorch_model"
_SEED = "cosmos3-tiny-1"
SCHEDULER: dict[str, Any] = {
    "_class_name": "UniPCMultistepScheduler",
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "disable_corrector": [],
    "final_sigmas_type": "zero",
    "flow_shift": 1.0,
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "predict_x0": True,
    "prediction_type": "flow_prediction",
    "sigma_max": 200.0,
    "sigma_min": 0.147,
    "solver_order": 2,
    "solver_type": "bh2",
    "timestep_spacing": "linspace",
    "use_flow_sigmas": True,
    "use_karras_sigmas": True,
}
"""``scheduler/scheduler_config.json`` as released."""


def write_tiny_checkpoint(folder: Path, *, sound: bool) -> None:
    """Fill ``folder`` with a whole checkpoint; equal bytes every time.

    sound: as a world model's checkpoint; False: as a robot policy's, without sound heads.
    """
    parts = {
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Cosmos3OmniTransformer"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if sound:
        parts["sound_tokenizer"] = ["diffusers", "Cosmos3AVAEAudioTokenizer"]
    for name in parts:
        (folder / name).mkdir()
    index = {
        "_class_name": "Cosmos3OmniPipeline",
        "default_use_system_prompt": sound,
        "enable_safety_checker": False,
        "use_native_flow_schedule": False,
        **parts,
    }
    root = {"architectures": ["Cosmos3ForConditionalGeneration"], "model_type": "cosmos3_omni"}
    _write_json(folder / "model_index.json", index)
    _write_json(folder / "config.json", root)
    _write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    write_tiny_tokenizer(folder / "text_tokenizer")
    transformer = folder / "transformer"
    _write_json(transformer / "config.json", tiny_transformer.transformer_config(sound=sound))
    _write_shards(transformer, tiny_transformer.transformer_weights(_SEED, sound=sound))
    _write_json(folder / "vae" / "config.json", tiny_vae.CONFIG)
    _save(tiny_vae.vae_weights(_SEED), folder / "vae" / f"{_WEIGHTS}.safetensors")
    if sound:
        _write_json(folder / "sound_tokenizer" / "config.json", tiny_sound.CONFIG)
        _save(
            tiny_sound.sound_weights(_SEED),
            folder / "sound_tokenizer" / f"{_WEIGHTS}.safetensors",
        )


def _write_shards(folder: Path, tensors: Mapping[str, Array]) -> None:
    names = sorted(tensors)
    where: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"{_WEIGHTS}-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        held = names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]
        _save({name: tensors[name] for name in held}, folder / file)
        where.update(dict.fromkeys(held, file))
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    _write_json(folder / f"{_WEIGHTS}.safetensors.index.json", index)


def _save(tensors: Mapping[str, Array], path: Path) -> None:
    save_file(dict(sorted(tensors.items())), path, {"format": "pt"})


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
