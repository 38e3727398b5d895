"""Instructions and the tokenizers that encode them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from phyai.errors import CheckpointError, RequestError

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
MAX_TOKEN_CHARS = 256
"""More characters than any token of a text vocabulary stands for."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def check_prompt(prompt: Any) -> str:
    """Return the instruction.  Raises: RequestError for anything but text with a word in it."""
    if isinstance(prompt, np.ndarray) and prompt.ndim == 0:
        prompt = prompt.item()
    if not isinstance(prompt, str):
        raise RequestError(
            f"prompt must be a string; got {type(prompt).__name__}. Send the task as text."
        )
    if not prompt.strip():
        raise RequestError(f"prompt must not be empty; got {prompt!r}. Send the task as text.")
    if not prompt.isascii() and _LONE_SURROGATE.search(prompt):
        raise RequestError(
            "prompt must be valid Unicode text; got a lone surrogate. Decode it with the right "
            "encoding."
        )
    return prompt


def open_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a ``tokenizer.json``, which neither truncates nor pads.

    Raises: CheckpointError for a broken file.
    """
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"{path} must be a readable tokenizer; got {error}. Download it again."
        ) from error
    made.no_truncation()
    made.no_padding()
    return made


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the control tokens of a tokenizer, which no instruction may hold."""
    added = tokenizer.get_added_tokens_decoder().values()
    return tuple(token.content for token in added if token.special)


def check_plain(prompt: str, control: Iterable[str], max_tokens: int) -> None:
    """Raise RequestError for control tokens, and for a text that cannot fit ``max_tokens``."""
    if len(prompt) > max_tokens * MAX_TOKEN_CHARS:
        # Minutes of tokenising for a text that cannot fit.
        raise RequestError(
            f"prompt must fit into {max_tokens} tokens; got {len(prompt):,} characters. Shorten it."
        )
    held = next((token for token in control if token in prompt), None)
    if held is not None:
        raise RequestError(f"prompt must be plain text; got the control token {held!r}. Remove it.")


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text, with what the tokenizer adds.  Raises: RequestError."""
    try:
        return list(tokenizer.encode(text).ids)
    except Exception as error:  # the library raises nothing narrower
        raise RequestError(
            f"prompt must be text the tokenizer can encode; got {error}. Reword it."
        ) from error
