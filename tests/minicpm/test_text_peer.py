"""The decoder against transformers' own classes, random weights, sizes unlike the golden ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.models.minicpm_robot.config import TextSizes
from phyai.models.minicpm_robot.network.mixers import MixerState
from phyai.models.minicpm_robot.network.text_layout import mrope_tables, text_layout
from tests.minicpm.text_setup import IMAGE, NAME, SMALL, close, decoder, drawn, ids

pytest.importorskip("transformers")

EQUAL_HEADS = replace(
    SMALL,
    num_attention_heads=2,
    linear_num_value_heads=2,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
    layer_types=("full_attention", "linear_attention", "linear_attention"),
    num_hidden_layers=3,
    partial_rotary_factor=0.25,
    mrope_section=(1, 1, 1),
)


def peer(config: TextSizes, weights: dict[str, Tensor], dtype: torch.dtype) -> Any:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

    given = {name: getattr(config, name) for name in TextSizes.__slots__}
    given["layer_types"] = list(config.layer_types)
    rope = {
        "rope_type": "default",
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.partial_rotary_factor,
        "mrope_section": list(config.mrope_section),
        "mrope_interleaved": True,
    }
    for name in ("rope_theta", "partial_rotary_factor", "mrope_section"):
        del given[name]
    made = Qwen3_5TextConfig(**given, rope_parameters=rope)
    made._attn_implementation = "eager"
    model = Qwen3_5TextModel(made).eval()
    named = {key.removeprefix(f"{NAME}."): value for key, value in weights.items()}
    model.load_state_dict(named, strict=True)
    return model.to(dtype)


@pytest.mark.parametrize("config", [SMALL, EQUAL_HEADS], ids=["grouped", "equal"])
@pytest.mark.parametrize("tokens", [1, 9, 100])
def test_fp32(config: TextSizes, tokens: int) -> None:
    model = decoder(config, seed=4)
    other = peer(config, drawn(model, 4), torch.float32)
    (row,) = ids(tokens)
    layout = text_layout([row], config, IMAGE)
    states: list[MixerState] = []
    with torch.no_grad():
        theirs = other(input_ids=row[None], use_cache=True)
        got = model(model.inputs(layout), layout, states=states)
    close(got, theirs.last_hidden_state[0], 5e-5)
    cache = theirs.past_key_values
    for i, kind in enumerate(config.layer_types):
        if kind == "linear_attention":
            columns, recurrent = states[i]
            held = cache.get_conv_state(i, state_idx=0)
            close(columns.transpose(1, 2)[..., -held.shape[-1] :], held, 5e-5)
            close(recurrent, cache.get_recurrent_state(i, state_idx=0), 5e-5)


def test_bf16() -> None:
    (row,) = ids(100)
    layout, ours, official = text_layout([row], SMALL, IMAGE), 0.0, 0.0
    for seed in (4, 5, 6):
        model, wide = decoder(SMALL, torch.bfloat16, seed=seed), decoder(SMALL, seed=seed)
        other = peer(SMALL, drawn(model, seed), torch.bfloat16)
        with torch.no_grad():
            theirs = other(input_ids=row[None]).last_hidden_state[0].float()
            got = model(model.inputs(layout), layout).float()
            exact = wide(wide.inputs(layout), layout)
        assert cosine(got, theirs) > 0.999
        ours += 1 - cosine(got, exact)
        official += 1 - cosine(theirs, exact)
    # no further from the truth than they are
    assert ours < 1.3 * official


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def test_rotary_tables_of_positions_that_differ() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    config = replace(SMALL, head_dim=64, partial_rotary_factor=0.5, mrope_section=(7, 5, 4))
    other = peer(replace(config, layer_types=("linear_attention",), num_hidden_layers=1),
                 drawn(decoder(replace(config, layer_types=("linear_attention",)))),
                 torch.float32).config  # fmt: skip
    positions = torch.randint(0, 500, (3, 2, 11), generator=torch.Generator().manual_seed(0))
    want = Qwen3_5TextRotaryEmbedding(other)(torch.zeros(1), positions)
    for mine, theirs in zip(mrope_tables(positions, config), want, strict=True):
        close(mine, theirs, 1e-6)
