"""The released layout: shards, native names, heads that are not there, hostile configs."""

from __future__ import annotations

import json
import re
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
)
from phyai.models.cosmos3.checkpoint import Cosmos3Weights, with_stored_heads
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.names import released_name
from phyai.weights import update_tensors
from tests.cosmos.direct_network import ROOT, Network, read_case, row_of

BANK = "action_proj_in.fc.weight"
DOWN = "layers.1.mlp_moe_gen.down_proj.weight"
LAST = "layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    parts = [load_file(file) for file in (ROOT / "transformer").glob("*.safetensors")]
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint folder without weights."""
    (tmp_path / "transformer").mkdir()
    shutil.copy(ROOT / "transformer/config.json", tmp_path / "transformer/config.json")
    return tmp_path


def saved(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, folder / "transformer/diffusion_pytorch_model.safetensors")
    return folder


def velocity(network: Network) -> Tensor:
    case = read_case("case_tr_t2v")
    row = row_of(case)
    return network.velocity([row], network.cache([row]), 714)["video"]


@pytest.fixture(scope="module")
def want() -> Tensor:
    return velocity(Network())


# Released name -> native one, as the two official implementations spell them.
MODULES = {
    "proj_in": "vae2llm",
    "proj_out": "llm2vae",
    "time_embedder.linear_1": "time_embedder.mlp.0",
    "time_embedder.linear_2": "time_embedder.mlp.2",
    "action_proj_in": "action2llm",
    "action_proj_out": "llm2action",
    "audio_proj_in": "sound2llm",
    "audio_proj_out": "llm2sound",
    "audio_modality_embed": "sound_modality_embed",
    "embed_tokens": "language_model.model.embed_tokens",
    "norm": "language_model.model.norm",
    "norm_moe_gen": "language_model.model.norm_moe_gen",
    "lm_head": "language_model.lm_head",
    "action_modality_embed": "action_modality_embed",
}
ATTENTION = {
    "to_q": "q_proj",
    "to_k": "k_proj",
    "to_v": "v_proj",
    "to_out": "o_proj",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
    "add_q_proj": "q_proj_moe_gen",
    "add_k_proj": "k_proj_moe_gen",
    "add_v_proj": "v_proj_moe_gen",
    "to_add_out": "o_proj_moe_gen",
    "norm_added_q": "q_norm_moe_gen",
    "norm_added_k": "k_norm_moe_gen",
}


def native_name(name: str) -> str:
    """Return the native name of a released one."""
    if match := re.fullmatch(r"(layers\.\d+\.self_attn\.)(\w+)(\..*)", name):
        return f"language_model.model.{match[1]}{ATTENTION[match[2]]}{match[3]}"
    if name.startswith("layers."):
        return f"language_model.model.{name}"
    module = next(m for m in MODULES if name == m or name.startswith(f"{m}."))
    return MODULES[module] + name[len(module) :]


# ---------------------------------------------------------------- names and files


def test_native_names_are_the_released_ones_in_other_words(
    folder: Path, tensors: dict[str, Tensor], want: Tensor
) -> None:
    native = {native_name(name): tensor for name, tensor in tensors.items()}
    assert len(native) == len(tensors)
    assert {released_name(name) for name in native} == set(tensors)
    moved = {name for name in native if name not in tensors}
    assert len(moved) > 0.9 * len(tensors)
    assert torch.equal(velocity(Network(folder=saved(folder, native))), want)


def test_a_transformer_folder_is_a_checkpoint_too(want: Tensor) -> None:
    inner = ROOT / "transformer"
    assert Cosmos3Config.from_folder(inner) == Cosmos3Config.from_folder(ROOT)
    assert torch.equal(velocity(Network(folder=inner)), want)


def test_the_callers_own_remap_comes_first(
    folder: Path, tensors: dict[str, Tensor], want: Tensor
) -> None:
    stored = {f"net.{native_name(name)}": tensor for name, tensor in tensors.items()}
    network = Network(folder=saved(folder, stored), remap={"net.": ""})
    assert torch.equal(velocity(network), want)
    assert network.weights.updated_name("net.vae2llm.bias") == "proj_in.bias"
    assert network.weights.updated_name("net.language_model.lm_head.weight") is None
    dropping = Cosmos3Weights(network.config, folder, remap=lambda name: None)
    assert dropping.updated_name("anything") is None


def test_what_nobody_needs_is_neither_required_nor_read(
    folder: Path, tensors: dict[str, Tensor], want: Tensor
) -> None:
    unused = re.compile(
        r"lm_head\.|norm\.weight|layers\.2\.(mlp\.|post_attention_layernorm\.|"
        r"self_attn\.(to_q|norm_q|to_out)\.)"
    )
    used = {name: tensor for name, tensor in tensors.items() if not unused.match(name)}
    assert len(tensors) - len(used) == 9
    network, whole = Network(folder=saved(folder, used)), Network().report
    assert torch.equal(velocity(network), want)
    assert network.report is not None
    assert whole is not None
    assert whole.bytes_read == network.report.bytes_read
    assert whole.bytes_read == sum(tensor.nbytes for tensor in used.values())
    full = Network(full_last=True).report
    assert full is not None
    assert full.bytes_read == whole.bytes_read + sum(
        tensor.nbytes for name, tensor in tensors.items() if name.startswith("layers.2.")
        and unused.match(name)
    )  # fmt: skip
    with pytest.raises(MissingTensors, match=r"layers\.2\.mlp\."):
        Network(folder=folder, full_last=True)


def test_heads_of_which_there_is_no_tensor_are_left_out(
    folder: Path,
    tensors: dict[str, Tensor],
    want: Tensor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = Cosmos3Config.from_folder(folder)
    silent = {name: tensor for name, tensor in tensors.items() if not name.startswith("audio_")}
    saved(folder, silent)
    with pytest.raises(MissingTensors, match="audio_proj_in"):
        Network(folder=folder)
    fitted = with_stored_heads(config, folder)
    assert (fitted.action_gen, fitted.sound_gen) == (True, False)
    assert "has no sound head" in caplog.text
    assert torch.equal(velocity(Network(config=fitted, folder=folder)), want)
    partial = {n: t for n, t in tensors.items() if n != "audio_proj_out.bias"}
    saved(folder, partial)
    assert with_stored_heads(config, folder).sound_gen
    with pytest.raises(MissingTensors, match=r"audio_proj_out\.bias"):
        Network(folder=folder)
    assert with_stored_heads(config, ROOT) == config


@pytest.mark.parametrize("leaf", ["action", "sound"])
def test_heads_that_are_not_wanted_are_not_read(leaf: str, want: Tensor) -> None:
    network = Network(heads={leaf: False})
    assert leaf not in network.denoiser.heads
    assert torch.equal(velocity(network), want)


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], type[Exception], str]] = {
    "missing": (lambda t: t.pop(DOWN), MissingTensors, r"layers\.1\.mlp_moe_gen\.down_proj"),
    "missing bank": (lambda t: t.pop(BANK), MissingTensors, "action_proj_in"),
    "extra": (lambda t: t.update(extra=torch.zeros(1)), UnexpectedTensors, "extra"),
    "another layer": (
        lambda t: t.update({"layers.3.mlp.up_proj.weight": torch.zeros(1)}),
        UnexpectedTensors,
        r"layers\.3",
    ),
    "few domains": (lambda t: t.update({BANK: t[BANK][:5].clone()}), ShapeMismatch, r"12, 1024"),
    "transposed": (lambda t: t.update({DOWN: t[DOWN].T.contiguous()}), ShapeMismatch, "down_proj"),
    "NaN": (
        lambda t: t.update({BANK: torch.full_like(t[BANK], float("nan"))}),
        CheckpointError,
        "action_proj_in.*must be finite",
    ),
    "both names": (
        lambda t: t.update({"vae2llm.bias": t["proj_in.bias"].clone()}),
        CheckpointError,
        "vae2llm",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_names_the_tensor(
    fault: str, folder: Path, tensors: dict[str, Tensor]
) -> None:
    spoil, error, message = FAULTS[fault]
    spoilt = dict(tensors)
    spoil(spoilt)
    with pytest.raises(error, match=message):
        Network(folder=saved(folder, spoilt))


def test_a_missing_shard_is_told(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "transformer", tmp_path / "transformer")
    shard = "diffusion_pytorch_model-00002-of-00002.safetensors"
    (tmp_path / "transformer" / shard).unlink()
    with pytest.raises(CheckpointError, match=shard):
        Network(folder=tmp_path)
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        Cosmos3Config.from_folder(tmp_path / "elsewhere")


def test_weights_are_updated_by_either_name(tensors: dict[str, Tensor]) -> None:
    network = Network()
    before = velocity(network)
    modules = network.conditioning.modules()
    for name in (DOWN, native_name(DOWN)):
        update_tensors(modules, [(name, 2 * tensors[DOWN])], remap=network.weights.updated_name)
        assert not torch.equal(velocity(network), before)
        update_tensors(modules, [(name, tensors[DOWN])], remap=network.weights.updated_name)
        assert torch.equal(velocity(network), before)
    update_tensors(modules, [(LAST, tensors[LAST])], remap=network.weights.updated_name)


def test_random_weights_need_no_folder() -> None:
    assert torch.equal(velocity(Network(folder=None)), velocity(Network(folder=None)))


# ---------------------------------------------------------------- configs


def test_absent_keys_have_the_released_values() -> None:
    config = Cosmos3Config.from_json({})
    assert config == Cosmos3Config()
    assert (config.mrope_section, config.q_size, config.patch_values) == ((24, 20, 20), 4096, 192)
    nulls = {"sound_gen": None, "rope_scaling": None, "sound_dim": None, "rope_axes_dim": None}
    assert Cosmos3Config.from_json(nulls) == config


def test_theta_may_stand_among_the_rotary_settings() -> None:
    rope = {"mrope_section": [24, 20, 20], "rope_type": "default", "rope_theta": 1_000_000}
    for name in ("rope_scaling", "rope_parameters"):
        assert Cosmos3Config.from_json({name: rope}).rope_theta == 1e6
        assert Cosmos3Config.from_json({name: rope, "rope_theta": 1e6}).rope_theta == 1e6


def test_super_has_queries_wider_than_its_hidden_state() -> None:
    config = Cosmos3Config.from_json(
        {
            "hidden_size": 5120,
            "num_attention_heads": 64,
            "num_hidden_layers": 64,
            "intermediate_size": 25600,
            "rope_theta": 5_000_000,
            "base_fps": 24,
        }
    )
    assert (config.q_size, config.kv_size, config.rope_theta) == (8192, 1024, 5e6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"_class_name": "WanTransformer3DModel"}, "_class_name must be"),
    "edge: no text norm": ({"qk_norm_for_text": False}, "qk_norm_for_text.*Edge.*not supported"),
    "edge: key norm": ({"use_und_k_norm_for_gen": True}, "use_und_k_norm.*Edge.*not supported"),
    "edge: activation": ({"hidden_act": "relu2"}, "hidden_act.*Edge.*not supported"),
    "edge: flag as text": ({"qk_norm_for_text": "no"}, "qk_norm_for_text must be True"),
    "bias": ({"attention_bias": True}, "biased attention"),
    "spatial ids": ({"unified_3d_mrope_reset_spatial_ids": False}, "running spatial positions"),
    "text": ({"hidden_size": "64"}, "hidden_size must be an integer from 1"),
    "float": ({"num_hidden_layers": 3.0}, "num_hidden_layers must be an integer"),
    "bool": ({"vocab_size": True}, "vocab_size must be an integer"),
    "zero": ({"head_dim": 0}, "head_dim must be an integer from 1"),
    "negative": ({"action_dim": -1}, "action_dim must be"),
    "huge": ({"hidden_size": 10**12}, "hidden_size must be an integer from 1 to 65536"),
    "endless": ({"intermediate_size": 10**5000}, "an integer of 16610 bits"),
    "endless theta": ({"rope_theta": 10**5000}, "rope_theta must be a positive number"),
    "list": ({"num_hidden_layers": [3] * 10**6}, "num_hidden_layers must be an integer"),
    "theta": ({"rope_theta": float("nan")}, "rope_theta must be a positive number"),
    "eps": ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be a positive number"),
    "fps": ({"base_fps": float("inf")}, "base_fps must be a positive number"),
    "flag": ({"sound_gen": 1}, "sound_gen must be true or false"),
    "heads": ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
    "odd head": ({"head_dim": 15}, "half of an even head_dim"),
    "section": ({"rope_scaling": {"mrope_section": [4, 2, 1]}}, "rope_axes_dim|add up to half"),
    "section of two": ({"rope_scaling": {"mrope_section": [4, 4]}}, "rope_axes_dim|three positive"),
    "section of text": ({"rope_scaling": {"mrope_section": "422"}}, "mrope_section must be"),
    "axes": ({"rope_axes_dim": [2, 4, 2]}, "rope_axes_dim must be mrope_section"),
    "no object": ({"rope_scaling": 8}, "rope_scaling must be an object"),
    "not interleaved": (
        {"rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": False}},
        "must be interleaved",
    ),
    "yarn": (
        {"rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "yarn"}},
        "must be interleaved, of type default",
    ),
    "two thetas": (
        {"rope_theta": 1e6, "rope_scaling": {"mrope_section": [4, 2, 2], "rope_theta": 5e6}},
        "rope_theta must be 5000000.0, as in the rotary settings; got 1000000.0",
    ),
    "theta of text": (
        {"rope_theta": None, "rope_scaling": {"mrope_section": [4, 2, 2], "rope_theta": "5e6"}},
        "rope_theta must be a positive number",
    ),
    "patch": ({"patch_latent_dim": 192}, r"patch_latent_dim must be.*= 32; got 192"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_cannot_run_is_refused(case: str) -> None:
    changes, message = REFUSED[case]
    data = json.loads((ROOT / "transformer/config.json").read_text())
    with pytest.raises(ConfigError, match=message) as caught:
        Cosmos3Config.from_json({**data, **changes})
    assert len(str(caught.value)) < 400


def test_a_section_without_room_for_its_axes_is_refused() -> None:
    data = {"head_dim": 16, "rope_scaling": {"mrope_section": [1, 4, 3]}}
    with pytest.raises(ConfigError, match="leave room to alternate"):
        Cosmos3Config.from_json(data)
