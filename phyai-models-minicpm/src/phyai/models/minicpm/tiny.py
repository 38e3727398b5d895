"""Parts of the presets: byte-level tokenizers written without training, folders built once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from phyai.built_folder import cached_folder

Progress: TypeAlias = Callable[[int, int, str], None] | None
"""Called with what is done, what there is to do, and words for it."""


def byte_characters() -> list[str]:
    """Return the characters that byte-level tokenizers write bytes 0 to 255 as.

    >>> byte_characters()[ord("a")], byte_characters()[ord(" ")]
    ('a', '\\u0120')
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def added_token(token: str, index: int, *, special: bool) -> dict[str, Any]:
    """Return an entry of ``added_tokens`` in a tokenizer.json."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": special}


def versioned_folder(
    cache_dir: Path, name: str, build: Callable[[Path], None], modules: Sequence[ModuleType]
) -> Path:
    """Return a folder below ``cache_dir`` that ``build`` filled, now or at an earlier call.

    modules: those that write it. A change of their sources is a new version, in another folder.
    """
    source = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    version = hashlib.sha256(source).hexdigest()[:12]
    return cached_folder(Path(cache_dir), f"{name}-{version}", build)


def told(build: Callable[[Path], None], what: str, progress: Progress) -> Callable[[Path], None]:
    """Return ``build`` with its begin and end told to ``progress``."""

    def run(folder: Path) -> None:
        if progress is not None:
            progress(0, 1, f"building {what}")
        build(folder)
        if progress is not None:
            progress(1, 1, f"built {what}")

    return run
