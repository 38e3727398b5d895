"""Result files that are either whole or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phyai.errors import ConfigError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a place beside ``path`` to write to; it becomes ``path`` unless the block fails.

    Raises: ConfigError when the folder cannot be made or the file cannot be put there.
    """
    # Nobody else's, not even another thread's that writes the same file.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} must be writable; got {error}. Choose another place."
        ) from error
    finally:
        with suppress(OSError):  # what went wrong before is the error to tell
            partial.unlink(missing_ok=True)


def check_target(path: Path, suffixes: tuple[str, ...], *, force: bool = False) -> None:
    """Check where a result is to go, before anything is computed.

    suffixes: those that fit it, such as (".mp4",).  force: an existing file may be replaced.
    Raises: ConfigError.
    """
    if path.suffix.lower() not in suffixes:
        raise ConfigError(
            f"output file must end in {' or '.join(suffixes)} for this result; got {str(path)!r}. "
            "Rename it."
        )
    try:
        path.exists()
    except OSError as error:  # a name that is too long, say
        raise ConfigError(
            f"output file must have a name that is possible there; got {error}. Rename it."
        ) from error
    if path.is_dir() or (path.exists() and not force):
        what = "a folder" if path.is_dir() else "there already"
        raise ConfigError(
            f"output file must be new; got {str(path)!r}, which is {what}. Choose another name"
            f"{'' if path.is_dir() else ', or replace it with force'}."
        )
    place = path.parent
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(
            f"output file must be in a folder that can be written to; got {str(path)!r}. "
            "Choose another place."
        )
