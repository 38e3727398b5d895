"""Configs of the two halves: what they read, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from phyai.backbones.qwen3_vl import Qwen3VLTextConfig, Qwen3VLVisionConfig, TextStack
from phyai.errors import ConfigError
from phyai.kernels import KernelTable
from phyai.layers import Placement
from tests.backbones.golden_backbone import FOLDER

DATA = json.loads((FOLDER / "qwen3_vl_config.json").read_text(encoding="utf-8"))


def test_sizes_are_read() -> None:
    vision = Qwen3VLVisionConfig.from_json(DATA["vision_config"])
    text = Qwen3VLTextConfig.from_json(DATA["text_config"])
    assert (vision.head_dim, vision.table_side, vision.merge) == (8, 8, 4)
    assert vision.deepstack_visual_indexes == (1, 3, 4)
    assert (text.mrope_section, text.rope_theta) == ((4, 2, 2), 5e6)


def test_theta_may_stand_with_the_sections() -> None:
    text = {k: v for k, v in DATA["text_config"].items() if k not in ("rope_scaling", "rope_theta")}
    rope = {**DATA["text_config"]["rope_scaling"], "rope_theta": 10000}
    assert Qwen3VLTextConfig.from_json({**text, "rope_parameters": rope}).rope_theta == 1e4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "got none for hidden_size"),
        ({"depth": 0}, "depth must be a positive"),
        ({"num_heads": 5}, "multiple of 4"),
        ({"num_heads": 16}, "multiple of 4"),
        ({"num_position_embeddings": 60}, "square number"),
        ({"deepstack_visual_indexes": [3, 1]}, "rising numbers below depth 6"),
        ({"deepstack_visual_indexes": [6]}, "rising numbers below depth 6"),
        ({"hidden_act": "silu"}, "hidden_act must be 'gelu_pytorch_tanh'"),
        ({"patch_size": True}, "patch_size must be a positive"),
    ],
)
def test_vision_configs_that_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3VLVisionConfig.from_json({**DATA["vision_config"], **change})


ROPE = DATA["text_config"]["rope_scaling"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "got none for vocab_size"),
        ({"head_dim": "16"}, "head_dim must be a positive"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"attention_bias": True}, "attention_bias must be false"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"rope_scaling": None}, "must have rope_scaling"),
        ({"rope_scaling": {**ROPE, "mrope_interleaved": False}}, "must be interleaved"),
        ({"rope_scaling": {**ROPE, "rope_type": "yarn"}}, "must be interleaved"),
        ({"rope_scaling": {**ROPE, "mrope_section": [4, 4, 4]}}, "half of an even head_dim"),
        ({"rope_scaling": {**ROPE, "mrope_section": [2, 3, 3]}}, "room to alternate"),
        ({"rope_theta": 0}, "rope_theta must be positive"),
    ],
)
def test_text_configs_that_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3VLTextConfig.from_json({**DATA["text_config"], **change})


def test_no_more_layers_than_there_are() -> None:
    config = Qwen3VLTextConfig.from_json(DATA["text_config"])
    at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match="num_layers must be 0 to 7; got 8"):
        TextStack("language_model", config, 8, at)
