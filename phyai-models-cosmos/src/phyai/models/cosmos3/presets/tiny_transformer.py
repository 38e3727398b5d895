"""The presets' transformer: sizes and random weights, under the official names."""

from __future__ import annotations

from typing import Any

from phyai.models.cosmos3.presets.drawing import Array, Draw
from phyai.models.cosmos3.presets.tiny_tokenizer import TINY_VOCAB

LATENT_CHANNELS = 8
SOUND_CHANNELS = 8
CONFIG: dict[str, Any] = {
    "_class_name": "Cosmos3OmniTransformer",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": TINY_VOCAB,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 5000000.0,
    "rope_scaling": {
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
        "rope_type": "default",
    },
    "rope_axes_dim": [4, 2, 2],
    "qk_norm_for_text": True,
    "use_und_k_norm_for_gen": False,
    "latent_channel": LATENT_CHANNELS,
    "latent_patch_size": 2,
    "patch_latent_dim": 4 * LATENT_CHANNELS,
    "timestep_scale": 0.001,
    "base_fps": 24,
    "enable_fps_modulation": True,
    "unified_3d_mrope_temporal_modality_margin": 15000,
    "unified_3d_mrope_reset_spatial_ids": True,
    "action_gen": True,
    "action_dim": 64,
    "num_embodiment_domains": 32,
    "sound_gen": True,
    "sound_dim": SOUND_CHANNELS,
    "sound_latent_fps": 25.0,
}
_TIME_FEATURES = 256


def transformer_config(*, sound: bool) -> dict[str, Any]:
    """Return ``transformer/config.json``; robot policies are released without sound."""
    return {**CONFIG, "sound_gen": sound}


def transformer_weights(seed: str, *, sound: bool) -> dict[str, Array]:
    """Return the tensors by official name, float32; equal on every call."""
    draw = Draw(seed)
    hidden, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
    draw.weight("embed_tokens.weight", (vocab, hidden), gain=hidden**0.5)
    draw.weight("lm_head.weight", (vocab, hidden))
    for index in range(CONFIG["num_hidden_layers"]):
        _layer(draw, f"layers.{index}")
    draw.norm("norm.weight", (hidden,))
    draw.norm("norm_moe_gen.weight", (hidden,))
    draw.linear("proj_in", hidden, CONFIG["patch_latent_dim"])
    draw.linear("proj_out", CONFIG["patch_latent_dim"], hidden)
    draw.linear("time_embedder.linear_1", hidden, _TIME_FEATURES)
    draw.linear("time_embedder.linear_2", hidden, hidden)
    _action(draw)
    if sound:
        draw.linear("audio_proj_in", hidden, CONFIG["sound_dim"])
        draw.linear("audio_proj_out", CONFIG["sound_dim"], hidden)
        draw.bias("audio_modality_embed", (hidden,))
    return draw.tensors


def _layer(draw: Draw, name: str) -> None:
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    head = CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    for norm in ("input_layernorm", "post_attention_layernorm"):
        draw.norm(f"{name}.{norm}.weight", (hidden,))
        draw.norm(f"{name}.{norm}_moe_gen.weight", (hidden,))
    attention = f"{name}.self_attn"
    for query, key, value, out, norms in (
        ("to_q", "to_k", "to_v", "to_out", ("norm_q", "norm_k")),
        ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", ("norm_added_q", "norm_added_k")),
    ):
        draw.linear(f"{attention}.{query}", queries, hidden, bias=False)
        draw.linear(f"{attention}.{key}", keys, hidden, bias=False)
        draw.linear(f"{attention}.{value}", keys, hidden, bias=False)
        draw.linear(f"{attention}.{out}", hidden, queries, bias=False)
        for norm in norms:
            draw.norm(f"{attention}.{norm}.weight", (head,))
    for expert in ("mlp", "mlp_moe_gen"):
        draw.linear(f"{name}.{expert}.gate_proj", inner, hidden, bias=False)
        draw.linear(f"{name}.{expert}.up_proj", inner, hidden, bias=False)
        draw.linear(f"{name}.{expert}.down_proj", hidden, inner, bias=False)


def _action(draw: Draw) -> None:
    """Add one pair of projections per embodiment, as rows of tables."""
    hidden, width = CONFIG["hidden_size"], CONFIG["action_dim"]
    domains = CONFIG["num_embodiment_domains"]
    gains = {"action_proj_in": hidden**0.5, "action_proj_out": width**0.5}
    for name, out in (("action_proj_in", hidden), ("action_proj_out", width)):
        # A row is a matrix [in, out] laid flat; the gain makes up for the wrong fan-in.
        draw.weight(f"{name}.fc.weight", (domains, hidden * width), gain=gains[name])
        draw.bias(f"{name}.bias.weight", (domains, out))
    draw.bias("action_modality_embed", (hidden,))
