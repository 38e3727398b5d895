"""Fills a network built without memory from a checkpoint, strictly, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from benchmarks.peers.base import Refused
from safetensors import safe_open
from torch import Tensor, nn


def stored_keys(folder: Path, name: str = "model.safetensors") -> dict[str, Path]:
    """Return key -> file of a checkpoint, in one file of that name or in shards."""
    index = folder / f"{name}.index.json"
    if index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: folder / shard for key, shard in shards.items()}
    file = folder / name
    with safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file)


def fill(
    model: nn.Module,
    folder: Path,
    stored: Mapping[str, tuple[Path, str]],
    dtype_of: Callable[[str], torch.dtype],
    *,
    narrow_first: bool = False,
) -> None:
    """Give every parameter the values of its tensor, in ordinary memory.

    stored: parameter -> file and key.
    narrow_first: round to bfloat16 before anything else, as a cast of the whole module does.
    Raises: Refused for missing, unexpected or mis-shaped tensors.
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    wrong = sorted(set(shapes) ^ set(stored))
    if wrong:
        raise Refused(
            f"checkpoint {folder} must hold exactly the network's {len(shapes)} tensors; "
            f"{len(wrong)} are missing or unexpected, such as {wrong[0]!r}."
        )
    for name, (file, key) in stored.items():
        # Opened for each tensor: pages of an open file would count as resident to the end.
        with safe_open(file, framework="pt") as opened:
            tensor = opened.get_tensor(key)
            if tuple(tensor.shape) != shapes[name]:
                raise Refused(
                    f"tensor {key!r} must have shape {list(shapes[name])}; "
                    f"got {list(tensor.shape)}."
                )
            if narrow_first:
                tensor = tensor.bfloat16()
            _assign(model, name, tensor, dtype_of(name))


def _assign(model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    owner, _, leaf = name.rpartition(".")
    # A copy in ordinary memory, as the official loaders leave it; not a view of the file.
    values = tensor.to(dtype, copy=True)
    setattr(model.get_submodule(owner), leaf, nn.Parameter(values, requires_grad=False))
