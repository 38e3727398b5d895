"""Safetensors files on disk: which ones make up a checkpoint, their headers, their tensors."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phyai.errors import CheckpointError, CheckpointNotFound
from phyai.weights.report import list_names
from phyai.weights.tensor_source import DTYPE_BITS, TORCH_DTYPES, Region, TensorInfo

_MAX_HEADER = 100 * 2**20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_AGAIN = "Copy or download it again"
# Lie beside the weights and are none: state of processing steps, adapters.
_NO_WEIGHTS = ("_processor.safetensors", "adapter_model.safetensors")


class SafetensorsSource:
    """The tensors of one or several safetensors files, mapped into memory one file at a time.

    Pages of a tensor are given back to the system when the next one is read, so a load does not
    pile up the checkpoint beside the model.

    Raises (on construction): CheckpointError for a corrupt or truncated file, for a name held by
        two files, and for files that disagree with ``index`` (tensor name -> file name).

    >>> from phyai.weights import SafetensorsSource, save_safetensors
    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> path = save_safetensors({"w": torch.ones(2)}, f"{folder}/model.safetensors")
    >>> SafetensorsSource([path]).read("w")
    tensor([1., 1.])
    """

    stays_valid = True  # a view holds its mapping, and pages given back are read again

    def __init__(
        self, files: Sequence[Path], *, index: Mapping[str, str] | None = None, label: str = ""
    ) -> None:
        self._label = label or ", ".join(str(f) for f in files)
        self._infos: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in read_header(file).items():
                other = self._infos.setdefault(name, info)
                if other is not info:
                    raise CheckpointError(
                        f"tensor {name!r} must be in one file; got {other.file} and {info.file}. "
                        "Name the files of one checkpoint only."
                    )
        if index is not None:
            self._check_index(index)
        self._map: mmap.mmap | None = None
        self._mapped_file = ""
        self._touched: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        return self._label

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return tensor ``name`` (or a region of it) as a view of the mapped file."""
        info = self._infos[name]
        dtype = TORCH_DTYPES.get(info.dtype)
        if dtype is None:
            raise CheckpointError(
                f"tensor {name!r} must have a dtype torch can hold; got {info.dtype} "
                f"in {info.file}. Convert the checkpoint."
            )
        if info.nbytes == 0:
            tensor = torch.empty(info.shape, dtype=dtype)
            return tensor if region is None else tensor.narrow(*region)
        mapped = self._open(info.file)
        self._touched = (info.start, info.nbytes)
        if info.start % dtype.itemsize:  # torch wants aligned data; old writers did not care
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=info.nbytes, offset=info.start)
            tensor = raw.clone().view(dtype)
        else:
            count = prod(info.shape)
            tensor = torch.frombuffer(mapped, dtype=dtype, count=count, offset=info.start)
        tensor = tensor.view(info.shape)
        return tensor if region is None else tensor.narrow(*region)

    def _open(self, file: str) -> mmap.mmap:
        """The mapping of ``file``, after giving back what the last read touched."""
        if self._map is not None and self._touched is not None and hasattr(mmap, "MADV_DONTNEED"):
            start, length = self._touched
            aligned = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, aligned, length + start - aligned)
        if self._map is None or file != self._mapped_file:
            try:
                with open(file, "rb") as handle:
                    # A private writable mapping: torch refuses to wrap read-only memory quietly.
                    self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise CheckpointError(f"file {file} must be readable; got {error}.") from error
            self._mapped_file = file
        return self._map

    def _check_index(self, index: Mapping[str, str]) -> None:
        held = {name: Path(info.file).name for name, info in self._infos.items()}
        listed = {name: Path(file).name for name, file in index.items()}
        absent = [name for name, file in listed.items() if held.get(name) != file]
        extra = [name for name in held if name not in listed]
        if absent or extra:
            parts = []
            if absent:
                parts.append(f"listed but not in the named file: {list_names(absent)}")
            if extra:
                parts.append(f"in a file but not listed: {list_names(extra)}")
            raise CheckpointError(
                f"index of {self._label} must agree with its files; got tensors "
                f"{'; '.join(parts)}. {_AGAIN}, index and shards from one revision."
            )


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return name -> info of one safetensors file, its structure checked against its size.

    Raises: CheckpointNotFound when absent; CheckpointError naming the file and the defect.
    """
    if file.suffix in _PICKLES:
        raise CheckpointError(_pickle_message(str(file)))
    try:
        size = file.stat().st_size
        with open(file, "rb") as handle:
            head = handle.read(8)
            length = int.from_bytes(head, "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                raise _corrupt(
                    file, f"header of {length} bytes in a file of {size} bytes (truncated, or no "
                    "safetensors file)"
                )  # fmt: skip
            text = handle.read(length)
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"file {file} must exist. Check the path.") from error
    except OSError as error:
        raise CheckpointError(f"file {file} must be readable; got {error}.") from error
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, f"a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _corrupt(file, "a header that is no JSON object")
    infos: dict[str, TensorInfo] = {}
    end = base = 8 + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        info, stop = _entry(file, name, entry, base)
        infos[name] = info
        end = max(end, stop)
    if size != end:
        state = "truncated" if size < end else "followed by foreign bytes"
        raise _corrupt(file, f"{size} bytes where the header describes {end} ({state})")
    try:  # the library checks overlaps, gaps and names
        with safe_open(str(file), framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise _corrupt(file, str(error)) from error
    return infos


def checkpoint_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the safetensors files that make up a folder's checkpoint, and its index if sharded.

    Order: an ``*.safetensors.index.json``; ``model.safetensors``; all other ``*.safetensors``
    but those of processing steps and adapters.

    Raises: CheckpointNotFound for a folder without weights; CheckpointError for pickles only,
        several indices, a broken index, or one that names absent or outside files.
    """
    indices = sorted(folder.glob("*.safetensors.index.json"))
    preferred = folder / "model.safetensors.index.json"
    if preferred in indices:
        indices = [preferred]
    if len(indices) > 1:
        raise CheckpointError(
            f"folder {folder} must hold one index; got {[i.name for i in indices]}. "
            "Name the files to load."
        )
    if indices:
        index = _read_index(indices[0])
        return [folder / name for name in sorted(set(index.values()))], index
    single = folder / "model.safetensors"
    if single.is_file():
        return [single], None
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.endswith(_NO_WEIGHTS))
    if files:
        return files, None
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(_pickle_message(f"{folder} with {list_names(pickles)}"))
    hint = (
        "It looks like a JAX checkpoint (params/): convert it to safetensors first."
        if (folder / "params").is_dir()
        else "Check the path."
    )
    raise CheckpointNotFound(
        f"folder {folder} must hold .safetensors files; got "
        f"{list_names(sorted(f.name for f in folder.iterdir())) or 'an empty folder'}. {hint}"
    )


def _read_index(path: Path) -> dict[str, str]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise _corrupt(path, f"no readable JSON ({error})") from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _corrupt(path, "no 'weight_map' of tensor names")
    for name, file in weight_map.items():
        plain = isinstance(file, str) and file not in ("", ".", "..")
        if not plain or any(mark in file for mark in ("/", "\\", "\0", ":")):
            raise CheckpointError(
                f"index {path} must name files beside it; got {file!r} for tensor {name!r}. "
                "Do not use this checkpoint unless you know where it comes from."
            )
    absent = [f for f in sorted(set(weight_map.values())) if not (path.parent / f).is_file()]
    if absent:
        raise CheckpointError(
            f"checkpoint {path.parent} must hold every shard its index lists; "
            f"got no {list_names(absent)}. {_AGAIN}."
        )
    return dict(weight_map)


def _entry(file: Path, name: str, entry: Any, base: int) -> tuple[TensorInfo, int]:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, stop = entry["data_offsets"]
        numbers = (*shape, begin, stop)
        sane = all(type(n) is int and n >= 0 for n in numbers) and begin <= stop
    except (TypeError, KeyError, ValueError) as error:
        raise _corrupt(file, f"an incomplete entry for tensor {name!r}") from error
    if not sane or not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _corrupt(file, f"a nonsensical entry for tensor {name!r}: {entry!r}")
    info = TensorInfo(dtype, shape, str(file), base + begin)
    if info.nbytes != stop - begin:
        raise _corrupt(
            file, f"{stop - begin} bytes for tensor {name!r} {list(shape)} {dtype} ({info.nbytes})"
        )
    return info, base + stop


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _corrupt(file: Path, defect: str) -> CheckpointError:
    return CheckpointError(f"file {file} must be a whole, valid file; got {defect}. {_AGAIN}.")


def _pickle_message(what: str) -> str:
    return (
        f"checkpoint must be in safetensors format; got {what}. Pickle files can run code and are "
        "never opened: convert it to .safetensors where you trust it."
    )
