"""Instruction text -> token ids, as the checkpoint's own tokenizer makes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.errors import CheckpointError, CheckpointNotFound, RequestError
from phyai.json_files import read_json_object

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
MAX_TOKEN_CHARS = 256
"""More characters than any token of a text vocabulary stands for."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def tokenizer_file(source: Path) -> Path:
    """Return the tokenizer.json of a folder, or the file itself.  Raises: CheckpointNotFound."""
    path = source / TOKENIZER if source.is_dir() else source
    if not path.is_file():
        raise CheckpointNotFound(
            f"{TOKENIZER} must exist in the tokenizer's folder; {str(path.parent)!r} has none. "
            "Pass tokenizer."
        )
    return path


class PromptTokenizer:
    """Encodes instructions, with the start token the checkpoint's settings ask for.

    Immutable and safe to share between threads.
    """

    def __init__(self, path: Path, vocab_size: int, max_tokens: int) -> None:
        """Load ``tokenizer.json`` and the settings beside it.

        Raises: CheckpointNotFound, or CheckpointError for a broken file.
        """
        from tokenizers import Tokenizer

        self.path = path = tokenizer_file(path)
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(
                f"{path} must be a readable tokenizer; got {error}. Download it again."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size, self.max_tokens = vocab_size, max_tokens
        self._special = tuple(
            token.content for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special
        )  # fmt: skip
        self._start = _start_token(path.parent / SETTINGS, self._tokenizer)

    def encode(self, prompt: Any) -> Tensor:
        """Return the ids of an instruction, int64 [S].

        Raises: RequestError for anything but plain text that fits.
        """
        text = check_prompt(prompt)
        if len(text) > self.max_tokens * MAX_TOKEN_CHARS:  # minutes of work for nothing
            raise RequestError(
                f"prompt must fit into {self.max_tokens} tokens; got {len(text):,} characters. "
                "Shorten it."
            )
        held = next((token for token in self._special if token in text), None)
        if held is not None:
            raise RequestError(
                f"prompt must be plain text; got the control token {held!r}. Remove it."
            )
        try:
            ids = list(self._tokenizer.encode(text).ids)
        except Exception as error:  # the library raises nothing narrower
            raise RequestError(
                f"prompt must be text the tokenizer can encode; got {error}. Reword it."
            ) from error
        if self._start is not None:
            token, wanted = self._start
            if wanted and ids[:1] != [token]:
                ids = [token, *ids]
            elif not wanted and ids[:1] == [token]:
                ids = ids[1:]
        if not 1 <= len(ids) <= self.max_tokens:
            raise RequestError(
                f"prompt must have 1 to {self.max_tokens} tokens; got {len(ids)}. Shorten it, or "
                "start with a larger max_text_tokens."
            )
        if max(ids) >= self.vocab_size:
            raise RequestError(
                f"prompt tokens must be below the vocabulary of {self.vocab_size}; got {max(ids)}."
                " Pass the tokenizer of this checkpoint."
            )
        return torch.tensor(ids)


def _start_token(path: Path, tokenizer: Any) -> tuple[int, bool] | None:
    """Return the start token's id and whether texts begin with it; None = as the tokenizer does."""
    if not path.is_file():
        return None
    data = read_json_object(path)
    wanted, token = data.get("add_bos_token"), data.get("bos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(wanted, bool) or not isinstance(text, str):
        return None
    found = tokenizer.token_to_id(text)
    if found is None:
        if not wanted:
            return None
        raise CheckpointError(
            f"bos_token in {path} must be in the tokenizer; got {text!r}. Download both again."
        )
    return int(found), wanted


def check_prompt(prompt: Any) -> str:
    """Return the instruction.  Raises: RequestError for anything but text with a word in it."""
    if isinstance(prompt, np.ndarray) and prompt.ndim == 0:
        prompt = prompt.item()
    if not isinstance(prompt, str):
        raise RequestError(
            f"prompt must be a string; got {type(prompt).__name__}. Send the instruction as text."
        )
    if not prompt.strip():
        raise RequestError(
            f"prompt must not be empty; got {prompt!r}. Send the instruction, such as "
            "'Follow the target person.'"
        )
    if not prompt.isascii() and _LONE_SURROGATE.search(prompt):
        raise RequestError(
            "prompt must be valid Unicode text; got a lone surrogate. Decode it with the right "
            "encoding."
        )
    return prompt
