"""A small tokenizer.json that treats prompts the way PaliGemma's does, written without training.

Same rules, far fewer pieces: BOS 2 and padding 0, spaces as "▁", every digit a token of its own,
a newline token, UTF-8 bytes for whatever has no piece. Common words of robot tasks are one token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phyai.byte_tokenizer import added_token, word_merges

_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
_NEWLINES = ("\n", "\n\n")
_SPACE = "▁"
_CHARACTERS = (
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" + ".,:;!?'\"()[]{}<>+-*/=_%&#@"
)
# Words with a space before them, and words that open a prompt.
_WORDS = (
    "a all and away back basket black block blue both bottle bottom bowl box bread brown butter "
    "button cabinet can chocolate close cloth coffee cream cube cup cut dish door drawer drop fold "
    "fork from front gently grasp gray green hand handle hold in insert into it juice kettle knife "
    "lamp left lid lift light live make microwave middle milk move mug near next object of off on "
    "onto open orange other out over peg pen pick pink place plate pot pour press pull purple push "
    "put rack red release remove right rotate round sauce shelf shirt side sink slowly soup spoon "
    "square stack State Action stand stir stove sweep table take task the then to top touch towel "
    "tower tray turn under unfold up white wine wipe with yellow"
)
_FIRST_WORDS = [
    "Task",
    "State",
    "Action",
    "close",
    "fold",
    "grasp",
    "insert",
    "lift",
    "move",
    "open",
    "pick",
    "place",
    "pour",
    "pull",
    "push",
    "put",
    "stack",
    "take",
    "turn",
    "wipe",
]


def tiny_tokenizer() -> dict[str, Any]:
    """Return the content of tokenizer.json; below 1024 pieces, equal on every call."""
    merges = word_merges([*(_SPACE + word for word in _WORDS.split()), *_FIRST_WORDS])
    pieces = [
        *_SPECIAL,
        *_NEWLINES,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        _SPACE,
        *_CHARACTERS,
        *("".join(merge) for merge in merges),
    ]
    added = [
        added_token(piece, pieces.index(piece), special=piece in _SPECIAL)
        for piece in (*_SPECIAL, *_NEWLINES)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [list(merge) for merge in merges],
        },
    }


def write_tiny_tokenizer(folder: Path) -> Path:
    """Write ``folder/tokenizer.json`` and return its path."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tiny_tokenizer(), ensure_ascii=False, indent=1), encoding="utf-8")
    return path
