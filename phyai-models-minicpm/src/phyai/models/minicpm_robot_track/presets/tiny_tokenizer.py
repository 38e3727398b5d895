"""A small byte-level tokenizer.json, written without training; texts begin with a start token."""

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

UNKNOWN, START, END = "<unk>", "<s>", "</s>"
CONTROL = (UNKNOWN, START, END)
TINY_VOCAB = 640
_WORDS = (
    "a behind black blue chair child dog door follow go green hat in jacket keep left man next of "
    "person red right robot runner shirt stay stop target the to track walk white with woman yellow"
)


def tiny_tokenizer() -> dict[str, Any]:
    """Return the content of tokenizer.json; equal on every call."""
    shown = byte_characters()
    merges = word_merges(
        piece
        for word in _WORDS.split()
        for piece in (shown[ord(" ")] + word, word, word.capitalize())
    )
    vocab = numbered([*CONTROL, *shown, *("".join(merge) for merge in merges)])
    assert len(vocab) <= TINY_VOCAB
    begins = {"SpecialToken": {"id": START, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return byte_level(
        vocab,
        merges,
        [added_token(token, vocab[token]) for token in CONTROL],
        unknown=UNKNOWN,
        post_processor={
            "type": "TemplateProcessing",
            "single": [begins, text],
            "pair": [begins, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {START: {"id": START, "ids": [vocab[START]], "tokens": [START]}},
        },
    )


def write_tiny_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into ``folder``."""
    settings: Mapping[str, Any] = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": START,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "pad_token": END,
    }
    for name, data in (("tokenizer.json", tiny_tokenizer()), ("tokenizer_config.json", settings)):
        text = json.dumps(data, ensure_ascii=False, indent=1)
        (folder / name).write_text(text, encoding="utf-8")
