"""Loads the transformer's weights: released or native names, one file or shards."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from phyai.models.cosmos3.config import Cosmos3Config, transformer_folder
from phyai.models.cosmos3.names import HEADS, UNUSED, released_name, unread_of_last_layer
from phyai.services import Progress, no_progress
from phyai.weights import (
    FiniteSource,
    LoadReport,
    Remap,
    load_pretrained,
    open_source,
    randomize,
    remapper,
)

log = logging.getLogger("phyai")


class Cosmos3Weights:
    """Where one transformer's weights come from, and which of their tensors nobody reads.

    folder: the checkpoint's, or its transformer folder; None = random weights from ``seed``.
    remap: the caller's renaming, before native names become released ones.
    action, sound: whether the model has these heads; their tensors are left alone otherwise.
    full_last: the rest of the last text layer is read too, see ``Cosmos3Text``.
    """

    def __init__(
        self,
        config: Cosmos3Config,
        folder: Path | None,
        *,
        action: bool = True,
        sound: bool = True,
        seed: int = 0,
        remap: Remap = None,
        strict: bool = True,
        full_last: bool = False,
    ) -> None:
        self.config, self.seed, self.strict = config, seed, strict
        self._remapped = remapper(remap)
        self.folder = None if folder is None else transformer_folder(folder)
        has = {"action": action, "sound": sound}
        self.ignored = (
            *UNUSED,
            *(pattern for leaf, pattern in HEADS.items() if not has[leaf]),
            *([] if full_last else [unread_of_last_layer(config.num_hidden_layers)]),
        )

    def name(self, stored: str) -> str | None:
        """Return the released name of a stored tensor; None when the caller's remap drops it."""
        renamed = self._remapped(stored)
        return None if renamed is None else released_name(renamed)

    def updated_name(self, stored: str) -> str | None:
        """Return the name of a tensor in a weight update, None for one nobody reads."""
        name = self.name(stored)
        unused = name is None or any(re.search(pattern, name) for pattern in self.ignored)
        return None if unused else name

    def load_into(
        self, modules: nn.Module, stored: torch.dtype, progress: Progress = no_progress
    ) -> LoadReport | None:
        """Fill the modules from the checkpoint, each rank its part, or with random weights.

        stored: dtype of the checkpoint that random weights stand for.
        Raises: CheckpointError and its kinds; also for NaN or infinity in a tensor.
        """
        if self.folder is None:
            randomize(modules, self.seed, stored=stored, progress=progress)
            return None
        return load_pretrained(
            modules,
            FiniteSource(open_source(self.folder)),
            remap=self.name,
            ignore=self.ignored,
            strict=self.strict,
            progress=progress,
        )


def with_stored_heads(config: Cosmos3Config, folder: Path, remap: Remap = None) -> Cosmos3Config:
    """Return the config without the heads of which the checkpoint has no tensor.

    Policies are released without the sound's head, and older configs do not say so.
    Raises: CheckpointError, CheckpointNotFound.
    """
    weights = Cosmos3Weights(config, folder, remap=remap)
    assert weights.folder is not None
    infos = open_source(weights.folder).infos()
    names = [name for stored in infos if (name := weights.name(stored)) is not None]
    flags = {"action": config.action_gen, "sound": config.sound_gen}
    for leaf, pattern in HEADS.items():
        if flags[leaf] and not any(re.search(pattern, name) for name in names):
            log.warning("checkpoint %s has no %s head: it makes no %s.", folder, leaf, leaf)
            flags[leaf] = False
    return replace(config, action_gen=flags["action"], sound_gen=flags["sound"])
