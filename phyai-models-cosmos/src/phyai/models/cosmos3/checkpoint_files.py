"""The folders of a released checkpoint besides the transformer."""

from __future__ import annotations

from pathlib import Path

from phyai.errors import CheckpointError, CheckpointNotFound
from phyai.json_files import read_json_object
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.text.tokenizer import FOLDER as TOKENIZER_FOLDER
from phyai.models.cosmos3.text.tokenizer import TextTokenizer

INDEX = "model_index.json"
VAE_FOLDER, SOUND_FOLDER = "vae", "sound_tokenizer"


def text_tokenizer(folder: Path, config: Cosmos3Config, most: int) -> TextTokenizer:
    """Return the tokenizer of a checkpoint.  most: longest text in tokens.

    Raises: CheckpointError and its kinds.
    """
    return TextTokenizer(folder / TOKENIZER_FOLDER, vocab_size=config.vocab_size, max_tokens=most)


def part_folder(folder: Path, name: str, what: str) -> Path:
    """Return a sub-folder of a checkpoint; CheckpointNotFound when there is none."""
    found = folder / name
    if not found.is_dir():
        raise CheckpointNotFound(
            f"checkpoint must have a folder {name!r} with {what}; {str(folder)!r} has none. "
            "Download the whole checkpoint."
        )
    return found


def uses_system_prompt(folder: Path | None) -> bool:
    """Return whether generation puts a system turn before prompts, by ``model_index.json``."""
    path = None if folder is None else folder / INDEX
    if path is None or not path.is_file():
        return True
    value = read_json_object(path).get("default_use_system_prompt", True)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"{path} must have default_use_system_prompt true or false; got {value!r}. Correct it."
        )
    return value
