"""From what a user calls a checkpoint to a local path, downloading from the hub when needed."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError, did_you_mean

DEFAULT_ALLOW = ("*.json", "*.safetensors", "tokenizer*", "assets/**")

_REPO = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILES = (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt")
_SITE = "https://huggingface.co"


def resolve(
    source: str | Path,
    *,
    revision: str | None = None,
    allow: Sequence[str] = DEFAULT_ALLOW,
    progress: bool = True,
    purpose: str = "checkpoint",
    endpoint: str | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """Return the local folder or file of ``source``.

    source: an existing path (wins), or a hub id ``org/name`` or ``org/name@revision``. Downloads
    go to the shared hub cache; HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and HF_TOKEN are honoured.
    purpose: what messages call it.  progress: bars on stderr.

    Raises: CheckpointNotFound when nothing is there (or not cached, when offline);
        CheckpointError for gated repositories, network faults and damaged downloads;
        ConfigError for two different revisions.
    """
    local = Path(source).expanduser()
    if str(source).strip() and local.exists():
        return local
    source = str(source)
    if _looks_like_path(source):
        raise CheckpointNotFound(
            f"{purpose} {source!r} must exist; got no such file or folder. "
            f"Check the path{_sibling(local) or '.'}"
        )
    match = _REPO.fullmatch(source)
    if match is None or any(bad in match["id"] for bad in ("--", "..")):
        raise CheckpointNotFound(
            f"{purpose} must be an existing path or a hub id 'org/name[@revision]'; "
            f"got {source!r}.{_id_hint(source, local)}"
        )
    if revision and match["revision"] and revision != match["revision"]:
        raise ConfigError(
            f"{purpose} {source!r} must have one revision; got also {revision!r}. Drop one."
        )
    chosen = revision or match["revision"]
    # Git allows neither in a name; in the cache's paths they would lead out of it.
    if chosen and (".." in chosen or chosen.startswith("/")):
        raise CheckpointNotFound(
            f"revision of {purpose} {match['id']!r} must be a branch, tag or commit; got "
            f"{chosen!r}. Correct it."
        )
    return _download(match["id"], chosen, allow, progress, purpose, endpoint, cache_dir)


def _download(
    repo: str,
    revision: str | None,
    allow: Sequence[str],
    progress: bool,
    purpose: str,
    endpoint: str | None,
    cache_dir: str | Path | None,
) -> Path:
    from huggingface_hub import snapshot_download

    bars: Any = importlib.import_module("tqdm.auto").tqdm

    class Quiet(bars):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    began = time.time()
    try:
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(allow),
                endpoint=endpoint,
                cache_dir=cache_dir,
                tqdm_class=None if progress else Quiet,
            )
        )
    except Exception as error:  # the network library's own types change between hub versions
        raise _explain(error, repo, revision, purpose) from error
    _verify(folder, began, repo, purpose)
    if not any(entry.is_file() for entry in folder.rglob("*")):
        raise CheckpointNotFound(
            f"{purpose} {repo!r} must hold files that match {tuple(allow)}; got none. "
            "Check that the repository is in the safetensors format."
        )
    return folder


def _explain(error: Exception, repo: str, revision: str | None, purpose: str) -> CheckpointError:
    """The hub's error as one of ours, with what to do about it."""
    from huggingface_hub import constants, errors

    what = f"{purpose} {repo!r}"
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    response = next((r for c in causes if (r := getattr(c, "response", None)) is not None), None)
    status = getattr(response, "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{what} must be open to you; got a gated repository. Accept the licence at "
            f"{_SITE}/{repo} and set HF_TOKEN to a token of that account."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointNotFound(
            f"{what} must exist on the hub or as a local folder; got neither. Check the spelling, "
            "and set HF_TOKEN when it is private."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointNotFound(
            f"{what} must have revision {revision!r}; got no such branch, tag or commit. "
            f"See {_SITE}/{repo}/tree/main."
        )
    if constants.HF_HUB_OFFLINE or any(isinstance(c, errors.OfflineModeIsEnabled) for c in causes):
        return CheckpointNotFound(
            f"{what} (revision {revision or 'main'!r}) must be in the local cache while offline; "
            "got none or a part of it. Unset HF_HUB_OFFLINE once to download it, or pass a folder."
        )
    if status in (401, 403):
        return CheckpointError(
            f"{what} must be open to you; got HTTP {status}. Set HF_TOKEN to a token that may "
            "read it."
        )
    if status is not None:
        return CheckpointError(f"{what} must be downloadable; got HTTP {status}. Try again later.")
    if any("Consistency check" in str(c) for c in causes):
        return CheckpointError(
            f"{what} must arrive whole; got a download of the wrong size. Run it again: what "
            "arrived is kept and continued."
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return CheckpointNotFound(
            f"{what} must be cached or reachable; got no connection "
            f"({_innermost(causes)}). Check the network and HF_ENDPOINT, or pass a local folder."
        )
    return CheckpointError(
        f"{what} must be downloadable; got {type(error).__name__}: {error}. "
        "Check the network, the disk and HF_ENDPOINT."
    )


def _verify(folder: Path, began: float, repo: str, purpose: str) -> None:
    """Compare fresh files with the SHA-256 the hub announced; the hub client checks sizes only."""
    for link in sorted(folder.rglob("*")):
        if not link.is_symlink():
            continue
        announced = Path(os.readlink(link)).name
        fresh = _SHA256.fullmatch(announced) and link.stat().st_mtime >= began - 2
        if not fresh:
            continue
        with open(link, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        if digest != announced:
            link.resolve().unlink()
            link.unlink()
            raise CheckpointError(
                f"{purpose} {repo!r} must match the hub's checksums; got a damaged {link.name}. "
                "It was removed: run again to download it anew."
            )


def _looks_like_path(source: str) -> bool:
    return "://" not in source and (
        source.startswith((".", "/", "~", "\\"))
        or source.count("/") > 1 + source.count("@")
        or source.endswith((*_FILES, "/"))
        or "\\" in source
    )


def _sibling(path: Path) -> str:
    """The entry of the deepest existing parent that is spelled almost alike."""
    child = path
    for parent in path.parents:
        if parent.is_dir():
            try:
                return did_you_mean(child.name, sorted(p.name for p in parent.iterdir())).replace(
                    " Did", "; did"
                )
            except OSError:
                return ""
        child = parent
    return ""


def _id_hint(source: str, path: Path) -> str:
    guess = re.sub(r"^(https?://)?(www\.)?(huggingface\.co|hf\.co)/|^hf://", "", source.strip())
    guess = re.sub(r"/(tree|resolve|blob)/", "@", guess).strip("/").replace(" ", "-")
    if guess != source and _REPO.fullmatch(guess):
        return f" Did you mean {guess!r}?"
    near = _sibling(path).replace("; did", " Did")
    return near or " Give both the organisation and the name."


def _innermost(causes: Sequence[BaseException]) -> str:
    last = str(causes[-1]).strip().splitlines()
    return last[0] if last else type(causes[-1]).__name__
