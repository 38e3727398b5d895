"""Tensor names: every naming family of the checkpoints, as the modules claim them.

Modules claim the released names ``vlm.{llm,vpm,vit_merger,resampler}.*`` and ``action_head.*``.
Transformers' names of the vision-language model, below ``vlm.`` or by themselves, mean the same
tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from phyai.weights import Remap, remapper

EMBEDDING = "vlm.llm.model.embed_tokens.weight"
LM_HEAD = "vlm.llm.lm_head.weight"
# The two forms of the encoder and decoder of actions: a bank per embodiment, or one for all.
BANK = re.compile(r"action_head\.action_(?:encoder|decoder)\.\w+\.(?:W|b)")
SHARED = re.compile(r"action_head\.action_(?:encoder|decoder)\.\w+\.(?:weight|bias)")

# Wrappers of distributed training, and of the trainer whose model holds the policy.
_WRAPPED = re.compile(r"^(?:module\.)+")
_TRAINER = re.compile(r"^model\.(?=(?:vlm|action_head)\.)")
_BARE = re.compile(r"^(?=model\.(?:language_model|vision_tower|merger)\.|lm_head\.)")
# Order matters: the merger stands inside the tower.
_FAMILY = (
    ("vlm.model.language_model.", "vlm.llm.model."),
    ("vlm.model.vision_tower.vit_merger.", "vlm.vit_merger."),
    ("vlm.model.vision_tower.", "vlm.vpm."),
    ("vlm.model.merger.mlp.0.linear_1.", "vlm.resampler.mlp.0.mlp.0."),
    ("vlm.model.merger.mlp.0.linear_2.", "vlm.resampler.mlp.0.mlp.2."),
    ("vlm.model.merger.", "vlm.resampler."),
    ("vlm.lm_head.", "vlm.llm.lm_head."),
)
# Multi-token prediction is for generating text; the others are derived from sizes.
_UNUSED = re.compile(r"(?:^|\.)mtp\.|\.inv_freq$|\.embeddings\.position_ids$")


def released_name(name: str) -> str | None:
    """Return the claimed name of a stored tensor; None for one nobody reads.

    >>> released_name("module.model.vlm.model.language_model.norm.weight")
    'vlm.llm.model.norm.weight'
    >>> released_name("vlm.model.vision_tower.vit_merger.linear_1.bias")
    'vlm.vit_merger.linear_1.bias'
    >>> released_name("vlm.mtp.layers.0.norm.weight") is None
    True
    """
    name = _BARE.sub("vlm.", _TRAINER.sub("", _WRAPPED.sub("", name)))
    if _UNUSED.search(name):
        return None
    for old, new in _FAMILY:
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def renaming(remap: Remap) -> Callable[[str], str | None]:
    """Return the caller's remap followed by ``released_name``.

    >>> renaming({"policy.": ""})("policy.action_head.future_tokens.weight")
    'action_head.future_tokens.weight'
    """
    before = remapper(remap)

    def rename(name: str) -> str | None:
        changed = before(name)
        return None if changed is None else released_name(changed)

    return rename
