"""Folders that are built once, kept in the user's cache, and known to be whole when used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from phyai.errors import ConfigError

try:
    import fcntl
except ImportError:  # no file locks on this system: two first runs at once may both build
    fcntl = None  # type: ignore[assignment]

CHECKSUMS = "checksums.json"
Progress: TypeAlias = Callable[[int, int, str], None] | None
"""Called with what is done, what there is to do, and words for it."""


def cached_folder(cache_dir: Path, name: str, build: Callable[[Path], None]) -> Path:
    """Return ``cache_dir/name``, filled by ``build(empty folder)`` unless it is there and whole.

    A folder whose files differ from its checksums is built anew. It appears in one step, and
    processes that need it at the same time wait for the one that builds.

    Raises: ConfigError when ``cache_dir`` cannot be written.
    """
    folder = cache_dir / name
    if is_whole(folder):
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f".{name}.lock"):
            if not is_whole(folder):
                _build(folder, build)
    except OSError as error:
        raise ConfigError(
            f"cache folder {str(cache_dir)!r} must be writable; got {error}. "
            "Make it writable, or name another one with PHYAI_CACHE."
        ) from error
    return folder


def versioned_folder(
    cache_dir: Path, name: str, build: Callable[[Path], None], modules: Sequence[ModuleType]
) -> Path:
    """Return a folder below ``cache_dir`` that ``build`` filled, now or at an earlier call.

    modules: those that write it. A change of their sources is a new version, in another folder.
    Raises: as ``cached_folder``.
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


def is_whole(folder: Path) -> bool:
    """Return whether the folder holds exactly the files it was built with, unchanged."""
    try:
        listed = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        return bool(listed == _checksums(folder))
    except (OSError, ValueError):
        return False


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh = scratch / "new"
        fresh.mkdir()
        build(fresh)
        listed = json.dumps(_checksums(fresh), indent=1)
        (fresh / CHECKSUMS).write_text(listed, encoding="utf-8")
        if folder.is_symlink() or folder.exists():
            os.replace(folder, scratch / "damaged")
        os.replace(fresh, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _checksums(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != CHECKSUMS
    }


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="utf-8") as handle:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
