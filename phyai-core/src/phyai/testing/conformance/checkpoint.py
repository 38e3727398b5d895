"""A copy of a checkpoint folder with one tensor wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, cat

from phyai.testing.conformance.check import Failure, NotApplicable
from phyai.weights import save_safetensors

MAX_BYTES = 1 << 30
"""Larger checkpoints are not written again; the author gives a tiny one."""

INDEXES = "*.safetensors.index.json"
"""Which file of a folder holds which tensor; one with several models has several of them."""
Tensors = dict[str, Tensor]
Change = Callable[[Tensors, str], "list[str]"]
"""(tensors of one file, name of the victim) -> names an error must hold; changes in place."""


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where an adapter's weights are: the argument that names the folder, and the file.

    victim: the tensor that gets broken.
    """

    field: str
    folder: Path
    file: Path
    victim: str

    def broken(self, args: Any, place: Path, change: Change) -> tuple[Any, list[str]]:
        """Write the broken copy into ``place``; return its arguments and the names to find."""
        shutil.copytree(self.folder, place, symlinks=False, copy_function=_link)
        target = place / self.file.relative_to(self.folder)
        tensors = {name: tensor.clone() for name, tensor in load_file(self.file).items()}
        names = change(tensors, self.victim)
        target.unlink()
        save_safetensors(tensors, target)
        for index in target.parent.glob(INDEXES):
            _rewrite_index(index, target.name, tensors)
        return dataclasses.replace(args, **{self.field: str(place)}), names


def find_checkpoint(args: Any, loaded: tuple[str, ...]) -> Checkpoint:
    """Return where the weights of these arguments are.

    loaded: names of the load report, as the model calls them; the victim is one of these.
    Raises: NotApplicable when no argument names a folder of weights, or they are too large.
    """
    for field in sorted(dataclasses.fields(args), key=lambda f: f.name != "checkpoint_dir"):
        value = getattr(args, field.name)
        if not isinstance(value, str | Path) or not str(value) or not Path(value).is_dir():
            continue
        folder = Path(value)
        if (file := _weights_file(folder)) is not None:
            if file.stat().st_size > MAX_BYTES:
                raise NotApplicable(
                    f"{file.name} holds {file.stat().st_size:,} bytes; give a tiny checkpoint"
                )
            return Checkpoint(field.name, folder, file, _victim(file, loaded))
    raise NotApplicable("no argument of the adapter names a folder with .safetensors")


# ---------------------------------------------------------------- changes


def dropped(tensors: Tensors, victim: str) -> list[str]:
    del tensors[victim]
    return [victim]


def extra(tensors: Tensors, victim: str) -> list[str]:
    name = f"{_parent(victim)}no_such_parameter"
    tensors[name] = tensors[victim].clone()
    return [name]


def renamed(tensors: Tensors, victim: str) -> list[str]:
    name = f"{_parent(victim)}renamed_parameter"
    tensors[name] = tensors.pop(victim)
    return [victim, name]


def misshaped(tensors: Tensors, victim: str) -> list[str]:
    tensors[victim] = cat([tensors[victim], tensors[victim][:1]])
    return [victim]


def is_named(name: str, message: str) -> bool:
    """Return whether a message holds the name; up to two leading components may be left out.

    Adapters strip prefixes such as ``model.`` that every name of a file has.
    """
    parts = name.split(".")
    most = min(2, max(len(parts) - 2, 0))
    return any(".".join(parts[cut:]) in message for cut in range(most + 1))


# ---------------------------------------------------------------- internals


def _weights_file(folder: Path) -> Path | None:
    """Return the file of the model's tensors: an index's, model.safetensors, or the largest."""
    for index in sorted(folder.rglob(INDEXES)):
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return index.parent / str(min(names))
    if (usual := folder / "model.safetensors").is_file():
        return usual
    files = [path for path in folder.rglob("*.safetensors") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size, default=None)


def _victim(file: Path, loaded: tuple[str, ...]) -> str:
    shapes = {name: tensor.shape for name, tensor in load_file(file).items()}
    sized = [name for name, shape in shapes.items() if shape and shape.numel() > 1]
    known = [n for n in sized if any(n == m or n.endswith(f".{m}") for m in loaded)]
    candidates = sorted(known or sized)
    if not candidates:
        raise Failure(f"{file.name} must hold a tensor with a shape; got none. Give another file.")
    return candidates[len(candidates) // 2]


def _parent(name: str) -> str:
    return name[: name.rfind(".") + 1]


def _link(source: str, target: str) -> str:
    Path(target).symlink_to(Path(source).resolve())
    return target


def _rewrite_index(index: Path, file: str, tensors: Tensors) -> None:
    data = json.loads(index.read_text(encoding="utf-8"))
    kept = {name: other for name, other in data["weight_map"].items() if other != file}
    data["weight_map"] = {**kept, **dict.fromkeys(tensors, file)}
    index.unlink()  # it is a link to the original
    index.write_text(json.dumps(data), encoding="utf-8")
