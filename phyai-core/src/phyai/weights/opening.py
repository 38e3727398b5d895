"""Turns what users pass as a checkpoint into a TensorSource."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from phyai import hub
from phyai.errors import CheckpointError, CheckpointNotFound
from phyai.weights.matching import Remap
from phyai.weights.peft import ADAPTER_CONFIG, AdapterConfig, PeftSource
from phyai.weights.safetensors_files import SafetensorsSource, checkpoint_files
from phyai.weights.tensor_source import TensorInfo, TensorSource

Source: TypeAlias = "str | Path | Sequence[str | Path] | TensorSource"
"""A folder, file, glob, list of files, hub id (``org/name[@revision]``), or a source."""


def open_source(
    source: Source, *, remap: Remap = None, revision: str | None = None
) -> TensorSource:
    """Return the tensors of ``source``; reads headers only.

    A folder with ``adapter_config.json`` is a PEFT adapter, merged into its base while reading.
    remap: used to pair adapter names with base names when they differ by a prefix.

    Raises: CheckpointNotFound, CheckpointError.
    """
    if isinstance(source, TensorSource):
        return source
    if not isinstance(source, (str, Path)):
        files = [Path(f).expanduser() for f in source]
        if not files:
            raise CheckpointNotFound("list of checkpoint files must not be empty; got [].")
        return SafetensorsSource(files)
    text = str(source)
    if any(mark in text for mark in "*?[") and not Path(source).exists():
        matched = sorted(glob.glob(str(Path(text).expanduser()), recursive=True))
        if not matched:
            raise CheckpointNotFound(f"pattern {text!r} must match files; got none.")
        return SafetensorsSource([Path(f) for f in matched], label=text)
    path = hub.resolve(source, revision=revision)
    if path.is_file():
        return SafetensorsSource([path])
    if (path / ADAPTER_CONFIG).is_file():
        return merge_peft(path, remap=remap)
    return _open_folder(path)


def merge_peft(
    adapter: str | Path,
    base: Source | None = None,
    *,
    remap: Remap = None,
    revision: str | None = None,
) -> PeftSource:
    """Return base + adapter as one source; ``load_pretrained`` takes it.

    base: None = the full weights beside the adapter, else the config's
    ``base_model_name_or_path``.  revision: the adapter's; the base's comes from its config.

    Raises: CheckpointError for an adapter of another kind than plain LoRA; UnexpectedTensors for
        adapter tensors whose module the base does not have.
    """
    folder = hub.resolve(adapter, revision=revision, purpose="adapter")
    config = AdapterConfig.read(folder)
    beside = (folder / "model.safetensors", folder / "model.safetensors.index.json")
    if base is not None:
        opened = open_source(base, remap=remap)
    elif any(file.is_file() for file in beside):
        opened = _open_folder(folder)
    elif config.base:
        try:
            path = hub.resolve(config.base, revision=config.base_revision)
        except CheckpointNotFound as error:
            raise CheckpointNotFound(
                f"base of adapter {folder} must be available; got {error} "
                "Pass base= where you keep it."
            ) from error
        if (path / ADAPTER_CONFIG).is_file():  # also stops two that name each other
            raise CheckpointError(
                f"base of adapter {folder} must be full weights; got another adapter {path}. "
                "Merge that one first and pass base=."
            )
        opened = open_source(path)
    else:
        raise CheckpointError(
            f"adapter {folder} must name its base; got no base_model_name_or_path. Pass base=."
        )
    return PeftSource(opened, folder, config=config, remap=remap)


def tensor_index(
    source: Source, *, remap: Remap = None, revision: str | None = None
) -> dict[str, TensorInfo]:
    """Return stored name -> dtype, shape and file of every tensor; reads headers only.

    remap: see ``open_source``.
    """
    return dict(open_source(source, remap=remap, revision=revision).infos())


def _open_folder(folder: Path) -> SafetensorsSource:
    files, index = checkpoint_files(folder)
    return SafetensorsSource(files, index=index, label=str(folder))
