"""A small byte-level tokenizer.json with the model's control tokens, written without training.

Same rules as the real one, far fewer pieces: every byte has a token, common words of robot tasks
are one token, and the control tokens may stand at any id.
"""

from __future__ import annotations

import json
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
    "<think>": 24,
    "</think>": 25,
    "<image>": 26,
    "</image>": 27,
    "<image_id>": 28,
    "</image_id>": 29,
    "<slice>": 30,
    "</slice>": 31,
}
"""Control tokens and how far their ids are from the first one's; up to 13 as in the real file."""
TINY_FIRST_CONTROL = 1000
TINY_VOCAB = 1056
"""Text pieces end well below the control tokens."""
TEMPLATE = """\
{#- One turn per message; tools and videos are left out. -#}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for item in message.content %}
            {%- if item.type == 'image' %}
                {{- '<|image_pad|>' }}
            {%- elif item.type == 'text' %}
                {{- item.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is true %}
        {{- '<think>\\n' }}
    {%- else %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
_WORDS = (
    "absolute action agentview all and apple arm assistant away back black block blue bottle bowl "
    "box calvin can close command control cube cup drawer dual end effector fold franka from green "
    "gripper hand hold in into is its layout left lid lift manipulator method mug near of on onto "
    "open orange pick place plate pose push put red right robot shelf simulated single slider "
    "stack stop stove table take task the then to towel tray turn unified up user white with yellow"
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
    assert len(vocab) <= min(first_control, TINY_FIRST_CONTROL)
    control = {token: first_control + offset for token, offset in CONTROL.items()}
    added = [
        added_token(token, index, special="think" not in token) for token, index in control.items()
    ]
    # In the model's own table too: that is what lets their ids leave a gap.
    return byte_level({**vocab, **control}, merges, added)


def write_tiny_tokenizer(folder: Path, first_control: int = TINY_FIRST_CONTROL) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into ``folder``."""
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "pad_token": PAD,
        "eos_token": "<|im_end|>",
        "bos_token": None,
        "image_token": IMAGE,
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "model_max_length": 262144,
    }
    for name, data in (
        ("tokenizer.json", tiny_tokenizer(first_control)),
        ("tokenizer_config.json", settings),
    ):
        text = json.dumps(data, ensure_ascii=False, indent=1)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
