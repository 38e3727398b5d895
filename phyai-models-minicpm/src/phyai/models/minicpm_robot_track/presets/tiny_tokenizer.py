"""A small byte-level tokenizer.json, written without training; texts begin with a start token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phyai.models.minicpm.tiny import added_token, byte_characters

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
    space, merges = shown[ord(" ")], dict[tuple[str, str], None]()
    for word in _WORDS.split():
        for piece in (space + word, word, word.capitalize()):
            # Each word grows from its first character, so a word is found from the left.
            for end in range(1, len(piece)):
                merges[piece[:end], piece[end]] = None
    pieces = [*CONTROL, *shown, *("".join(merge) for merge in merges)]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    assert len(vocab) <= TINY_VOCAB
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    start = vocab[START]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(token, vocab[token], special=True) for token in CONTROL],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": START, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"SpecialToken": {"id": START, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {START: {"id": START, "ids": [start], "tokens": [START]}},
        },
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": UNKNOWN,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(merge) for merge in merges],
        },
    }


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
