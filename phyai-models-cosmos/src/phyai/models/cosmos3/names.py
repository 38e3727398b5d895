"""Names of the transformer's tensors: native training names, and those that nobody reads."""

from __future__ import annotations

import re

NATIVE_MODULES = {
    "vae2llm": "proj_in",
    "llm2vae": "proj_out",
    "action2llm": "action_proj_in",
    "llm2action": "action_proj_out",
    "sound2llm": "audio_proj_in",
    "llm2sound": "audio_proj_out",
    "sound_modality_embed": "audio_modality_embed",
    "time_embedder.mlp.0": "time_embedder.linear_1",
    "time_embedder.mlp.2": "time_embedder.linear_2",
}
NATIVE_ATTENTION = {
    "q_proj": "to_q",
    "k_proj": "to_k",
    "v_proj": "to_v",
    "o_proj": "to_out",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
    "q_proj_moe_gen": "add_q_proj",
    "k_proj_moe_gen": "add_k_proj",
    "v_proj_moe_gen": "add_v_proj",
    "o_proj_moe_gen": "to_add_out",
    "q_norm_moe_gen": "norm_added_q",
    "k_norm_moe_gen": "norm_added_k",
}
_STACK = re.compile(r"^language_model\.(?:model\.)?")
_ATTENTION = re.compile(r"^(layers\.\d+\.self_attn\.)(\w+)(\..+)$")

# The output head and the last norm of the text are stored and never used; the vision tower is of
# another model, which writes prompts.
UNUSED = (r"^lm_head\.", r"^norm\.weight$", r"^(?:visual|vision_encoder)\.")
ACTION = r"^action_(?:proj_in|proj_out|modality_embed)\b"
SOUND = r"^audio_(?:proj_in|proj_out|modality_embed)\b"
HEADS = {"action": ACTION, "sound": SOUND}


def released_name(name: str) -> str:
    """Return a tensor's name in the released layout, from that or from the native one.

    >>> released_name("language_model.model.layers.3.self_attn.q_norm_moe_gen.weight")
    'layers.3.self_attn.norm_added_q.weight'
    >>> released_name("vae2llm.bias"), released_name("layers.0.self_attn.to_q.weight")
    ('proj_in.bias', 'layers.0.self_attn.to_q.weight')
    """
    name = _STACK.sub("", name)
    for native, released in NATIVE_MODULES.items():
        if name == native or name.startswith(f"{native}."):
            return released + name[len(native) :]
    found = _ATTENTION.match(name)
    if found is None:
        return name
    layer, leg, rest = found.groups()
    return f"{layer}{NATIVE_ATTENTION.get(leg, leg)}{rest}"


def unread_of_last_layer(layers: int) -> str:
    """Return the pattern of what nobody needs of the last text layer: only K and V are."""
    parts = r"self_attn\.(?:to_q|norm_q|to_out)\.|post_attention_layernorm\.|mlp\."
    return rf"^layers\.{layers - 1}\.(?:{parts})"
