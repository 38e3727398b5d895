"""Loads the weights of a pi checkpoint, whichever of the released layouts it has."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from phyai.errors import CheckpointError
from phyai.models.pi.config import Model, PiConfig
from phyai.services import Progress
from phyai.weights import LoadReport, load_pretrained, randomize, tensor_index

if TYPE_CHECKING:
    from phyai.models.pi.adapter import PiArgs

COMPONENTS = (
    "paligemma_with_expert",
    "action_in_proj",
    "action_out_proj",
    "state_proj",
    "action_time_mlp_in",
    "action_time_mlp_out",
    "time_mlp_in",
    "time_mlp_out",
    "value_head",
    "noise_head",
    "normalize_inputs",
    "normalize_targets",
    "unnormalize_outputs",
)
_LEADING_MODEL = re.compile(rf"^model\.(?=(?:{'|'.join(COMPONENTS)})\b)")

UNUSED = (
    r"\.gemma_expert\.lm_head\.weight$",
    r"^(?:un)?normalize_",
    r"^value_head\.",
    r"^noise_head\.",
    r"\.rotary_emb\.inv_freq$",
)
# With embed_tokens present the output head is a second copy nobody reads.
IGNORED = (*UNUSED, r"\.paligemma\.lm_head\.weight$")
PROBES: dict[Model, str] = {"pi0": "state_proj.weight", "pi05": "time_mlp_in.weight"}
PLUGINS: dict[str, str] = {"pi0": "pi0", "pi05": "pi05"}


class PiWeights:
    """Where one adapter's weights come from."""

    def __init__(self, model: Model, args: PiArgs, folder: Path | None) -> None:
        self.model, self.args, self.folder = model, args, folder

    @staticmethod
    def canonical_name(key: str) -> str | None:
        """Return a checkpoint key without the leading ``model.`` that fine-tuned files carry."""
        return _LEADING_MODEL.sub("", key)

    @staticmethod
    def updated_name(key: str) -> str | None:
        """Return the canonical name of a tensor in a weight update, None for one nobody reads."""
        name = PiWeights.canonical_name(key)
        unused = name is None or any(re.search(pattern, name) for pattern in UNUSED)
        return None if unused else name

    def rename(self, key: str) -> str | None:
        """Apply the caller's remap, then the canonical spelling."""
        remap = self.args.weight_remap
        if callable(remap):
            renamed = remap(key)
            if renamed is None:
                return None
            key = renamed
        elif remap:
            for old, new in remap.items():
                key = key.replace(old, new)
        return self.canonical_name(key)

    def check_model(self) -> None:
        """Raise CheckpointError when the tensors are those of the other model."""
        if self.folder is None:
            return
        names = {self.rename(name) for name in tensor_index(self.folder, remap=self.rename)}
        if PROBES[self.model] in names:
            return
        for other, probe in PROBES.items():
            if other != self.model and probe in names:
                raise CheckpointError(
                    f"checkpoint {self.folder} must hold a {self.model} model; its tensors are "
                    f"those of {other} (it has {probe!r}). Use --plugin {PLUGINS[other]}."
                )

    def check_adapter(self, config: PiConfig) -> None:
        """Raise CheckpointError when the config promises a PEFT adapter that is not there.

        The base weights alone would load, and act as if the fine-tuning had never been.
        """
        if not config.use_peft or self.folder is None:
            return
        if not (self.folder / "adapter_config.json").is_file():
            raise CheckpointError(
                f"checkpoint {self.folder} must hold adapter_config.json and "
                "adapter_model.safetensors, because its config says use_peft; got neither. Copy "
                "them beside the config, or set use_peft to false for merged weights."
            )

    def fit_state(self, config: PiConfig) -> PiConfig:
        """Return the config with the state width of the tensors.

        An openpi config has one width for actions and state; a converted checkpoint whose state is
        narrower says so only in the shape of ``state_proj.weight``.
        """
        if self.folder is None or config.family != "openpi":
            return config
        for name, info in tensor_index(self.folder, remap=self.rename).items():
            if self.rename(name) == PROBES["pi0"] and len(info.shape) == 2:
                width = min(info.shape[1], config.max_action_dim)
                return replace(config, max_state_dim=width) if width else config
        return config

    def load_into(
        self, modules: nn.Module, stored: torch.dtype, progress: Progress
    ) -> LoadReport | None:
        """Fill the modules strictly from the checkpoint, or with random weights without one.

        stored: dtype of the checkpoint that random weights stand for.
        """
        if self.folder is None:
            randomize(modules, self.args.seed, stored=stored, progress=progress)
            return None
        return load_pretrained(
            modules,
            self.folder,
            remap=self.rename,
            ignore=IGNORED,
            strict=self.args.weight_strict,
            progress=progress,
        )
