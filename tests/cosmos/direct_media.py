"""The autoencoder and the sound decoder by themselves, with the golden weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from phyai.json_files import read_json_object
from phyai.kernels import KernelTable
from phyai.layers import Placement
from phyai.models.cosmos3.sound import SoundConfig, SoundDecoder
from phyai.models.cosmos3.vae import VAEConfig, WanVAE

ROOT = Path(__file__).parents[1] / "golden/cosmos3"
VAE, SOUND = ROOT / "vae", ROOT / "sound_tokenizer"


def case(name: str) -> dict[str, Tensor]:
    return load_file(ROOT / f"{name}.safetensors")


def place(dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(KernelTable(), torch.device("cpu"), dtype)


def vae_json() -> dict[str, Any]:
    return read_json_object(VAE / "config.json")


def sound_json() -> dict[str, Any]:
    return read_json_object(SOUND / "config.json")


def golden_vae(dtype: torch.dtype = torch.float32, **options: Any) -> WanVAE:
    vae = WanVAE(VAEConfig.from_folder(VAE), place(dtype), **options)
    vae.load(VAE)
    return vae


def golden_sound(dtype: torch.dtype = torch.float32) -> SoundDecoder:
    decoder = SoundDecoder(SoundConfig.from_folder(SOUND), place(dtype))
    decoder.load(SOUND)
    return decoder


def worst(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    return (got.float() - wanted.float()).abs().max().item()
