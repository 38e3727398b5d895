"""Images and instruction -> token ids, in the turn that the chat template describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phyai.errors import CheckpointError, CheckpointNotFound, RequestError
from phyai.json_files import read_json_object
from phyai.models.minicpm.text import (
    TOKENIZER_CONFIG,
    check_plain,
    encoded,
    open_tokenizer,
    special_tokens,
)
from phyai.models.minicpm_robot.processing.template import END, IMAGE, START, ChatLayout

# Role -> its token, when tokenizer_config.json names no other.
IMAGE_TOKENS = {
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
}
_SLICE = ("slice_start_token", "slice_end_token")
_IDS = ("image_id_start_token", "image_id_end_token")


@dataclass(frozen=True, slots=True)
class ImageText:
    """What one image looks like in the prompt.

    tokens: image tokens of every view, the overview first.  slices: (rows, columns) of the others.
    """

    tokens: Sequence[int]
    slices: tuple[int, int] = (0, 0)


def image_placeholder(
    index: int, image: ImageText, *, numbered: bool = True, names: Mapping[str, str] = IMAGE_TOKENS
) -> str:
    """Return the text of image ``index`` of a row.

    >>> image_placeholder(0, ImageText([2]))
    '<image_id>0</image_id><image><|image_pad|><|image_pad|></image>'
    """
    start, end = names["image_start_token"], names["image_end_token"]
    number = f"{names[_IDS[0]]}{index}{names[_IDS[1]]}" if numbered else ""
    overview = f"{number}{start}{IMAGE * image.tokens[0]}{end}"
    rows, columns = image.slices
    parts = [f"{names[_SLICE[0]]}{IMAGE * n}{names[_SLICE[1]]}" for n in image.tokens[1:]]
    return overview + "\n".join("".join(parts[r * columns :][:columns]) for r in range(rows))


class PromptTokenizer:
    """Encodes a request's turn; immutable and safe to share between threads."""

    def __init__(
        self,
        path: Path,
        layout: ChatLayout,
        *,
        image_token_id: int,
        vocab_size: int,
        numbered: bool = True,
        sliced: bool = False,
    ) -> None:
        """Load ``tokenizer.json`` and check the tokens a request needs.

        numbered: images are numbered.  sliced: images have slices.
        Raises: CheckpointNotFound, or CheckpointError for a file that is not this model's.
        """
        if not path.is_file():
            raise CheckpointNotFound(
                f"tokenizer must be at {str(path)!r}; got no file. Pass tokenizer or processor_dir."
            )
        self._tokenizer = open_tokenizer(path)
        self.layout, self.numbered = layout, numbered
        self.image_token_id, self.vocab_size = image_token_id, vocab_size
        self._names = _token_names(path.with_name(TOKENIZER_CONFIG))
        needed = [START, END, IMAGE]
        needed += [
            name
            for role, name in self._names.items()
            if (numbered or role not in _IDS) and (sliced or role not in _SLICE)
        ]
        self._check(path, needed)
        self._control = tuple({*needed, *special_tokens(self._tokenizer)})

    def _check(self, path: Path, needed: Sequence[str]) -> None:
        split = [name for name in needed if self._tokenizer.token_to_id(name) is None]
        # A piece of text by that name would be cut up or joined to its neighbours.
        split += [
            name
            for name in needed
            if name not in split and len(self._ids(f"a{name}a")) != len(self._ids("a")) * 2 + 1
        ]
        if split:
            raise CheckpointError(
                f"{path} must have each of {', '.join(needed)} as one special token; got no such "
                f"{', '.join(split)}. Pass the tokenizer of this checkpoint."
            )
        if (got := self._tokenizer.token_to_id(IMAGE)) != self.image_token_id:
            raise CheckpointError(
                f"{path} must have {IMAGE} at image_token_id = {self.image_token_id}; got {got}. "
                "Pass the tokenizer and the config of one checkpoint."
            )

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(
        self, instruction: str, images: Sequence[ImageText], max_text_tokens: int
    ) -> NDArray[np.int64]:
        """Return the ids of the whole turn, int64 [S], unpadded.

        max_text_tokens: most tokens without the images' own.
        Raises: RequestError for a text that is too long or holds tokens of the layout.
        """
        check_plain(instruction, self._control, max_text_tokens)
        # As the official processor does: a tokenizer that opens every text with a token of its own
        # does so here too.
        ids = encoded(self._tokenizer, self.text(instruction, images))
        length = len(ids) - sum(sum(image.tokens) for image in images)
        if length > max_text_tokens:
            raise RequestError(
                f"prompt must fit into {max_text_tokens} tokens with its markers; got {length}. "
                "Shorten it, or start with a larger max_text_tokens."
            )
        out = np.asarray(ids, dtype=np.int64)
        if int(out.max()) >= self.vocab_size:
            raise RequestError(
                f"prompt tokens must be below the vocabulary of {self.vocab_size}; got "
                f"{int(out.max())}. Pass the tokenizer of this checkpoint."
            )
        return out

    def text(self, instruction: str, images: Sequence[ImageText]) -> str:
        """Return the text that ``encode`` turns into ids."""
        expanded = [
            image_placeholder(index, image, numbered=self.numbered, names=self._names)
            for index, image in enumerate(images)
        ]
        return self.layout.text(expanded, instruction)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _token_names(path: Path) -> dict[str, str]:
    """Return the image tokens by role, those of ``tokenizer_config.json`` first."""
    data = read_json_object(path) if path.is_file() else {}
    extra = data.get("extra_special_tokens")
    known = {**(extra if isinstance(extra, dict) else {}), **data}
    out = {}
    for role, default in IMAGE_TOKENS.items():
        value = known.get(role)
        if isinstance(value, dict):
            value = value.get("content")
        out[role] = value if isinstance(value, str) and value else default
    return out
