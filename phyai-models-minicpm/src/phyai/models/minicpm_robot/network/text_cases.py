"""What recorded cases of the text part compare, from their inputs. Names are those of the cases.

``delta_case``: all of ``case_gdn_op``.  ``layers_case``: all of ``case_text_layers``.
``prefix_case``: the ``prefix_layer0_*`` of ``case_vlm``. The rest of that, packed [M, W]:
``inputs_embeds`` is what ``HybridDecoder.inputs`` returns, ``act.layers.<i>`` what it records as
``layer_<i>_out`` and ``last_hidden_state`` what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from phyai.backbones.qwen3_vl import TextLayout
from phyai.layers import Placement
from phyai.models.minicpm_robot.config import LINEAR
from phyai.models.minicpm_robot.network.mixers import DeltaMixer, GatedAttention, MixerState
from phyai.models.minicpm_robot.network.text import HybridDecoder
from phyai.models.minicpm_robot.network.text_layout import mrope_tables, text_layout
from phyai.models.minicpm_robot.ops import DELTA


def delta_case(at: Placement, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``out_*`` and ``state_*`` of q, k, v, g, beta, without and with ``initial_state``."""
    inputs = [given[name] for name in ("q", "k", "v", "g", "beta")]
    op = at.select(DELTA, key_dim=given["k"].shape[-1], value_dim=given["v"].shape[-1])
    found = {}
    for name, state in (("zero_init", None), ("with_init", given["initial_state"])):
        found[f"out_{name}"], found[f"state_{name}"] = op(*inputs, state)
    return found


def layers_case(decoder: HybridDecoder, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what one layer of each kind makes of ``x``, and the rotary tables.

    given: ``x`` [B, T, W], ``attn_layer_index``, ``mrope_positions`` [3, B, T].
    """
    x = given["x"].to(decoder.dtype)
    rows, tokens = x.shape[:2]
    packed, layout = x.flatten(0, 1), _layout(decoder, rows, tokens)
    found: dict[str, Tensor] = {}
    linear = _mixer(decoder, decoder.config.layer_types.index(LINEAR))
    full = _mixer(decoder, int(given["attn_layer_index"]))
    assert isinstance(linear, DeltaMixer)
    assert isinstance(full, GatedAttention)
    found["y"] = linear(packed, layout, record=found.__setitem__)
    found["attn_y"] = full(packed, layout, record=lambda n, value: found.update({n: value.clone()}))
    found["cos"], found["sin"] = layout.cos, layout.sin
    per_head = {name: found.pop(name).flatten(0, 1) for name in ("core_out", "norm_gated")}
    found = {name: value.view(rows, tokens, *value.shape[1:]) for name, value in found.items()}
    cos, sin = mrope_tables(given["mrope_positions"].cpu(), decoder.config)
    return {**found, **per_head, "mrope_cos": cos, "mrope_sin": sin}


def prefix_case(decoder: HybridDecoder, embeds: Tensor, prefix_len: int) -> dict[str, Tensor]:
    """Return the first layer's states behind the first tokens of ``embeds`` [B, T, W]."""
    rows = embeds.shape[0]
    layout, states = _layout(decoder, rows, prefix_len), list[MixerState]()
    x = embeds[:, :prefix_len].to(decoder.dtype).flatten(0, 1)
    first = decoder.layers[0]
    first(x, None, layout, None, states)
    columns, recurrent = states[0]
    return {
        "prefix_layer0_conv_state": columns.transpose(1, 2),
        "prefix_layer0_recurrent_state": recurrent,
    }


def _layout(decoder: HybridDecoder, rows: int, tokens: int) -> TextLayout:
    ids = torch.zeros(tokens, dtype=torch.int64)
    return text_layout([ids] * rows, decoder.config, -1).to(decoder.embedding.device)


def _mixer(decoder: HybridDecoder, index: int) -> DeltaMixer | GatedAttention:
    mixer = decoder.layers[index].mixer
    assert isinstance(mixer, DeltaMixer | GatedAttention)
    return mixer
