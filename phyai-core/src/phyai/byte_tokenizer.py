"""Small byte-level tokenizers written without training: what presets ship in place of real ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Merge = tuple[str, str]


def byte_characters() -> list[str]:
    """Return the characters that byte-level tokenizers write bytes 0 to 255 as.

    >>> byte_characters()[ord("a")], byte_characters()[ord(" ")]
    ('a', '\\u0120')
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def word_merges(words: Iterable[str]) -> list[Merge]:
    """Return the merges that make each word one token.

    Each word grows from its first character, so a word is found from the left.

    >>> word_merges(["cap", "cat"])
    [('c', 'a'), ('ca', 'p'), ('ca', 't')]
    """
    merges = {(word[:end], word[end]): None for word in words for end in range(1, len(word))}
    return list(merges)


def numbered(pieces: Iterable[str]) -> dict[str, int]:
    """Return ids in the order of the pieces; one that comes again keeps its id."""
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}


def added_token(token: str, index: int, *, special: bool = True) -> dict[str, Any]:
    """Return an entry of ``added_tokens`` in a tokenizer.json."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": special}


def byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[Merge] = (),
    added: Sequence[Mapping[str, Any]] = (),
    *,
    split_words: bool = True,
    unknown: str | None = None,
    post_processor: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of a tokenizer.json.

    vocab: ids of all pieces; those of all bytes must be among them.  split_words: texts are cut
    into words first, so that no merge goes over a space.

    >>> byte_level(numbered(byte_characters()))["model"]["type"]
    'BPE'
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": split_words},
        "post_processor": None if post_processor is None else dict(post_processor),
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(vocab),
            "merges": [list(merge) for merge in merges],
        },
    }
