"""The sound decoder: golden waveform, weight norms, hostile configs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phyai.errors import CheckpointNotFound, ConfigError, RequestError, ShapeMismatch
from phyai.models.cosmos3.sound import SoundConfig, SoundDecoder
from phyai.models.cosmos3.sound.layers import NormedWeight
from phyai.weights import run_post_load, save_safetensors, update_tensors
from tests.cosmos.direct_media import SOUND, case, golden_sound, place, sound_json, worst

RELATIVE, CLAMPED = 2e-5, 2e-3


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def decoder() -> SoundDecoder:
    return golden_sound()


def test_decode_gives_the_golden_waveform(decoder: SoundDecoder) -> None:
    golden = case("case_sound_decode")
    wanted = golden["waveform_unclamped"]
    got = decoder.decode(golden["latent"], clamp=False)
    assert worst(got, wanted) <= RELATIVE * wanted.abs().max().item()
    assert worst(decoder.decode(golden["latent"]), golden["waveform"]) <= CLAMPED


def test_rows_do_not_mix(decoder: SoundDecoder) -> None:
    latent = case("case_sound_decode")["latent"]
    both = decoder.decode(torch.cat([latent.flip(-1), latent]), clamp=False)
    alone = decoder.decode(latent, clamp=False)
    assert worst(both[1:], alone) <= RELATIVE * alone.abs().max().item()


def test_the_sound_is_float32_in_every_precision(decoder: SoundDecoder) -> None:
    latent = case("case_sound_decode")["latent"]
    half = golden_sound(torch.bfloat16)
    assert torch.equal(half.decode(latent, clamp=False), decoder.decode(latent, clamp=False))


def test_lengths_and_directions_are_combined_once() -> None:
    torch.manual_seed(0)
    module = NormedWeight("conv", (4, 3, 5), place())
    values = {
        "conv.weight_v": torch.randn(4, 3, 5),
        "conv.weight_g": torch.tensor([2.0, -3.0, 0.5, 1.0]).view(4, 1, 1),
    }
    for names in (tuple(values), ("conv.weight_g",), ("conv.weight_v",), tuple(values)):
        for name in names:
            values[name] = values[name] * -1.5 + 0.1
        update_tensors(module, {name: values[name] for name in names})
        wanted = torch._weight_norm(values["conv.weight_v"], values["conv.weight_g"], 0)
        for _ in range(2):
            run_post_load(module)
            assert worst(module.weight, wanted) <= 1e-6


def test_the_encoder_of_the_file_is_not_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(SOUND / "diffusion_pytorch_model.safetensors")
    wanted = golden_sound().load(SOUND).bytes_read
    save_safetensors(
        {**tensors, "encoder.layers.0.weight": torch.ones(9)}, tmp_path / "model.safetensors"
    )
    report = SoundDecoder(SoundConfig.from_folder(SOUND), place()).load(tmp_path)
    assert report.bytes_read == wanted
    assert report.ignored == ("encoder.layers.0.weight",)


def test_samples_of_a_latent_follow_from_the_strides() -> None:
    assert SoundConfig.from_folder(SOUND).latent_rate == 25.0
    without = {name: value for name, value in sound_json().items() if name != "hop_size"}
    other = SoundConfig.from_json({**without, "dec_strides": [2, 2, 3], "dec_c_mults": [1, 2, 2]})
    assert other.hop_size == 12
    assert SoundConfig.from_json({}) == SoundConfig()


def test_other_latents_are_refused(decoder: SoundDecoder) -> None:
    with pytest.raises(RequestError, match="sound latents must have shape"):
        decoder.decode(torch.zeros(1, 5, 4))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"_class_name": "Other"}, "_class_name"),
        ({"dec_type": "vocos"}, "dec_type"),
        ({"dec_final_tanh": True}, "dec_final_tanh"),
        ({"causal": True}, "causal"),
        ({"latent_mean": [0.0]}, "latent_mean"),
        ({"dec_dim": 0}, "dec_dim"),
        ({"dec_dim": 10**9}, "dec_dim"),
        ({"dec_c_mults": [1, 2]}, "dec_c_mults"),
        ({"dec_c_mults": [1, 2, 10**6]}, "dec_c_mults"),
        ({"dec_strides": "245"}, "dec_strides"),
        ({"dec_strides": [2, 4, 0]}, "dec_strides"),
        ({"hop_size": 41}, "hop_size"),
        ({"sampling_rate": 0}, "sampling_rate"),
    ],
)
def test_hostile_configs_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SoundConfig.from_json(sound_json() | changes)


def test_a_missing_or_other_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        SoundConfig.from_folder(tmp_path)
    other = SoundConfig.from_json(sound_json() | {"dec_dim": 8})
    with pytest.raises(ShapeMismatch, match=r"conv1\.weight_v"):
        SoundDecoder(other, place()).load(SOUND)
