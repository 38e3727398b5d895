"""Random weights both sides load: a checkpoint in the released layout, written once per depth.

The values of a tensor depend on the seed and its name alone. bfloat16 on disk, so that the same
numbers serve bf16 and fp32 runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from benchmarks.peers.model import Sizes
from torch import Tensor

VERSION = 1
"""Goes up whenever the values change."""
NESTED = "diffusion_pytorch_model.safetensors"
"""File of a part of a checkpoint that has a folder for each."""
_CHUNK = 2**20

Say = Callable[[str], None]


def cached_checkpoint(cache: Path, model: str, sizes: Sizes, seed: int, say: Say) -> Path:
    """Return the folder of the checkpoint of these sizes and this seed, written when missing.

    Raises: OSError when the disk has no room; nothing half-written stays under the final name.
    """
    text = json.dumps([VERSION, seed, *sizes.files().values()])
    name = f"{model}-l{sizes.layers}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = cache / name
    if all((folder / file).is_file() for file in weight_files(sizes)):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    nbytes = 2 * sum(math.prod(shape) for _, shape in sizes.tensors())
    free = shutil.disk_usage(cache).free
    if free < nbytes + 2**30:
        raise OSError(
            f"weights cache {cache} must have {nbytes / 2**30:.1f} GiB and one to spare; "
            f"got {free / 2**30:.1f} GiB free. Name another folder with --weights-cache."
        )
    say(f"writing random weights, {nbytes / 1e9:.1f} GB, to {folder}")
    scratch = Path(tempfile.mkdtemp(prefix=".writing.", dir=cache))
    try:
        write_checkpoint(scratch, sizes, seed)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def place(name: str) -> tuple[str, str]:
    """Return file and key of a tensor; ``part/key`` is in the file of a part.

    >>> place("vae/quant_conv.bias")
    ('vae/diffusion_pytorch_model.safetensors', 'quant_conv.bias')
    """
    part, slash, key = name.rpartition("/")
    return (f"{part}/{NESTED}", key) if slash else ("model.safetensors", name)


def weight_files(sizes: Sizes) -> dict[str, list[str]]:
    """Return the tensors' names, in order, by file."""
    found: dict[str, list[str]] = {}
    for name in sorted(name for name, _ in sizes.tensors()):
        found.setdefault(place(name)[0], []).append(name)
    return found


def write_checkpoint(folder: Path, sizes: Sizes, seed: int) -> None:
    """Write the weights, one tensor at a time, and the JSON files beside them."""
    for name, data in sizes.files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    shapes = dict(sizes.tensors())
    for path, names in weight_files(sizes).items():
        _write(folder / path, {name: shapes[name] for name in names}, sizes, seed)


def _write(path: Path, shapes: Mapping[str, tuple[int, ...]], sizes: Sizes, seed: int) -> None:
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        entry = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        header[place(name)[1]], at = entry, end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file, ThreadPoolExecutor(2) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            values = draw(name, shape, sizes.moments(name, shape), seed, pool)
            file.write(values.view(torch.int16).numpy().data)


def draw(
    name: str,
    shape: tuple[int, ...],
    moments: tuple[float, float],
    seed: int,
    pool: ThreadPoolExecutor | None = None,
) -> Tensor:
    """Return the bfloat16 values of one tensor of this mean and standard deviation."""
    mean, std = moments
    values = torch.empty(math.prod(shape), dtype=torch.bfloat16)

    def fill(start: int) -> None:
        digest = hashlib.sha256(f"{seed}/{start}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        part = values[start : start + _CHUNK]
        part.copy_(torch.empty(part.numel()).normal_(mean, std, generator=generator))

    list((pool.map if pool else map)(fill, range(0, values.numel(), _CHUNK)))
    return values.view(shape)
