"""A small byte-level tokenizer.json with the backbone's control tokens, written without training.

Same rules as the real one, far fewer pieces: every byte has a token, common words of robot tasks
are one token, and the control tokens may stand at any id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phyai.byte_tokenizer import (
    added_token,
    byte_characters,
    byte_level,
    numbered,
    word_merges,
)

PAD, IMAGE = "<|endoftext|>", "<|image_pad|>"
CONTROL = {
    PAD: 0,
    "<|im_start|>": 1,
    "<|im_end|>": 2,
    "<|vision_start|>": 9,
    "<|vision_end|>": 10,
    "<|vision_pad|>": 11,
    IMAGE: 12,
    "<|video_pad|>": 13,
}
"""Control tokens and how far their ids are from the first one's, as in the real vocabulary."""
TINY_FIRST_CONTROL = 1000
TINY_VOCAB = 1024
"""Text pieces end well below the control tokens."""
_WORDS = (
    "user a all and apple away back black blue both bottle bottom bowl box bread brown can close "
    "cloth cup cube cut cylinder drawer drop fold from front green hand hold in into left lid "
    "lift mug move near of off on onto open orange out pick place plate pot pour press pull push "
    "put red right rotate shelf slowly stack stop stove sweep table take the then to top towel "
    "tray turn up white wipe with yellow"
)
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- for content in message.content %}"
    "{%- if content.type == 'image' %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in content %}{{- content.text }}{%- endif %}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
)


def tiny_tokenizer(first_control: int = TINY_FIRST_CONTROL) -> dict[str, Any]:
    """Return the content of tokenizer.json; equal on every call.

    first_control: id of the first control token; the others keep their distance to it.
    """
    shown = byte_characters()
    merges = word_merges(
        piece for word in _WORDS.split() for piece in (word, shown[ord(" ")] + word)
    )
    vocab = numbered([*shown, *("".join(merge) for merge in merges)])
    control = {token: first_control + offset for token, offset in CONTROL.items()}
    assert len(vocab) <= min(first_control, TINY_FIRST_CONTROL)
    added = [added_token(token, index) for token, index in control.items()]
    # In the model's own table too: that is what lets their ids leave a gap.
    return byte_level({**vocab, **control}, merges, added)


def write_tiny_tokenizer(folder: Path, first_control: int = TINY_FIRST_CONTROL) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into ``folder``."""
    settings: Mapping[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "pad_token": PAD,
        "eos_token": "<|im_end|>",
        "bos_token": None,
        "model_max_length": 262144,
    }
    for name, data in (
        ("tokenizer.json", tiny_tokenizer(first_control)),
        ("tokenizer_config.json", settings),
    ):
        text = json.dumps(data, ensure_ascii=False, indent=1)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
