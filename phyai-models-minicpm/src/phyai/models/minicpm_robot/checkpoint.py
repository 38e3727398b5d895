"""Loads the weights of a MiniCPM-RobotManip checkpoint: one file or shards, every naming family."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from phyai.errors import ShapeMismatch
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.names import EMBEDDING, LM_HEAD, renaming
from phyai.services import Progress
from phyai.weights import (
    FiniteSource,
    LoadReport,
    Region,
    TensorSource,
    load_pretrained,
    open_source,
    randomize,
)

if TYPE_CHECKING:
    from phyai.models.minicpm_robot.args import MiniCPMRobotArgs

log = logging.getLogger("phyai")

_IGNORED = (r"^vlm\.llm\.lm_head\.weight$",)
_ROWS = 16384
"""Rows of the embedding compared at a time."""


class MiniCPMRobotWeights:
    """Where one adapter's weights come from, and what their tensors are called."""

    def __init__(
        self, config: MiniCPMRobotConfig, args: MiniCPMRobotArgs, folder: Path | None
    ) -> None:
        self.config, self.args, self.folder = config, args, folder
        self.rename = renaming(args.weight_remap)

    def updated_name(self, name: str) -> str | None:
        """Return the claimed name of a tensor in a weight update, None for one nobody reads."""
        renamed = self.rename(name)
        return None if renamed == LM_HEAD else renamed

    def load_into(
        self, modules: nn.Module, stored: torch.dtype, progress: Progress
    ) -> LoadReport | None:
        """Fill the modules strictly from the checkpoint, or with random weights without one.

        stored: dtype of the checkpoint that random weights stand for.
        Raises: CheckpointError and its kinds; also for NaN or infinity in a tensor.
        """
        if self.folder is None:
            randomize(modules, self.args.seed, stored=stored, progress=progress)
            return None
        source = open_source(self.folder, remap=self.args.weight_remap)
        in_file = self.args.embedding_in_file
        self._check_lm_head(source, values=not in_file)
        return load_pretrained(
            modules,
            # A table left in the file is not read through: only rows in use shall take memory.
            FiniteSource(source, self._stored(source, EMBEDDING) if in_file else ()),
            remap=self.rename,
            ignore=_IGNORED,
            strict=self.args.weight_strict,
            progress=progress,
        )

    def _stored(self, source: TensorSource, claimed: str) -> list[str]:
        return [name for name in source.infos() if self.rename(name) == claimed]

    def _check_lm_head(self, source: TensorSource, *, values: bool) -> None:
        """Look at the output embedding, which is stored though it is tied and never used.

        One of another shape is refused as any tensor is. Other values are told and not refused:
        actions do not depend on them.
        """
        heads, tables = self._stored(source, LM_HEAD), self._stored(source, EMBEDDING)
        if not heads or not tables:
            return
        infos, head, table = source.infos(), heads[0], tables[0]
        if infos[head].shape != infos[table].shape:
            raise ShapeMismatch(
                f"tensor {head!r} of {source.label} must have the shape of {table!r}, with which "
                f"it is tied, {list(infos[table].shape)}; got {list(infos[head].shape)}. "
                "Download the checkpoint again."
            )
        if values and not _equal(source, head, table):
            log.warning(
                "checkpoint %s: %s differs from %s, with which it should be tied; it is left out: "
                "actions do not depend on it",
                source.label,
                head,
                table,
            )


def _equal(source: TensorSource, one: str, other: str) -> bool:
    rows = source.infos()[one].shape[0]
    for start in range(0, rows, _ROWS):
        part = Region(0, start, min(_ROWS, rows - start))
        if not torch.equal(source.read(one, part), source.read(other, part)):
            return False
    return True
