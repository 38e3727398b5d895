"""Loads the weights of a GR00T N1.7 checkpoint: one file or shards, official names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from phyai.models.gr00t.config import GrootConfig
from phyai.services import Progress
from phyai.weights import FiniteSource, LoadReport, load_pretrained, open_source, randomize

if TYPE_CHECKING:
    from phyai.models.gr00t.args import GrootArgs

VISION = "backbone.model.model.visual"
LANGUAGE = "backbone.model.model.language_model"
HEAD = "action_head"

# The head of the backbone and its last norm are stored and never used; so are rotary frequencies.
UNUSED = (
    r"^backbone\.model\.lm_head\.weight$",
    rf"^{re.escape(LANGUAGE)}\.norm\.weight$",
    r"\.inv_freq$",
)
_LAYER = re.compile(rf"^{re.escape(LANGUAGE)}\.layers\.(\d+)\.")


class GrootWeights:
    """Where one adapter's weights come from, and which of their tensors nobody reads."""

    def __init__(self, config: GrootConfig, args: GrootArgs, folder: Path | None) -> None:
        self.config, self.args, self.folder = config, args, folder

    def unused(self, name: str) -> bool:
        """Return whether a tensor of the official module tree has no place in this runtime.

        Besides the above: language layers from ``select_layer`` on, whose output nobody takes.
        """
        if any(re.search(pattern, name) for pattern in UNUSED):
            return True
        layer = _LAYER.match(name)
        return layer is not None and int(layer.group(1)) >= self.config.select_layer

    def updated_name(self, name: str) -> str | None:
        """Return the name of a tensor in a weight update, None for one nobody reads."""
        return None if self.unused(name) else name

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
        surplus = range(self.config.select_layer, self.config.backbone[1].num_hidden_layers)
        numbers = "|".join(map(str, surplus)) or "none"
        return load_pretrained(
            modules,
            FiniteSource(open_source(self.folder, remap=self.args.weight_remap)),
            remap=self.args.weight_remap,
            ignore=(*UNUSED, rf"^{re.escape(LANGUAGE)}\.layers\.(?:{numbers})\."),
            strict=self.args.weight_strict,
            progress=progress,
        )
