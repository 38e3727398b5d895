"""A small byte-level tokenizer.json with Qwen's control tokens, written without training.

Every byte is a token; there are no merges, so a prompt has as many tokens as bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phyai.byte_tokenizer import added_token, byte_characters, byte_level, numbered

CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Control tokens, in the order of their ids."""
TINY_VOCAB = 272
_FIRST_CONTROL = 256
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tiny_tokenizer() -> dict[str, Any]:
    """Return the content of tokenizer.json; equal on every call."""
    added = [added_token(token, _FIRST_CONTROL + offset) for offset, token in enumerate(CONTROL)]
    return byte_level(numbered(byte_characters()), added=added, split_words=False)


def write_tiny_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into ``folder``."""
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 262144,
    }
    for name, data in (("tokenizer.json", tiny_tokenizer()), ("tokenizer_config.json", settings)):
        text = json.dumps(data, ensure_ascii=False, indent=1)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
