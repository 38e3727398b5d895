"""Loads the towers from their released folders: safetensors, official names, strict."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from phyai.models.minicpm_robot_track.vision.features import DINO, SIGLIP, VisionTowers
from phyai.models.minicpm_robot_track.vision.sizes import tower_folder
from phyai.weights import (
    FiniteSource,
    LoadReport,
    Progress,
    Remap,
    load_pretrained,
    open_source,
    remapper,
)

# Stored and never used: what masks patches in training, the text half of SigLIP and what compares
# the halves, its pooling head; index and frequency tables of older files.
DINO_UNUSED = (rf"^{DINO}\.embeddings\.mask_token$", rf"^{DINO}\.rope_embeddings\.inv_freq$")
SIGLIP_UNUSED = (
    rf"^{SIGLIP}\.text_model\.",
    rf"^{SIGLIP}\.logit_(?:scale|bias)$",
    rf"^{SIGLIP}\.vision_model\.head\.",
    rf"^{SIGLIP}\.vision_model\.embeddings\.position_ids$",
)
_DINO_TREE = re.compile(r"^model\.(?=layer\.)")
_VISION_ONLY = re.compile(r"(?:embeddings|encoder|post_layernorm|head)\.")


def dino_name(stored: str) -> str:
    """Return the claimed name of a tensor in a DINOv3 file.

    Files have ``layer.0...``; the module tree of newer official code says ``model.layer.0...``.

    >>> dino_name("model.layer.0.norm1.weight"), dino_name("norm.weight")
    ('dino.layer.0.norm1.weight', 'dino.norm.weight')
    """
    return f"{DINO}.{_DINO_TREE.sub('', stored)}"


def siglip_name(stored: str) -> str:
    """Return the claimed name of a tensor in a file of SigLIP, or of its vision half alone.

    >>> siglip_name("vision_model.post_layernorm.bias") == siglip_name("post_layernorm.bias")
    True
    """
    below = "vision_model." if _VISION_ONLY.match(stored) else ""
    return f"{SIGLIP}.{below}{stored}"


def tower_update_name(name: str) -> str | None:
    """Return the claimed name of an updated tensor ``dino.<stored>`` or ``siglip.<stored>``.

    None for one nobody reads, and names of other modules as they are.

    >>> tower_update_name("siglip.logit_scale") is None
    True
    """
    for tower, rename, unused in (
        (DINO, dino_name, DINO_UNUSED),
        (SIGLIP, siglip_name, SIGLIP_UNUSED),
    ):
        if name.startswith(f"{tower}."):
            claimed = rename(name.removeprefix(f"{tower}."))
            return None if any(re.search(p, claimed) for p in unused) else claimed
    return name


def load_towers(
    towers: VisionTowers,
    dino_dir: str | Path,
    siglip_dir: str | Path,
    *,
    remap: Remap = None,
    strict: bool = True,
    progress: Progress | None = None,
) -> tuple[LoadReport, LoadReport]:
    """Fill both towers from released folders or hub ids; returns the reports of both.

    remap: of the stored names, before ours.  strict: False only reports missing and unexpected
    tensors.

    Raises: CheckpointNotFound, CheckpointError, MissingTensors, UnexpectedTensors, ShapeMismatch;
        also for NaN or infinity in a tensor.
    """
    before = remapper(remap)

    def load(module: torch.nn.Module, folder: Path, rename: Callable[[str], str],
             unused: tuple[str, ...]) -> LoadReport:  # fmt: skip
        def renamed(stored: str) -> str | None:
            name = before(stored)
            return None if name is None else rename(name)

        source = FiniteSource(open_source(folder))
        return load_pretrained(
            module, source, remap=renamed, ignore=unused, strict=strict, progress=progress
        )

    dino, siglip = tower_folder(dino_dir, "dino_dir"), tower_folder(siglip_dir, "siglip_dir")
    return (
        load(towers.dino, dino, dino_name, DINO_UNUSED),
        load(towers.siglip, siglip, siglip_name, SIGLIP_UNUSED),
    )
