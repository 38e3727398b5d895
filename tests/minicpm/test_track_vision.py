"""The tracker's vision towers against transformers, alone and together, and the work they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from phyai.errors import ConfigError, RequestError
from phyai.layers import VisionConfig
from phyai.models.minicpm_robot_track.vision import (
    DinoConfig,
    TowerSizes,
    VisionTowers,
    dinov3,
)
from phyai.timers import Profile
from phyai.weights import randomize
from tests.minicpm.tower_reference import (
    loaded,
    official_dino,
    official_siglip,
    official_tokens,
    placement,
    pooled,
    random_frames,
    save_official,
)

ATOL = 2e-5
DINO_CASES: dict[str, dict[str, Any]] = {
    "as released": {},
    "no registers": {"num_register_tokens": 0},
    "one register": {"num_register_tokens": 1, "num_hidden_layers": 1},
    "gated, silu": {"use_gated_mlp": True, "hidden_act": "silu"},
    "gated, gelu": {"use_gated_mlp": True},
    "gated, tanh": {"use_gated_mlp": True, "hidden_act": "gelu_pytorch_tanh"},
    "plain, silu": {"hidden_act": "silu", "num_hidden_layers": 3},
    "plain, tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "key bias": {"key_bias": True},
    "key bias alone": {"key_bias": True, "query_bias": False, "value_bias": False},
    "no bias": {
        "query_bias": False,
        "value_bias": False,
        "proj_bias": False,
        "mlp_bias": False,
    },
    "sizes": {
        "hidden_size": 36,
        "num_attention_heads": 3,
        "patch_size": 9,
        "rope_theta": 31.0,
        "layer_norm_eps": 1e-3,
    },
}
SIGLIP_CASES: dict[str, dict[str, Any]] = {
    "as released": {},
    "sizes": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "patch_size": 10,
        "image_size": 64,
        "num_hidden_layers": 3,
        "layer_norm_eps": 1e-3,
    },
    "no head": {"vision_use_head": False},
}


def compare(folder: Path, dino: Any, siglip: Any, frames: Tensor) -> None:
    """Compare every tensor our towers show with the official models'."""
    towers = loaded(
        save_official(dino, folder / "dino"),
        save_official(siglip, folder / "siglip"),
        coarse_tokens=4,
        fine_tokens=9,
    )
    seen: dict[str, Tensor] = {}
    coarse, fine = towers(frames, seen.__setitem__)
    tokens = official_tokens(dino, siglip, frames)
    want = {
        **tokens,
        **pooled(tokens["dino_tokens"], tokens["siglip_tokens"], {"coarse": 4, "fine": 9}),
    }
    assert seen.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(seen[name], tensor, atol=ATOL, rtol=0, msg=name)
    assert torch.equal(seen["coarse"], coarse)
    assert torch.equal(seen["fine"], fine)
    assert float(want["dino_tokens"].std()) > 0.1
    assert float(want["siglip_tokens"].std()) > 0.1


@pytest.mark.parametrize("case", DINO_CASES)
def test_dino_as_transformers(case: str, tmp_path: Path) -> None:
    compare(tmp_path, official_dino(**DINO_CASES[case]), official_siglip(), random_frames(2, 100))


@pytest.mark.parametrize("case", SIGLIP_CASES)
def test_siglip_as_transformers(case: str, tmp_path: Path) -> None:
    siglip = official_siglip(**SIGLIP_CASES[case])
    frames = random_frames(3, siglip.config.image_size)
    compare(tmp_path, official_dino(), siglip, frames)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("towers")
    return (
        save_official(official_dino(), folder / "dino"),
        save_official(official_siglip(), folder / "siglip"),
    )


def test_a_frame_is_the_same_alone_and_in_a_batch(folders: tuple[Path, Path]) -> None:
    towers, frames = loaded(*folders), random_frames(3, 100)
    together = towers(frames)
    for i in range(3):
        alone = towers(frames[i : i + 1])
        for one, all_of_them in zip(alone, together, strict=True):
            torch.testing.assert_close(one[0], all_of_them[i], atol=2e-6, rtol=0)
    assert not torch.allclose(together[0][0], together[0][1], atol=1e-3)


def test_float_frames_hold_the_same_values(folders: tuple[Path, Path]) -> None:
    towers, frames = loaded(*folders), random_frames(1, 100)
    for a, b in zip(towers(frames), towers(frames.float()), strict=True):
        assert torch.equal(a, b)


def test_low_precision_is_close_and_gives_float32(folders: tuple[Path, Path]) -> None:
    frames = random_frames(2, 100)
    exact, rounded = (loaded(*folders, dtype)(frames) for dtype in (torch.float32, torch.bfloat16))
    for a, b in zip(exact, rounded, strict=True):
        assert b.dtype == torch.float32
        assert not torch.equal(a, b)
        assert functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.999


def test_features_depend_on_where_things_are(folders: tuple[Path, Path]) -> None:
    """Patches moved by one whole patch give other features, not the same ones moved."""
    towers = loaded(*folders)
    image = torch.randn(1, 3, 96, 96, generator=torch.Generator().manual_seed(3))
    image = functional.pad(image, (0, 4, 0, 4))
    moved = image[:, :, :96, :96].roll(16, dims=3)
    first, second = (
        towers.dino(x).unflatten(1, (6, 6)) for x in (image, functional.pad(moved, (0, 4, 0, 4)))
    )
    assert not torch.allclose(first.roll(1, dims=2), second, atol=1e-3)


# ---------------------------------------------------------------- work


def random_towers(**options: Any) -> VisionTowers:
    sizes = TowerSizes(
        DinoConfig(32, 3, 2, 48, num_register_tokens=4), VisionConfig(24, 2, 2, 40, 14, 100)
    )
    towers = VisionTowers(sizes, placement(), **options)
    randomize(towers, 5)
    return towers


def test_the_last_layer_works_on_patches_alone() -> None:
    towers, rows = random_towers(), {}

    def heard(name: str) -> Callable[..., None]:
        def hook(_module: Any, args: tuple[Tensor], _out: Any) -> None:
            rows[name] = args[0].shape[1]

        return hook

    for i, block in enumerate(towers.dino.blocks):
        for part in ("out", "mlp", "qkv"):
            getattr(block, part).register_forward_hook(heard(f"{i}.{part}"))
    towers(random_frames(2, 100))
    prefix = 5
    assert rows == {
        f"{i}.{part}": 36 + (0 if i == 2 and part != "qkv" else prefix)
        for i in range(3)
        for part in ("out", "mlp", "qkv")
    }


def test_registers_are_looked_at() -> None:
    towers, frames = random_towers(), random_frames(1, 100)
    before = towers(frames)[1]
    towers.dino.registers.data.mul_(-1.0)
    assert not torch.allclose(before, towers(frames)[1], atol=1e-4)


def test_tables_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    towers = random_towers()

    def refuse(*_args: Any) -> None:
        raise AssertionError("tables are made at construction")

    monkeypatch.setattr(dinov3, "rotations", refuse)
    monkeypatch.setattr(torch, "arange", refuse)
    monkeypatch.setattr(torch, "tensor", refuse)
    towers(random_frames(1, 100))


def test_frames_are_counted() -> None:
    profile = Profile()
    towers = random_towers(profile=profile)
    towers(random_frames(3, 100))
    assert profile.counters["tower_frames"] == 3


def test_official_models_are_not_computed_further(folders: tuple[Path, Path]) -> None:
    """No weights of the pooling head are held."""
    names = [
        key
        for param in loaded(*folders).parameters()
        for key, _ in getattr(param, "hf_keys", [("unclaimed", None)])
    ]
    assert "unclaimed" not in names
    assert not [name for name in names if ".head." in str(name) or "mask_token" in str(name)]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "frames",
    [
        torch.zeros(1, 3, 96, 96, dtype=torch.uint8),
        torch.zeros(3, 100, 100, dtype=torch.uint8),
        torch.zeros(0, 3, 100, 100, dtype=torch.uint8),
        torch.zeros(1, 100, 100, 3, dtype=torch.uint8),
        torch.zeros(1, 3, 100, 100, dtype=torch.float64),
    ],
    ids=lambda frames: f"{frames.dtype}-{list(frames.shape)}",
)
def test_other_frames_are_refused(frames: Tensor) -> None:
    with pytest.raises(RequestError, match=r"frames must be uint8 or float32 \[frames, 3, 100"):
        random_towers()(frames)


def test_towers_that_do_not_fit_are_refused() -> None:
    sizes = TowerSizes(DinoConfig(32, 1, 2, 48), VisionConfig(24, 1, 2, 40, 14, 14))
    with pytest.raises(ConfigError, match="at least DINOv3's patch_size 16; got 14"):
        VisionTowers(sizes, placement())
    grey = replace(sizes, siglip=VisionConfig(24, 1, 2, 40, 14, 100, num_channels=1))
    with pytest.raises(ConfigError, match="SigLIP num_channels must be 3"):
        VisionTowers(grey, placement())
    with pytest.raises(ConfigError, match="fine_tokens must form a square grid; got 65"):
        random_towers(fine_tokens=65)
