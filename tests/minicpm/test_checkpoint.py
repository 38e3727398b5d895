"""Loading is strict and names what is wrong; naming family and head are told by the tensors."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phyai import Engine
from phyai.errors import CheckpointError, ConfigError, WeightUpdateError
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.names import released_name
from phyai.weights import save_sharded
from tests.minicpm.minicpm_engines import ROOT, engine_of, random_rows, request_of

Tensors = dict[str, Tensor]
HEAD, TEXT, VISION = "action_head", "vlm.llm.model", "vlm.vpm"
EMBEDDING, LM_HEAD = f"{TEXT}.embed_tokens.weight", "vlm.llm.lm_head.weight"
REQUEST = request_of(random_rows([[(4, 8)], [(4, 4), (4, 4)]], [5, 9]))


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return load_file(ROOT / "model.safetensors")


@pytest.fixture(scope="module")
def wanted() -> Tensor:
    with engine_of() as engine:
        return actions(engine)


def actions(engine: Engine) -> Tensor:
    out: Tensor = engine.step(REQUEST)
    return out


def write(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint folder with the golden config."""
    folder.mkdir(exist_ok=True)
    if config is None:
        shutil.copy(ROOT / "config.json", folder)
    else:
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def config_json() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((ROOT / "config.json").read_text("utf-8"))
    return data


def transformers_names() -> dict[str, str]:
    """Return stored name -> the same tensor's name in the other family, below ``vlm.``."""
    names: dict[str, str] = json.loads((ROOT / "key_map.json").read_text("utf-8"))
    held = {old: new for old, new in names.items() if not old.startswith(HEAD)}
    return {old: f"vlm.{new}" for old, new in held.items()}


# ---------------------------------------------------------------- names


def test_the_whole_map_of_names_is_known(tensors: Tensors) -> None:
    """One to one: every name of the other family means the released one."""
    names = transformers_names()
    assert len(names) > 100
    assert all(released_name(new) == old for old, new in names.items())
    assert all(released_name(name) == name for name in tensors)


FAMILIES: dict[str, Callable[[str], str]] = {
    "released": lambda name: name,
    "transformers": lambda name: transformers_names().get(name, name),
    "transformers, bare": lambda name: transformers_names().get(name, name).removeprefix("vlm."),
    "data parallel": lambda name: f"module.{name}",
    "trainer": lambda name: f"model.{name}",
    "both wrappers": lambda name: f"module.model.{transformers_names().get(name, name)}",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_naming_family_loads(
    family: str, tensors: Tensors, wanted: Tensor, tmp_path: Path
) -> None:
    named = {FAMILIES[family](name): t for name, t in tensors.items()}
    if family == "transformers":
        assert "vlm.model.language_model.norm.weight" in named
    with engine_of(checkpoint_dir=str(write(tmp_path / "c", named))) as engine:
        assert torch.equal(actions(engine), wanted)


def test_a_remap_of_the_caller_comes_first(
    tensors: Tensors, wanted: Tensor, tmp_path: Path
) -> None:
    folder = write(tmp_path / "c", {f"policy/{name}": t for name, t in tensors.items()})
    for remap in ({"policy/": ""}, lambda name: name.removeprefix("policy/")):
        with engine_of(checkpoint_dir=str(folder), weight_remap=remap) as engine:
            assert torch.equal(actions(engine), wanted)


def test_shards_and_unused_tensors_change_nothing(
    tensors: Tensors, wanted: Tensor, tmp_path: Path
) -> None:
    more = {
        **tensors,
        "vlm.mtp.layers.0.norm.weight": torch.ones(3),
        "vlm.llm.mtp.fc.weight": torch.ones(3),
        "vlm.llm.model.rotary_emb.inv_freq": torch.ones(4),
    }
    save_sharded(more, tmp_path, 600_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    shutil.copy(ROOT / "config.json", tmp_path)
    with engine_of(checkpoint_dir=str(tmp_path)) as engine:
        assert torch.equal(actions(engine), wanted)
    with engine_of(checkpoint_dir=str(tmp_path), embedding_in_file=True) as engine:
        assert torch.equal(actions(engine), wanted)


# ---------------------------------------------------------------- the tied output embedding


def test_the_tied_output_embedding_may_be_absent(
    tensors: Tensors, wanted: Tensor, tmp_path: Path
) -> None:
    kept = {name: t for name, t in tensors.items() if name != LM_HEAD}
    with engine_of(checkpoint_dir=str(write(tmp_path / "c", kept))) as engine:
        assert torch.equal(actions(engine), wanted)


def test_an_untied_output_embedding_is_told_and_left_out(
    tensors: Tensors, wanted: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {**tensors, LM_HEAD: tensors[LM_HEAD] + 1}
    with (
        caplog.at_level(logging.WARNING, "phyai"),
        engine_of(checkpoint_dir=str(write(tmp_path / "c", other))) as engine,
    ):
        assert torch.equal(actions(engine), wanted)
    assert any(LM_HEAD in message and EMBEDDING in message for message in caplog.messages)


def test_a_tied_one_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "phyai"), engine_of():
        assert not any(LM_HEAD in message for message in caplog.messages)


# ---------------------------------------------------------------- the two heads


def shared(tensors: Tensors) -> Tensors:
    kept = {n: t for n, t in tensors.items() if ".action_encoder." not in n}
    kept = {n: t for n, t in kept.items() if ".action_decoder." not in n}
    return {**kept, **load_file(ROOT / "shared_head_override.safetensors")}


def test_a_shared_head_is_told_by_its_tensors_and_ignores_ids(
    tensors: Tensors, tmp_path: Path
) -> None:
    folder = write(tmp_path / "c", shared(tensors))
    assert MiniCPMRobotConfig.from_folder(folder).head.shared_head
    assert not MiniCPMRobotConfig.from_folder(ROOT).head.shared_head
    ids = [torch.tensor(pair) for pair in ([0, 0], [2, 1], [31, 700])]
    with engine_of(checkpoint_dir=str(folder)) as engine:
        first, *others = [engine.step(replace(REQUEST, embodiment_id=i)) for i in ids]
        assert all(torch.equal(first, other) for other in others)
    # an argument, as an observation's option, may be any integer
    with engine_of(checkpoint_dir=str(folder), embodiment_id=2**70) as engine:
        assert torch.equal(engine.step(replace(REQUEST, embodiment_id=None)), first)


def test_two_heads_in_one_checkpoint_are_refused(tensors: Tensors, tmp_path: Path) -> None:
    both = {**tensors, **load_file(ROOT / "shared_head_override.safetensors")}
    said = r"one action head.*layer1\.(W|b).*layer\d\.(weight|bias)"
    with pytest.raises(CheckpointError, match=said):
        engine_of(checkpoint_dir=str(write(tmp_path / "c", both))).__enter__()


# ---------------------------------------------------------------- broken checkpoints


def without(name: str) -> Callable[[Tensors], str]:
    def change(tensors: Tensors) -> str:
        del tensors[name]
        return name

    return change


def longer(name: str) -> Callable[[Tensors], str]:
    def change(tensors: Tensors) -> str:
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
        return name

    return change


def renamed(name: str) -> Callable[[Tensors], str]:
    def change(tensors: Tensors) -> str:
        tensors[f"{name}_old"] = tensors.pop(name)
        return f"{name}_old"

    return change


def extra(name: str) -> Callable[[Tensors], str]:
    def change(tensors: Tensors) -> str:
        tensors[name] = torch.ones(2)
        return name

    return change


def transposed(name: str) -> Callable[[Tensors], str]:
    def change(tensors: Tensors) -> str:
        tensors[name] = tensors[name].transpose(-1, -2).contiguous()
        return name

    return change


def poisoned(name: str, value: float) -> Callable[[Tensors], str]:
    def change(tensors: Tensors) -> str:
        tensors[name].view(-1)[3] = value
        return name

    return change


BROKEN: dict[str, Callable[[Tensors], str]] = {
    "missing text": without(f"{TEXT}.layers.1.linear_attn.A_log"),
    "missing vision": without(f"{VISION}.encoder.layers.2.mlp.fc1.bias"),
    "missing merger": without("vlm.vit_merger.linear_2.bias"),
    "missing bank": without(f"{HEAD}.action_encoder.W1.W"),
    "missing positions": without(f"{HEAD}.position_embedding.weight"),
    "missing block": without(f"{HEAD}.model.transformer_blocks.3.ff.net.2.weight"),
    "renamed": renamed(f"{TEXT}.layers.3.self_attn.q_norm.weight"),
    "extra": extra(f"{HEAD}.state_encoder.layer1.weight"),
    "extra vlm": extra("vlm.model.no_such_part.weight"),
    "shape text": longer(f"{TEXT}.layers.0.linear_attn.conv1d.weight"),
    "shape vision": longer(f"{VISION}.embeddings.position_embedding.weight"),
    "shape merger": transposed("vlm.resampler.mlp.0.mlp.2.weight"),
    "shape bank": transposed(f"{HEAD}.action_decoder.layer2.W"),
    "shape output embedding": longer(LM_HEAD),
    "too many banks": longer(f"{HEAD}.action_encoder.W2.b"),
    "NaN": poisoned(f"{TEXT}.layers.2.mlp.up_proj.weight", float("nan")),
    "infinity": poisoned(f"{HEAD}.future_tokens.weight", float("inf")),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_checkpoint_names_the_tensor(what: str, tensors: Tensors, tmp_path: Path) -> None:
    changed = {name: t.clone() for name, t in tensors.items()}
    name = BROKEN[what](changed)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        engine_of(checkpoint_dir=str(write(tmp_path / "c", changed))).__enter__()


def test_a_checkpoint_without_its_head_names_the_head(tensors: Tensors, tmp_path: Path) -> None:
    kept = {name: t for name, t in tensors.items() if not name.startswith(HEAD)}
    with pytest.raises(CheckpointError, match=rf"{HEAD}\."):
        engine_of(checkpoint_dir=str(write(tmp_path / "c", kept))).__enter__()


def test_a_file_is_no_folder() -> None:
    with pytest.raises(CheckpointError, match="must be a folder"):
        engine_of(checkpoint_dir=str(ROOT / "model.safetensors")).__enter__()


# ---------------------------------------------------------------- sizes


def test_the_head_is_read_from_shapes(tensors: Tensors, tmp_path: Path) -> None:
    """All but the heads; what no shape tells has the published defaults."""
    data = config_json()
    dit = {"attention_head_dim": 16}
    data["action_head_cfg"] = {"action_horizon": 6, "diffusion_model_cfg": dit}
    head = MiniCPMRobotConfig.from_folder(write(tmp_path / "c", tensors, data)).head
    assert (head.action_dim, head.state_dim, head.width, head.hidden_size) == (12, 12, 32, 40)
    assert (head.num_layers, head.ff_dim, head.output_dim) == (4, 128, 40)
    assert (head.num_target_vision_tokens, head.max_num_embodiments) == (5, 3)
    assert (head.cross_attention_dim, head.num_timestep_buckets) == (64, 1000)
    assert head.num_inference_timesteps == 4
    assert head.num_attention_heads == 2


def test_a_head_config_of_part_is_completed_from_shapes(
    tensors: Tensors, wanted: Tensor, tmp_path: Path
) -> None:
    data = config_json()
    data["action_head_cfg"] = {
        "action_horizon": 6,
        "unknown_key": {"a": 1},
        "diffusion_model_cfg": {"num_attention_heads": 2},
    }
    folder = write(tmp_path / "c", tensors, data)
    want = MiniCPMRobotConfig.from_folder(ROOT)
    assert MiniCPMRobotConfig.from_folder(folder) == want
    with engine_of(checkpoint_dir=str(folder)) as engine:
        assert torch.equal(actions(engine), wanted)


def test_absent_keys_have_the_released_values(tensors: Tensors, tmp_path: Path) -> None:
    data = config_json()
    for key in ("rope_parameters", "layer_types", "mrope_section"):
        data["text_config"].pop(key, None)
    text = MiniCPMRobotConfig.from_folder(write(tmp_path / "c", tensors, data)).text
    assert (text.rope_theta, text.partial_rotary_factor) == (1e7, 0.25)
    assert [i for i, kind in enumerate(text.layer_types) if kind == "full_attention"] == [3, 7]


def head_cfg(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["action_head_cfg"].update(changes)


def dit_cfg(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["action_head_cfg"]["diffusion_model_cfg"].update(changes)


def part_cfg(part: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data[part].update(changes)


UNSUPPORTED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "prediction": (head_cfg(prediction_type="velocity"), "prediction_type"),
    "proprio": (head_cfg(proprio_inject="token"), "proprio_inject"),
    "dit norm": (dit_cfg(norm_type="layer_norm"), "norm_type"),
    "no interleaving": (dit_cfg(interleave_self_attention=False), "interleave_self_attention"),
    "dit width": (dit_cfg(attention_head_dim=20), "width"),
    "dit layers": (dit_cfg(num_layers=6), "transformer_blocks"),
    "banks": (head_cfg(max_num_embodiments=5), "action_encoder"),
    "state": (head_cfg(state_dim=13), r"action_encoder\.W1"),
    "horizon": (head_cfg(action_horizon=17), "max_seq_len"),
    "huge": (head_cfg(action_horizon=10**9), "action_horizon"),
    "text of a size": (part_cfg("text_config", hidden_size="64"), "hidden_size"),
    "flag": (head_cfg(action_horizon=True), "action_horizon"),
    "context": (dit_cfg(cross_attention_dim=48), "cross_attention_dim"),
    "rope": (
        lambda data: data["text_config"]["rope_parameters"].update(rope_type="yarn"),
        "rope_type",
    ),
    "layer kinds": (part_cfg("text_config", layer_types=["sliding"] * 8), "layer_types"),
    "layer count": (part_cfg("text_config", num_hidden_layers=7), "layer_types"),
    "activation": (part_cfg("vision_config", hidden_act="relu"), "hidden_act"),
    "merger": (lambda data: data.update(merge_kernel_size=[4, 4]), "merge_kernel_size"),
    "merger place": (part_cfg("vision_config", insert_layer_id=4), "insert_layer_id"),
    "image token": (lambda data: data.update(image_token_id=320), "image_token_id"),
    "no text": (lambda data: data.pop("text_config"), "text_config"),
    "mode": (lambda data: data.update(downsample_mode="8x"), "downsample_mode"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_a_config_that_cannot_run_is_refused(what: str, tensors: Tensors, tmp_path: Path) -> None:
    data = config_json()
    change, said = UNSUPPORTED[what]
    change(data)
    with pytest.raises((CheckpointError, ConfigError), match=said):
        engine_of(checkpoint_dir=str(write(tmp_path / "c", tensors, data))).__enter__()


# ---------------------------------------------------------------- updates and dtypes


def test_updates_take_every_family_and_change_the_actions(tensors: Tensors, wanted: Tensor) -> None:
    name = f"{HEAD}.action_decoder.layer2.b"
    other = transformers_names()[f"{TEXT}.norm.weight"]
    with engine_of() as engine:
        adapter = engine.adapter
        adapter.update_weights({name: tensors[name] + 1})
        moved = actions(engine)
        assert not torch.allclose(moved, wanted, atol=0.5)
        adapter.update_weights({f"module.{name}": tensors[name]})
        assert torch.equal(actions(engine), wanted)
        adapter.update_weights({other: tensors[f"{TEXT}.norm.weight"] + 1})
        assert not torch.allclose(actions(engine), wanted, atol=1e-3)
        adapter.update_weights({LM_HEAD: tensors[LM_HEAD]})  # read by nobody
        with pytest.raises(WeightUpdateError, match="no_such"):
            adapter.update_weights({f"{HEAD}.no_such.weight": torch.ones(1)})


def test_the_head_keeps_float32_beside_a_bf16_model() -> None:
    for given, want in ((None, torch.float32), ("bf16", torch.bfloat16)):
        with engine_of(precision="bf16", action_params_dtype=given) as engine:
            held = dict(engine.adapter.modules.named_parameters())
            assert held["expert.action_in.weight"].dtype == want
            assert held["expert.future"].dtype == want
            assert held["prefix.text.embedding"].dtype == torch.bfloat16
            decay = held["prefix.text.layers.0.mixer.decay"]
            assert decay.dtype == torch.float32
