"""Finds the prompt tokenizer and turns text parts into padded token ids.

Reads ``tokenizer.json`` (tokenizers library) or ``tokenizer.model`` (SentencePiece, optional).
Truncation and padding stored in a tokenizer.json are switched off: the model's length rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phyai import hub
from phyai.errors import CheckpointError, CheckpointNotFound, MissingDependency, RequestError

Overlong = Literal["error", "truncate"]

DEFAULT_TOKENIZER = "google/paligemma-3b-pt-224"
BOS_ID = 2
PAD_ID = 0
MAX_TOKEN_CHARS = 256
"""More characters than any token of a text vocabulary stands for."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def find_tokenizer_file(folder: Path) -> Path | None:
    """Return the tokenizer file in ``folder`` or ``folder/tokenizer``; tokenizer.json first."""
    for place in (folder, folder / "tokenizer"):
        for name in TOKENIZER_FILES:
            if (place / name).is_file():
                return place / name
    return None


class PromptTokenizer:
    """Encodes prompt text to token ids; immutable and safe to share between threads.

    Make one with ``from_path`` or ``from_hub``.
    """

    def __init__(self, encode_text: Callable[[str], Sequence[int]], source: str) -> None:
        self._encode_text = encode_text
        self.source = source

    @classmethod
    def from_path(cls, path: str | Path) -> PromptTokenizer:
        """Return the tokenizer of a file, or of a folder that holds one.

        Raises: CheckpointNotFound when there is no such file; CheckpointError when it cannot be
        read; MissingDependency for a tokenizer.model without SentencePiece.
        """
        file = Path(path)
        if file.is_dir():
            found = find_tokenizer_file(file)
            if found is None:
                raise CheckpointNotFound(
                    f"tokenizer folder must hold {' or '.join(TOKENIZER_FILES)}; {str(file)!r} "
                    "has neither. Pass `--tokenizer PATH` to one of these files."
                )
            file = found
        if not file.is_file():
            raise CheckpointNotFound(
                f"tokenizer path must be an existing file or folder; got {str(file)!r}. "
                "Correct `--tokenizer PATH`."
            )
        if file.suffix == ".model":
            return cls(_sentencepiece_encoder(file), str(file))
        return cls(_tokenizers_encoder(file), str(file))

    @classmethod
    def from_hub(cls, name: str = DEFAULT_TOKENIZER) -> PromptTokenizer:
        """Return the tokenizer of a hub repository, from the local cache when possible.

        Raises: CheckpointError when the files are gated or cannot be reached.
        """
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # not a hub name: resolve() says so
            cached = try_to_load_from_cache(name, TOKENIZER_FILES[0])
            if isinstance(cached, str):  # a robot without network must not wait for one
                return cls.from_path(cached)
        try:
            found = hub.resolve(name, allow=TOKENIZER_FILES, purpose="tokenizer", progress=False)
        except CheckpointError as error:
            raise type(error)(
                f"{error} A local tokenizer.json or tokenizer.model works too: `--tokenizer PATH`."
            ) from error
        return cls.from_path(found)

    def ids(self, parts: Sequence[str]) -> list[int]:
        """Return BOS and the ids of every part, each part encoded by itself; no EOS."""
        ids = [BOS_ID]
        for part in parts:
            if part:
                ids.extend(int(token) for token in self._encode_text(part))
        return ids

    def encode(
        self, parts: Sequence[str], max_length: int, *, overlong: Overlong = "error"
    ) -> tuple[NDArray[np.int64], int]:
        """Return ids right-padded with 0 to ``max_length``, and how many are real.

        Raises: RequestError when the text needs more than ``max_length`` tokens and ``overlong``
        is "error"; "truncate" keeps the first tokens, as the official processors do.
        """
        size, most = sum(map(len, parts)), max_length * MAX_TOKEN_CHARS
        if size > most:  # minutes of tokenising for a text that cannot fit
            if overlong == "error":
                raise RequestError(
                    f"prompt must fit into {max_length} tokens; got {size:,} characters. "
                    "Shorten it."
                )
            parts = [part[:most] for part in parts]
        ids = self.ids(parts)
        if len(ids) > max_length:
            if overlong == "error":
                raise RequestError(
                    f"prompt must fit into {max_length} tokens; got {len(ids)}. "
                    'Shorten it, or set overlong="truncate" to cut it as the official code does.'
                )
            ids = ids[:max_length]
        out = np.full(max_length, PAD_ID, dtype=np.int64)
        out[: len(ids)] = ids
        return out, len(ids)


def _tokenizers_encoder(file: Path) -> Callable[[str], Sequence[int]]:
    from tokenizers import Tokenizer

    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as error:
        raise CheckpointError(
            f"tokenizer file must be a readable tokenizer.json; got {str(file)!r} ({error}). "
            "Download it again."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> Sequence[int]:
        try:
            ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises nothing narrower
            raise RequestError(
                f"prompt must be text the tokenizer can encode; got {error}. Reword it, or check "
                f"{file.name}."
            ) from error
        return ids

    return encode


def _sentencepiece_encoder(file: Path) -> Callable[[str], Sequence[int]]:
    try:
        import sentencepiece
    except ImportError as error:
        raise MissingDependency(
            f"reading {file.name} needs SentencePiece, which is not installed. "
            "Run `pip install phyai-models-pi[sentencepiece]`, or pass a tokenizer.json."
        ) from error
    try:
        processor: Any = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except Exception as error:
        raise CheckpointError(
            f"tokenizer file must be a SentencePiece model; got {str(file)!r} ({error}). "
            "Download it again."
        ) from error

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = processor.encode(text, add_bos=False, add_eos=False)
        return ids

    return encode
