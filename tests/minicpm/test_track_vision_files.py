"""The towers' released folders: names, what is skipped, and what is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, SiglipVisionModel

from phyai.errors import (
    CheckpointError,
    MissingTensors,
    ShapeMismatch,
    UnexpectedTensors,
    WeightUpdateError,
)
from phyai.models.minicpm_robot_track.vision import (
    TowerSizes,
    VisionTowers,
    load_towers,
    tower_update_name,
    write_tiny_towers,
)
from phyai.weights import save_sharded, update_tensors
from tests.minicpm.tower_reference import (
    loaded,
    official_dino,
    official_siglip,
    official_tokens,
    placement,
    random_frames,
    save_official,
    save_tree,
)

SIDE = 112
LAYER = "layer.1.mlp.up_proj.weight"
GATE = "layer.0.layer_scale2.lambda1"
VISION = "vision_model.encoder.layers.1.mlp.fc1.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_towers(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def want(tiny: tuple[Path, Path]) -> Tensor:
    return features(*tiny)


@pytest.fixture
def copies(tiny: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Return copies of both folders to spoil."""
    for folder in tiny:
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / tiny[0].name, tmp_path / tiny[1].name


def features(dino: Path, siglip: Path) -> Tensor:
    fine: Tensor = loaded(dino, siglip)(random_frames(2, SIDE))[1]
    return fine


def change(folder: Path, spoil: Callable[[dict[str, Tensor]], Any]) -> None:
    """Write the folder's weights anew after ``spoil`` had them."""
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")


# ---------------------------------------------------------------- layouts


def test_tiny_folders_are_what_transformers_loads(tiny: tuple[Path, Path]) -> None:
    seen: dict[str, Tensor] = {}
    frames = random_frames(2, SIDE)
    loaded(*tiny)(frames, seen.__setitem__)
    dino, first = AutoModel.from_pretrained(tiny[0], output_loading_info=True)
    whole, second = AutoModel.from_pretrained(tiny[1], output_loading_info=True)
    for info in (first, second):
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
    for name, tensor in official_tokens(dino.eval(), whole.vision_model.eval(), frames).items():
        torch.testing.assert_close(seen[name], tensor, atol=2e-5, rtol=0, msg=name)


def test_tiny_folders_are_equal_every_time(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    for old, new in zip(tiny, write_tiny_towers(tmp_path), strict=True):
        names = sorted(path.name for path in old.iterdir())
        assert names == sorted(path.name for path in new.iterdir())
        for name in names:
            assert (old / name).read_bytes() == (new / name).read_bytes()


def test_tiny_sizes_can_be_changed(tmp_path: Path) -> None:
    folders = write_tiny_towers(
        tmp_path, dino={"num_register_tokens": 0, "use_gated_mlp": True}, siglip={"image_size": 70}
    )
    sizes = TowerSizes.from_folders(*folders)
    assert (sizes.image_size, sizes.feature_dim, sizes.dino.prefix_tokens) == (70, 80, 1)
    assert [part.shape for part in loaded(*folders)(random_frames(1, 70))] == [
        (1, 4, 80),
        (1, 64, 80),
    ]


@pytest.mark.parametrize("save", [save_official, save_tree])
def test_both_name_forms_load(save: Callable[[Any, Path], Path], tmp_path: Path) -> None:
    dino, siglip, frames = official_dino(), official_siglip(), random_frames(1, 100)
    seen: dict[str, Tensor] = {}
    loaded(save(dino, tmp_path / "dino"), save(siglip, tmp_path / "siglip"))(
        frames, seen.__setitem__
    )
    for name, tensor in official_tokens(dino, siglip, frames).items():
        torch.testing.assert_close(seen[name], tensor, atol=2e-5, rtol=0, msg=name)


def test_the_vision_half_alone_loads(tiny: tuple[Path, Path], want: Tensor, tmp_path: Path) -> None:
    half = SiglipVisionModel.from_pretrained(tiny[1])
    assert torch.equal(features(tiny[0], save_official(half, tmp_path / "half")), want)


def test_unused_tensors_may_be_absent(copies: tuple[Path, Path], want: Tensor) -> None:
    def used(tensors: dict[str, Tensor]) -> None:
        unused = ("text_model.", "logit_", "vision_model.head.", "embeddings.mask_token")
        for name in [name for name in tensors if name.startswith(unused)]:
            del tensors[name]

    for folder in copies:
        change(folder, used)
    assert torch.equal(features(*copies), want)


def test_index_tables_of_older_files_are_skipped(copies: tuple[Path, Path], want: Tensor) -> None:
    ids = {"vision_model.embeddings.position_ids": torch.arange(64)[None]}
    change(copies[1], lambda tensors: tensors.update(ids))
    assert torch.equal(features(*copies), want)


def test_shards_load(copies: tuple[Path, Path], want: Tensor) -> None:
    for folder in copies:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        save_sharded(tensors, folder, 50_000)
        assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(features(*copies), want)


def test_remap_comes_before_our_names(copies: tuple[Path, Path], want: Tensor) -> None:
    for folder in copies:
        change(
            folder,
            lambda tensors: [tensors.update({f"frozen.{n}": tensors.pop(n)}) for n in [*tensors]],
        )
    towers = VisionTowers(TowerSizes.from_folders(*copies), placement())
    with pytest.raises(MissingTensors):
        load_towers(towers, *copies)
    load_towers(towers, *copies, remap={"frozen.": ""})
    assert torch.equal(towers(random_frames(2, SIDE))[1], want)


def test_reports_tell_both_towers(tiny: tuple[Path, Path]) -> None:
    towers = VisionTowers(TowerSizes.from_folders(*tiny), placement())
    seen: list[str] = []
    dino, siglip = load_towers(
        towers, *tiny, progress=lambda _done, _total, name: seen.append(name)
    )
    assert sorted([*dino.loaded, *siglip.loaded]) == sorted(seen)
    assert all(name.startswith("dino.") for name in dino.loaded)
    assert all(name.startswith("siglip.vision_model.") for name in siglip.loaded)
    assert dino.ignored == ("dino.embeddings.mask_token",)
    assert {name.split(".")[1] for name in siglip.ignored} == {
        "logit_bias",
        "logit_scale",
        "text_model",
        "vision_model",
    }


def test_updates_take_official_names(tiny: tuple[Path, Path], want: Tensor) -> None:
    towers = loaded(*tiny)
    update = {
        f"dino.model.{GATE}": torch.full((32,), 0.3),
        "dino.norm.weight": torch.full((32,), 0.7),
        "siglip.post_layernorm.bias": torch.full((48,), 0.2),
        "siglip.logit_scale": torch.zeros(1),
    }
    update_tensors(towers, update, remap=tower_update_name)
    after = towers(random_frames(2, SIDE))[1]
    assert not torch.allclose(after[..., :32], want[..., :32], atol=1e-3)
    assert not torch.allclose(after[..., 32:], want[..., 32:], atol=1e-3)
    stored = {
        f"{tower}.{name}": tensor
        for tower, folder in zip(("dino", "siglip"), tiny, strict=True)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    update_tensors(towers, stored, remap=tower_update_name)
    torch.testing.assert_close(towers(random_frames(2, SIDE))[1], want, atol=1e-6, rtol=0)
    with pytest.raises(WeightUpdateError, match="unknown name"):
        update_tensors(towers, {"dino.norm.wieght": torch.zeros(32)}, remap=tower_update_name)
    assert tower_update_name("backbone.norm.weight") == "backbone.norm.weight"


# ---------------------------------------------------------------- faults

DINO, SIGLIP = 0, 1
FAULTS: dict[str, tuple[int, Callable[[dict[str, Tensor]], Any], type[Exception], str]] = {
    "dropped": (DINO, lambda t: t.pop(LAYER), MissingTensors, f"dino.{LAYER}"),
    "dropped scale": (DINO, lambda t: t.pop(GATE), MissingTensors, f"dino.{GATE}"),
    "dropped registers": (
        DINO,
        lambda t: t.pop("embeddings.register_tokens"),
        MissingTensors,
        "embeddings.register_tokens",
    ),
    "dropped bias": (
        DINO,
        lambda t: t.pop("layer.0.attention.v_proj.bias"),
        MissingTensors,
        "attention.v_proj.bias",
    ),
    "a bias too many": (
        DINO,
        lambda t: t.update({"layer.0.attention.k_proj.bias": torch.zeros(32)}),
        UnexpectedTensors,
        "layer.0.attention.k_proj.bias",
    ),
    "a layer too many": (
        DINO,
        lambda t: t.update({"layer.2.norm1.weight": torch.zeros(32)}),
        UnexpectedTensors,
        "layer.2.norm1.weight",
    ),
    "twice": (
        DINO,
        lambda t: t.update({f"model.{LAYER}": t[LAYER].clone()}),
        CheckpointError,
        f"{LAYER}' and 'model.{LAYER}'",
    ),
    "misspelt": (
        DINO,
        lambda t: t.update({f"{LAYER}s": t.pop(LAYER)}),
        MissingTensors,
        f"{LAYER}s",
    ),
    "transposed": (
        DINO,
        lambda t: t.update({LAYER: t[LAYER].T.contiguous()}),
        ShapeMismatch,
        LAYER,
    ),
    "patches": (
        DINO,
        lambda t: t.update(
            {
                "embeddings.patch_embeddings.weight": t[
                    "embeddings.patch_embeddings.weight"
                ].reshape(32, -1)
            }
        ),
        ShapeMismatch,
        "patch_embeddings.weight",
    ),
    "NaN": (
        DINO,
        lambda t: t.update({GATE: torch.full_like(t[GATE], float("nan"))}),
        CheckpointError,
        "lambda1.*must be finite",
    ),
    "SigLIP dropped": (SIGLIP, lambda t: t.pop(VISION), MissingTensors, f"siglip.{VISION}"),
    "SigLIP extra": (
        SIGLIP,
        lambda t: t.update(extra=torch.zeros(1)),
        UnexpectedTensors,
        "siglip.extra",
    ),
    "SigLIP renamed": (
        SIGLIP,
        lambda t: t.update({VISION.replace("fc1", "fc3"): t.pop(VISION)}),
        MissingTensors,
        "fc3",
    ),
    "SigLIP positions": (
        SIGLIP,
        lambda t: t.update(
            {"vision_model.embeddings.position_embedding.weight": torch.zeros(49, 48)}
        ),
        ShapeMismatch,
        "position_embedding.weight",
    ),
    "SigLIP infinity": (
        SIGLIP,
        lambda t: t.update({VISION: t[VISION].fill_(float("inf"))}),
        CheckpointError,
        "fc1.*must be finite",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_tower_names_the_tensor(fault: str, copies: tuple[Path, Path]) -> None:
    tower, spoil, error, message = FAULTS[fault]
    change(copies[tower], spoil)
    with pytest.raises(error, match=message.replace(".", r"\.").replace(r"\.*", ".*")):
        loaded(*copies)


def test_lenient_loading_reports(copies: tuple[Path, Path]) -> None:
    change(copies[0], lambda t: t.update(extra=t.pop(GATE)))
    towers = VisionTowers(TowerSizes.from_folders(*copies), placement())
    report = load_towers(towers, *copies, strict=False)[0]
    assert (report.missing, report.unexpected) == ((f"dino.{GATE}",), ("dino.extra",))


def test_pickles_are_never_opened(copies: tuple[Path, Path]) -> None:
    (copies[0] / "model.safetensors").rename(copies[0] / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="never opened"):
        loaded(*copies)
