"""Instruction text -> token ids, in the fixed chat layout of the backbone.

A checkpoint's chat template is a program and is not run. Its layout is fixed here, and a template
that would put a system turn in front is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phyai.errors import CheckpointError, CheckpointNotFound, RequestError
from phyai.json_files import read_json_object

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
IMAGE = "<|image_pad|>"
TURN = ("<|im_start|>user\n", "<|im_end|>\n")
VISION = ("<|vision_start|>", "<|vision_end|>")
_MARKERS = ("<|im_start|>", "<|im_end|>", *VISION, IMAGE)
MAX_TOKEN_CHARS = 256
"""More characters than any token of a text vocabulary stands for."""
_PUNCTUATION = re.compile(r"[^\w\s]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# A system turn whose text the template itself brings: letters right behind the turn's opening.
_SYSTEM_TEXT = re.compile(r"<\|im_start\|>\s*system(?:\\n|\s)+[^\W\d_]")


def formalize(text: str) -> str:
    """Return the instruction as checkpoints were trained on it: lower case, no punctuation.

    >>> formalize("Pick up the RED cube, then stop!")
    'pick up the red cube then stop'
    """
    return _PUNCTUATION.sub("", text.lower())


def chat_text(instruction: str, image_tokens: Sequence[int]) -> str:
    """Return the one user turn of a request: all images, then the instruction.

    image_tokens: per image, how many tokens it becomes.

    >>> chat_text("go", [1])
    '<|im_start|>user\\n<|vision_start|><|image_pad|><|vision_end|>go<|im_end|>\\n'
    """
    images = "".join(f"{VISION[0]}{IMAGE * count}{VISION[1]}" for count in image_tokens)
    return f"{TURN[0]}{images}{instruction}{TURN[1]}"


def check_template(folder: Path) -> None:
    """Raise CheckpointError when a folder's chat template brings a system turn of its own.

    The text is only looked at: released templates open a system turn for messages that have one.
    """
    texts: list[Any] = []
    file = folder / TEMPLATE
    if file.is_file():
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{file} must be a readable text file; got {error}. Download it again."
            ) from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            texts.append(read_json_object(folder / name).get("chat_template"))
    for text in texts:
        if isinstance(text, str) and (found := _SYSTEM_TEXT.search(text)):
            raise CheckpointError(
                f"chat template in {folder} must add no system turn; got {found.group(0)!r}. "
                "This runtime builds one user turn. Use the backbone's own template, or remove "
                "the file if the checkpoint was trained without one."
            )


class PromptTokenizer:
    """Encodes a request's turn; immutable and safe to share between threads."""

    def __init__(self, path: Path, *, image_token_id: int, vocab_size: int) -> None:
        """Load ``tokenizer.json``.

        Raises: CheckpointNotFound, or CheckpointError for a file that is not this backbone's.
        """
        from tokenizers import Tokenizer

        if not path.is_file():
            raise CheckpointNotFound(
                f"{TOKENIZER} must exist in the backbone's folder; {str(path.parent)!r} has none. "
                "Pass backbone_dir."
            )
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(
                f"{path} must be a readable tokenizer; got {error}. Download it again."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.image_token_id, self.vocab_size = image_token_id, vocab_size
        absent = [name for name in _MARKERS if self._tokenizer.token_to_id(name) is None]
        if absent:
            raise CheckpointError(
                f"{path} must have the tokens of the chat layout; got no {', '.join(absent)}. "
                "Pass the tokenizer of the backbone."
            )
        if (got := self._tokenizer.token_to_id(IMAGE)) != image_token_id:
            raise CheckpointError(
                f"{path} must have {IMAGE} at {image_token_id}, as the backbone's config says; "
                f"got {got}. Pass the tokenizer and the config of one backbone."
            )
        self._special = tuple(
            token.content for token in self._tokenizer.get_added_tokens_decoder().values()
        )

    def encode(
        self, instruction: str, image_tokens: Sequence[int], max_text_tokens: int
    ) -> NDArray[np.int64]:
        """Return the ids of the whole turn, int64 [S], unpadded.

        max_text_tokens: most tokens without the images' own.
        Raises: RequestError for a text that is too long or holds tokens of the layout.
        """
        if len(instruction) > max_text_tokens * MAX_TOKEN_CHARS:
            # Minutes of tokenising for a text that cannot fit.
            raise RequestError(
                f"prompt must fit into {max_text_tokens} tokens; got {len(instruction):,} "
                "characters. Shorten it."
            )
        held = next((token for token in self._special if token in instruction), None)
        if held is not None:
            raise RequestError(
                f"prompt must be plain text; got the control token {held!r}. Remove it."
            )
        try:
            ids = self._tokenizer.encode(
                chat_text(instruction, image_tokens), add_special_tokens=False
            ).ids
        except Exception as error:  # the library raises nothing narrower
            raise RequestError(
                f"prompt must be text the tokenizer can encode; got {error}. Reword it."
            ) from error
        length = len(ids) - sum(image_tokens)
        if length > max_text_tokens:
            raise RequestError(
                f"prompt must fit into {max_text_tokens} tokens with its markers; got {length}. "
                "Shorten it, or start with a larger max_text_tokens."
            )
        out = np.asarray(ids, dtype=np.int64)
        if int(out.max()) >= self.vocab_size:
            raise RequestError(
                f"prompt tokens must be below the vocabulary of {self.vocab_size}; got "
                f"{int(out.max())}. Pass the tokenizer of this backbone."
            )
        return out

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


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
