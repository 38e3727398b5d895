"""PiConfig: files of both families, and every refusal names what is wrong."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError
from phyai.models.pi.config import GEMMA_VARIANTS, GemmaConfig, PiConfig, RTCConfig, SiglipConfig

GOLDEN = Path(__file__).parents[1] / "golden"
FEATURES = {
    "observation.images.front": {"type": "VISUAL", "shape": [3, 224, 224]},
    "observation.state": {"type": "STATE", "shape": [8]},
}
BASE: dict[str, Any] = {
    "type": "pi0",
    "input_features": FEATURES,
    "output_features": {"action": {"type": "ACTION", "shape": [7]}},
}


def _write(folder: Path, data: object, arch: object | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(data))
    if arch is not None:
        (folder / "arch.json").write_text(json.dumps(arch))
    return folder


@pytest.mark.parametrize("model", ["pi0", "pi05"])
def test_golden_folder_gives_arch_sizes_and_features(model: Any) -> None:
    config = PiConfig.from_folder(GOLDEN / model, model)
    assert config.vision.hidden_size == 48
    assert config.text.vocab_size == 512
    assert config.expert.hidden_size == 40
    assert config.num_image_tokens == 16
    assert config.chunk_size == config.n_action_steps == 10
    assert (config.state_dim, config.action_dim) == (5, 7)
    assert (config.max_state_dim, config.max_action_dim) == (6, 8)
    assert config.tokenizer_max_length == 24
    assert config.image_resolution == (56, 56)
    mode = "MEAN_STD" if model == "pi0" else "QUANTILES"
    assert config.normalization_mapping == {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}


@pytest.mark.parametrize(("model", "length"), [("pi0", 48), ("pi05", 200)])
def test_default_is_the_released_model(model: Any, length: int) -> None:
    config = PiConfig.default(model)
    assert config.tokenizer_max_length == length
    assert config.num_cameras == 3
    assert config.state_dim == config.action_dim == 32
    assert config.vision.num_patches == 256
    assert (config.text.num_hidden_layers, config.expert.hidden_size) == (18, 1024)


def test_config_is_hashable_and_picklable() -> None:
    config = PiConfig.default("pi05")
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(PiConfig.default("pi05"))


def test_empty_cameras_are_appended_once(tmp_path: Path) -> None:
    config = PiConfig.from_folder(_write(tmp_path, {**BASE, "empty_cameras": 2}), "pi0")
    assert config.cameras == (
        "observation.images.front",
        "observation.images.empty_camera_0",
        "observation.images.empty_camera_1",
    )
    saved = {**FEATURES, "observation.images.empty_camera_0": FEATURES["observation.images.front"]}
    again = {**BASE, "input_features": saved, "empty_cameras": 1}
    assert PiConfig.from_folder(_write(tmp_path, again), "pi0").num_cameras == 2


def test_unknown_fields_and_missing_outputs_are_accepted(tmp_path: Path) -> None:
    data = {"type": "pi0", "input_features": FEATURES, "optimizer_lr": 1, "memory_frames": 6}
    config = PiConfig.from_folder(_write(tmp_path, data), "pi0")
    assert config.action_dim is None
    assert config.camera_names == ("front",)


def test_rtc_and_relative_fields(tmp_path: Path) -> None:
    data = {
        **BASE,
        "rtc_config": {"prefix_attention_schedule": "EXP", "execution_horizon": 4, "debug": True},
        "use_relative_actions": True,
        "action_feature_names": ["a", "gripper"],
        "rtc_training_max_delay": 6,
    }
    config = PiConfig.from_folder(_write(tmp_path, data), "pi0")
    assert config.rtc == RTCConfig(prefix_attention_schedule="EXP", execution_horizon=4)
    assert config.use_relative_actions
    assert config.action_feature_names == ("a", "gripper")
    assert config.rtc_training_max_delay == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"resize_imgs_with_padding": [224, 224]}, ["resize_imgs_with_padding", "older layout"]),
        ({"proj_width": 1024}, ["proj_width"]),
        ({"num_steps": 10}, ["num_steps"]),
        ({"use_visual_memory": True}, ["use_visual_memory"]),
        ({"use_proprioceptive_memory": True}, ["use_proprioceptive_memory"]),
        ({"type": "pi05"}, ["--plugin pi05"]),
        ({"type": "act"}, ["pi0, pi05", "'act'"]),
        ({"type": 3}, ["'type'"]),
        ({"input_features": None}, ["input_features"]),
        ({"input_features": []}, ["input_features"]),
        ({"input_features": {"observation.state": FEATURES["observation.state"]}}, ["VISUAL"]),
        ({"input_features": {"x": {"shape": [3]}}}, ["'x'", "type"]),
        ({"chunk_size": "50"}, ["chunk_size"]),
        ({"chunk_size": True}, ["chunk_size"]),
        ({"min_period": "small"}, ["min_period"]),
        ({"use_peft": 1}, ["use_peft"]),
        ({"dtype": 16}, ["dtype"]),
        ({"image_resolution": 224}, ["image_resolution"]),
        ({"paligemma_variant": "gemma_7b"}, ["paligemma_variant", "gemma_2b"]),
        ({"action_feature_names": "x"}, ["action_feature_names"]),
        ({"normalization_mapping": {"STATE": 3}}, ["STATE"]),
        ({"output_features": {"action": {"type": "ACTION", "shape": []}}}, ["action", "shape"]),
        ({"rtc_config": {"execution_horizon": "x"}}, ["rtc_config", "execution_horizon"]),
    ],
)
def test_bad_files_name_the_field(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    folder = _write(tmp_path, {**BASE, **change})
    with pytest.raises(CheckpointError) as caught:
        PiConfig.from_folder(folder, "pi0")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"n_action_steps": 51}, "n_action_steps"),
        ({"min_period": 5}, "min_period"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"max_state_dim": 4}, "state_dim"),
        ({"image_resolution": [224, 112]}, "image_resolution"),
        ({"dtype": "float16"}, "dtype"),
        ({"normalization_mapping": {"STATE": "ZSCORE"}}, "STATE"),
        ({"rtc_config": {"prefix_attention_schedule": "SQRT"}}, "prefix_attention_schedule"),
        ({"rtc_training_max_delay": 50}, "rtc_training_max_delay"),
        ({"chunk_size": 10**30}, "chunk_size must be at most"),
        ({"num_inference_steps": 201}, "num_inference_steps must be at most"),
        ({"tokenizer_max_length": 10**9}, "tokenizer_max_length must be at most"),
    ],
)
def test_impossible_values(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        PiConfig.from_folder(_write(tmp_path, {**BASE, **change}), "pi0")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_hidden_layers", 3, ["num_hidden_layers", "3", "18"]),
        ("num_attention_heads", 4, ["num_attention_heads", "4", "8"]),
        ("num_key_value_heads", 2, ["num_key_value_heads", "2", "1"]),
        ("head_dim", 128, ["head_dim", "128", "256"]),
    ],
)
def test_expert_must_match_the_language_model(field: str, value: int, words: list[str]) -> None:
    expert = dataclasses.replace(GEMMA_VARIANTS["gemma_300m"], **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        PiConfig(model="pi0", expert=expert)
    for word in words:
        assert word in str(caught.value)


def test_sub_configs_check_their_sizes() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads"):
        SiglipConfig(hidden_size=50)
    with pytest.raises(ConfigError, match="patch_size"):
        SiglipConfig(image_size=225)
    with pytest.raises(ConfigError, match="head_dim"):
        GemmaConfig(head_dim=3)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        PiConfig.from_folder(tmp_path, "pi0")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        PiConfig.from_folder(tmp_path, "pi0")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="object"):
        PiConfig.from_folder(tmp_path, "pi0")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="'type'"):
        PiConfig.from_folder(tmp_path, "pi0")
    _write(tmp_path, {"input_features": FEATURES})
    with pytest.raises(CheckpointError, match="'type'"):
        PiConfig.from_folder(tmp_path, "pi0")


def test_openpi_converter_file(tmp_path: Path) -> None:
    data = {
        "action_dim": 32,
        "action_horizon": 15,
        "paligemma_variant": "gemma_2b_lora",
        "action_expert_variant": "gemma_300m_lora",
        "precision": "bfloat16",
    }
    config = PiConfig.from_folder(_write(tmp_path, data), "pi05")
    assert config.family == "openpi"
    assert config.cameras == ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    assert config.chunk_size == 15
    assert config.dtype == "bfloat16"
    assert config.text == GEMMA_VARIANTS["gemma_2b"]
    assert config.state_dim is None
    del data["action_horizon"]
    with pytest.raises(CheckpointError, match="action_horizon"):
        PiConfig.from_folder(_write(tmp_path, data), "pi05")


def test_openpi_dummy_variant_and_arch(tmp_path: Path) -> None:
    data = {
        "action_dim": 32,
        "action_horizon": 4,
        "paligemma_variant": "dummy",
        "action_expert_variant": "dummy",
    }
    arch = {"vision_config": {"image_size": 28, "hidden_size": 32}}
    config = PiConfig.from_folder(_write(tmp_path, data, arch), "pi0")
    assert (config.text.hidden_size, config.expert.head_dim) == (64, 16)
    assert config.image_resolution == (28, 28)
    assert config.vision.hidden_size == 32


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"type": ' + "9" * 6000 + "}", '{"a": ' * 200_000]
)
@pytest.mark.parametrize("name", ["config.json", "arch.json"])
def test_json_that_overwhelms_the_reader(tmp_path: Path, name: str, text: str) -> None:
    (_write(tmp_path, BASE) / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        PiConfig.from_folder(tmp_path, "pi0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"min_period": float("nan")}, "finite number"),
        ({"max_period": float("inf")}, "finite number"),
        ({"empty_cameras": 10**9}, "empty_cameras' must be at most"),
    ],
)
def test_numbers_that_would_only_fail_later(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        PiConfig.from_folder(_write(tmp_path, {**BASE, **change}), "pi0")


def test_resolution_fits_the_patch_size_of_arch_json(tmp_path: Path) -> None:
    data = BASE | {"image_resolution": [16, 16]}
    arch = {"vision_config": {"patch_size": 8}}
    config = PiConfig.from_folder(_write(tmp_path, data, arch), "pi0")
    assert (config.vision.image_size, config.vision.num_patches) == (16, 4)
