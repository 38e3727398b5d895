"""The checkpoint of a set with its head replaced by one that all embodiments share."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

from phyai.errors import CheckpointError
from phyai.models.minicpm_robot.names import BANK, SHARED, released_name
from phyai.weights import SafetensorsSource, open_source, save_safetensors

_KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""


@functools.lru_cache(maxsize=8)
def shared_root(root: Path) -> Path:
    """Return a checkpoint folder with a shared head: ``root`` itself, or a copy with another head.

    The other head's tensors are in one more safetensors file of the folder.
    Raises: CheckpointError when the folder has no such head.
    """
    source = open_source(root)
    infos = source.infos()
    if any(map(_is_shared, infos)):
        return root
    override = _override(root)
    # By their released names: the folder's tensors may be stored under the names of a wrapper.
    tensors = {
        released: source.read(name).clone()
        for name in infos
        if (released := released_name(name)) is not None and not BANK.fullmatch(released)
    }
    tensors.update({name: override.read(name).clone() for name in override.infos()})
    kept = tempfile.TemporaryDirectory(prefix="phyai-golden-")
    _KEPT.append(kept)
    folder = Path(kept.name)
    shutil.copy(root / "config.json", folder)
    save_safetensors(tensors, folder / "model.safetensors")
    return folder


def _is_shared(name: str) -> bool:
    released = released_name(name)
    return released is not None and SHARED.fullmatch(released) is not None


def _override(root: Path) -> SafetensorsSource:
    for path in sorted(root.glob("*.safetensors")):
        if path.name.startswith(("case_", "track_")):
            continue
        source = SafetensorsSource([path])
        if any(map(_is_shared, source.infos())):
            return source
    raise CheckpointError(
        f"golden set {root} must hold the tensors of a shared action head for its cases without "
        "embodiment_id; got none. Copy the golden set again."
    )
