"""Writes safetensors files that are either whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from phyai.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"


def save_safetensors(
    tensors: Mapping[str, Tensor], path: str | Path, metadata: Mapping[str, str] | None = None
) -> Path:
    """Write one file atomically; returns its path.

    Raises: CheckpointError when two names share memory or the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    held = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(held, str(partial), metadata={"format": "pt", **(metadata or {})})
        os.replace(partial, path)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"file {path} must be writable as safetensors; got {error}"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def save_sharded(
    tensors: Mapping[str, Tensor],
    folder: str | Path,
    max_bytes: int,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write shards of at most ``max_bytes`` (or one tensor) and their index; returns the index."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_safetensors(shard, folder / file, metadata)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    partial = folder / f".{INDEX_NAME}.{os.getpid()}.part"
    try:
        partial.write_text(json.dumps(index, indent=1), encoding="utf-8")
        os.replace(partial, folder / INDEX_NAME)
    finally:
        partial.unlink(missing_ok=True)
    return folder / INDEX_NAME
