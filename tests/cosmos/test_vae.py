"""The video autoencoder: golden numbers, streaming, what is left out, hostile configs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from phyai.errors import (
    CheckpointNotFound,
    ConfigError,
    MissingTensors,
    RequestError,
    ShapeMismatch,
)
from phyai.models.cosmos3.vae import VAEConfig, WanVAE
from phyai.models.cosmos3.vae.convs import CausalConv
from phyai.models.cosmos3.vae.history import History
from phyai.models.cosmos3.vae.pixels import as_bytes, fold, stack_frames, unfold, unstack_frames
from phyai.timers import Profile
from phyai.weights import randomize
from tests.cosmos.direct_media import VAE, case, golden_vae, place, vae_json, worst

ATOL = 1e-4


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def vae() -> WanVAE:
    return golden_vae()


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return case("case_vae")


# ------------------------------------------------------------------ golden numbers


def test_encode_gives_the_golden_latents(vae: WanVAE, golden: dict[str, Tensor]) -> None:
    pixels = golden["pixels"]
    moments = vae.encode(pixels)
    assert worst(moments, golden["enc_moments"]) <= ATOL
    assert worst(vae.encode_mean(pixels), golden["latent_raw"]) <= ATOL
    assert worst(vae.normalise(golden["latent_raw"]), golden["latent_norm"]) <= ATOL
    assert worst(vae.denormalise(golden["latent_norm"]), golden["latent_raw"]) <= ATOL


def test_a_single_frame_is_exactly_the_first_latent(vae: WanVAE, golden: dict[str, Tensor]) -> None:
    first = vae.encode_latents(golden["pixels"][:, :, :1])
    raw = vae.denormalise(first)
    assert worst(raw, golden["latent_raw_first_frame"]) <= ATOL
    assert torch.equal(first[:, :, 0], vae.encode_latents(golden["pixels"])[:, :, 0])


def test_decode_gives_the_golden_pixels(vae: WanVAE, golden: dict[str, Tensor]) -> None:
    unclamped = vae.decode(golden["latent_raw"], clamp=False)
    assert worst(unclamped, golden["decoded_unclamped"]) <= ATOL
    assert unclamped.abs().max() > 1, "the case shows nothing about the limits"
    assert torch.equal(vae.decode(golden["latent_raw"]), unclamped.clamp(-1, 1))
    assert worst(vae.decode(golden["rand_latent_raw"]), golden["rand_decoded"]) <= ATOL


def test_frames_of_a_video_file_are_the_rounded_pixels(
    vae: WanVAE, golden: dict[str, Tensor]
) -> None:
    frames = vae.decode_frames(golden["latent_norm"])
    assert frames.shape == (1, 9, 48, 64, 3)
    wanted = golden["decoded_unclamped"].permute(0, 2, 3, 4, 1)
    scaled = (wanted.clamp(-1, 1) + 1) * 127.5
    assert (frames.float() - scaled).abs().max() <= 0.5 + 127.5 * ATOL
    assert as_bytes(torch.tensor([-9.0, -1.0, 0.0, 1.0])).tolist() == [0, 0, 128, 255]


def test_the_encoder_stays_float32_where_the_rest_is_bfloat16(golden: dict[str, Tensor]) -> None:
    half = golden_vae(torch.bfloat16)
    assert worst(half.encode(golden["pixels"]), golden["enc_moments"]) <= ATOL
    pixels = half.decode(golden["latent_raw"], clamp=False)
    assert worst(pixels, golden["decoded_unclamped"]) <= 4e-2 * pixels.abs().max().item()
    coarse = golden_vae(torch.bfloat16, encode_dtype=torch.bfloat16, decoder=False)
    error = worst(coarse.encode(golden["pixels"]), golden["enc_moments"])
    assert 1e-3 < error <= 4e-2 * golden["enc_moments"].abs().max().item()


# ------------------------------------------------------------------ streaming


def test_rows_do_not_mix(vae: WanVAE, golden: dict[str, Tensor]) -> None:
    pixels, latents = golden["pixels"], golden["latent_raw"]
    both = vae.encode(torch.cat([pixels.flip(-1), pixels]))
    assert worst(both[1:], vae.encode(pixels)) <= 1e-5
    clips = vae.decode(torch.cat([latents, latents.flip(-1)]))
    assert worst(clips[:1], vae.decode(latents)) <= 1e-5


def test_longer_chunks_give_the_same_latents(vae: WanVAE, golden: dict[str, Tensor]) -> None:
    assert vae.encoder is not None
    folded = fold(stack_frames(golden["pixels"]), vae.config.patch_size)
    history = History(rows=1)
    parts = [vae.encoder(folded[:1], history), vae.encoder(folded[1:], history)]
    moments = torch.cat(parts)[None].permute(0, 2, 1, 3, 4)
    assert worst(moments, golden["enc_moments"]) <= ATOL


def test_memory_does_not_grow_with_the_clip(vae: WanVAE, monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[int, int] = {}
    widest: list[int] = []
    histories: list[History] = []
    made = History.__init__

    def remember(self: History, rows: int) -> None:
        made(self, rows)
        histories.append(self)

    monkeypatch.setattr(History, "__init__", remember)
    assert vae.encoder is not None
    seen = vae.encoder.conv_in.register_forward_pre_hook(lambda _, a: widest.append(len(a[0])))
    for frames in (9, 17):
        vae.encode(torch.rand(1, 3, frames, 16, 16))
        kept = histories[-1]._frames.values()
        held[frames] = sum(tensor.untyped_storage().nbytes() for tensor in kept)
    seen.remove()
    assert held[9] == held[17] > 0
    assert widest == [1, 4, 4, 1, 4, 4, 4, 4]


@pytest.mark.parametrize("side", [1, 3])
def test_chunks_convolve_as_the_whole_clip(side: int) -> None:
    torch.manual_seed(3)
    conv = CausalConv("conv", 5, 4, place(), side=side)
    randomize(conv, seed=1)
    clip = torch.randn(2, 5, 9, 6, 7)
    kernel = conv.weight.permute(1, 4, 0, 2, 3)
    padded = functional.pad(clip, (side // 2,) * 4 + (2, 0))
    wanted = functional.conv3d(padded, kernel, conv.bias)
    history = History(rows=2)
    bounds = (0, 1, 2, 6, 9)
    parts = [conv(stack_frames(clip[:, :, a:b]), history) for a, b in itertools.pairwise(bounds)]
    got = unstack_frames(torch.cat(parts), 2)
    assert worst(got, wanted) <= 1e-5


# ------------------------------------------------------------------ only what counts


def test_one_frame_costs_one_slice_of_every_kernel(
    vae: WanVAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices: list[int] = []
    tap = CausalConv._tap

    def counted(self: CausalConv, frames: Tensor, index: int, bias: Tensor | None) -> Tensor:
        slices.append(index)
        return tap(self, frames, index, bias)

    monkeypatch.setattr(CausalConv, "_tap", counted)
    vae.encode(torch.zeros(1, 3, 1, 32, 32))
    assert vae.encoder is not None
    convs = [m for m in vae.encoder.modules() if isinstance(m, CausalConv)]
    assert slices == [-1] * len(convs)


def test_frames_are_counted() -> None:
    profile = Profile()
    counted = golden_vae(profile=profile)
    counted.encode(torch.zeros(2, 3, 1, 16, 16))
    assert profile.counters["vae_encoded_frames"] == 2
    assert profile.counters["vae_decoded_frames"] == 0
    counted.decode(torch.zeros(1, 8, 2, 1, 1))
    assert profile.counters["vae_decoded_frames"] == 5


def test_parts_that_are_left_out_are_not_read() -> None:
    whole, config = golden_vae(), VAEConfig.from_folder(VAE)
    encoder = WanVAE(config, place(), decoder=False)
    decoder = WanVAE(config, place(), encoder=False)
    read = [part.load(VAE).bytes_read for part in (whole, encoder, decoder)]
    assert read[1] + read[2] == read[0]
    with pytest.raises(ConfigError, match=r"decoder=True"):
        encoder.decode(torch.zeros(1, 8, 1, 2, 2))
    with pytest.raises(ConfigError, match=r"encoder=True"):
        decoder.encode(torch.zeros(1, 3, 1, 16, 16))


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "shape", [(1, 3, 2, 16, 16), (1, 3, 1, 24, 16), (3, 1, 16, 16), (1, 4, 1, 16, 16)]
)
def test_clips_without_latents_are_refused(vae: WanVAE, shape: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match=r"1 \+ 4k frames"):
        vae.encode(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(1, 7, 1, 2, 2), (8, 1, 2, 2), (1, 8, 0, 2, 2)])
def test_other_latents_are_refused(vae: WanVAE, shape: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="latents must have shape"):
        vae.decode(torch.zeros(shape))


def test_folding_puts_the_column_in_front_of_the_row() -> None:
    pixels = torch.arange(3 * 4 * 6.0).view(1, 3, 4, 6)
    folded = fold(pixels, 2)
    assert folded.shape == (1, 12, 2, 3)
    assert folded[0, (1 * 2 + 1) * 2 + 0, 1, 2] == pixels[0, 1, 2 * 1 + 0, 2 * 2 + 1]
    assert torch.equal(unfold(folded, 2), pixels)
    assert fold(pixels, 1) is pixels


def test_the_released_config_is_the_default() -> None:
    config = VAEConfig.from_json({"_class_name": "AutoencoderKLWan", "some_new_key": 1})
    assert config == VAEConfig()
    assert config.encoder_widths == (160, 160, 320, 640, 640)
    assert config.decoder_widths == (1024, 1024, 1024, 512, 256)
    assert config.pixel_frames(config.latent_frames(189)) == 189


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"_class_name": "AutoencoderKL"}, "_class_name"),
        ({"is_residual": False}, "is_residual"),
        ({"attn_scales": [0.5]}, "attn_scales"),
        ({"base_dim": 10**9}, "base_dim"),
        ({"base_dim": "160"}, "base_dim"),
        ({"z_dim": True}, "z_dim"),
        ({"z_dim": 9}, "latents_mean"),
        ({"dim_mult": []}, "dim_mult"),
        ({"dim_mult": 4}, "dim_mult"),
        ({"dim_mult": [1, 2, 4, 10**6]}, "dim_mult"),
        ({"dim_mult": [1, 2, 3, 4]}, "dim_mult"),
        ({"temperal_downsample": [True, True]}, "temperal_downsample"),
        ({"temperal_downsample": [True, True, True]}, "scale_factor_temporal"),
        ({"patch_size": 4}, "in_channels"),
        ({"scale_factor_spatial": 8}, "scale_factor_spatial"),
        ({"latents_std": [0.0] * 8}, "latents_std"),
        ({"latents_mean": [float("nan")] * 8}, "latents_mean"),
        ({"latents_mean": ["0"] * 8}, "latents_mean"),
    ],
)
def test_hostile_configs_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VAEConfig.from_json(vae_json() | changes)


def test_a_missing_or_other_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        VAEConfig.from_folder(tmp_path / "vae")
    with pytest.raises(ShapeMismatch, match="conv_in"):
        WanVAE(VAEConfig.from_json(vae_json() | {"base_dim": 8}), place()).load(VAE)
    more = VAEConfig.from_json(vae_json() | {"num_res_blocks": 2})
    with pytest.raises(MissingTensors, match=r"resnets\.1"):
        WanVAE(more, place()).load(VAE)
