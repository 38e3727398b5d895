"""Instruction text -> token ids, as the checkpoint's own tokenizer makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phyai.errors import CheckpointError, CheckpointNotFound, RequestError
from phyai.json_files import read_json_object
from phyai.models.minicpm.text import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    check_plain,
    check_prompt,
    encoded,
    open_tokenizer,
    special_tokens,
)


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
        self.path = path = tokenizer_file(path)
        self._tokenizer = open_tokenizer(path)
        self.vocab_size, self.max_tokens = vocab_size, max_tokens
        self._special = special_tokens(self._tokenizer)
        self._start = _start_token(path.parent / TOKENIZER_CONFIG, self._tokenizer)

    def encode(self, prompt: Any) -> Tensor:
        """Return the ids of an instruction, int64 [S].

        Raises: RequestError for anything but plain text that fits.
        """
        text = check_prompt(prompt)
        check_plain(text, self._special, self.max_tokens)
        ids = encoded(self._tokenizer, text)
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
