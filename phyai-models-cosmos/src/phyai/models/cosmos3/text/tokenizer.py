"""Prompt -> token ids: the chat turns, then the two ids that open the media part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phyai.errors import CheckpointError, CheckpointNotFound, RequestError
from phyai.json_files import read_json_object
from phyai.models.cosmos3.text.template import (
    END,
    START,
    VISION_START,
    chat_text,
    check_template,
)

FOLDER = "text_tokenizer"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
MAX_TEXT_TOKENS = 4096
MAX_TOKEN_CHARS = 256
"""More characters than any token of a text vocabulary stands for."""


class TextTokenizer:
    """Encodes the turns of a request; immutable and safe to share between threads.

    eos_id, vision_start_id: the two ids behind every text, of this tokenizer's own numbering.
    """

    def __init__(self, folder: Path, *, vocab_size: int, max_tokens: int = MAX_TEXT_TOKENS) -> None:
        """Load ``tokenizer.json`` and the names of its special tokens from ``folder``.

        vocab_size: rows of the text embedding.  max_tokens: most ids of one text.
        Raises: CheckpointNotFound; CheckpointError for broken files and those of another model.
        """
        from tokenizers import Tokenizer

        path = folder / TOKENIZER
        if not path.is_file():
            raise CheckpointNotFound(
                f"{TOKENIZER} must exist in the text tokenizer's folder; {str(folder)!r} has none. "
                "Download the checkpoint's text_tokenizer folder."
            )
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(
                f"{path} must be a readable tokenizer; got {error}. Download it again."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        check_template(folder)
        self.vocab_size, self.max_tokens = vocab_size, max_tokens
        self.eos_id = self._id(path, _eos_token(folder))
        self.vision_start_id = self._id(path, VISION_START)
        for name in (START, END):
            self._id(path, name)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._control = tuple(token.content for token in added if token.special)

    def _id(self, path: Path, name: str) -> int:
        found = self._tokenizer.token_to_id(name)
        if found is None or len(self._ids(name)) != 1:
            raise CheckpointError(
                f"{path} must have {name} as one token; got none. "
                "Pass the text_tokenizer folder of this checkpoint."
            )
        if found >= self.vocab_size:
            raise CheckpointError(
                f"{path} must have ids below vocab_size {self.vocab_size}; got {found} for {name}. "
                "Pass the tokenizer and the transformer of one checkpoint."
            )
        return int(found)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(
        self, prompt: str, system: str | None = None, name: str = "prompt"
    ) -> NDArray[np.int64]:
        """Return the ids of the turns and the two appended ones, int64 [n], unpadded.

        prompt: the whole user text; "" is the unconditional branch.  system: text of a system turn.
        name: what errors call the text.
        Raises: RequestError for a text that is too long or holds tokens of the layout.
        """
        limit = self.max_tokens * MAX_TOKEN_CHARS
        if len(prompt) > limit:
            # Minutes of tokenising for a text that cannot fit.
            raise RequestError(
                f"{name} must fit into {self.max_tokens} tokens; got {len(prompt):,} characters. "
                "Shorten it."
            )
        held = next((token for token in self._control if token in prompt), None)
        if held is not None:
            raise RequestError(
                f"{name} must be plain text; got the control token {held!r}. Remove it."
            )
        try:
            ids = self._ids(chat_text(prompt, system))
        except Exception as error:  # the library raises nothing narrower
            raise RequestError(
                f"{name} must be text the tokenizer can encode; got {error}. Reword it."
            ) from error
        ids += [self.eos_id, self.vision_start_id]
        if len(ids) > self.max_tokens:
            raise RequestError(
                f"{name} must fit into {self.max_tokens} tokens with its markers; got {len(ids)}. "
                "Shorten it, or start with a larger max_text_tokens."
            )
        out = np.asarray(ids, dtype=np.int64)
        if int(out.max()) >= self.vocab_size:
            raise RequestError(
                f"{name} tokens must be below the vocabulary of {self.vocab_size}; got "
                f"{int(out.max())}. Pass the tokenizer of this checkpoint."
            )
        return out

    def text(self, ids: Any) -> str:
        """Return the text of ids, control tokens included."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def _eos_token(folder: Path) -> str:
    """Return the end-of-sequence token that ``tokenizer_config.json`` names."""
    path = folder / TOKENIZER_CONFIG
    value = read_json_object(path).get("eos_token") if path.is_file() else None
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(
            f"{path} must name eos_token as text; got {value!r}. Download it again."
        )
    return value or END
