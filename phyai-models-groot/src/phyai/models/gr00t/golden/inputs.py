"""The inputs of a model case, made anew from its images and instructions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phyai.backbones.qwen3_vl import PixelSettings, patch_rows
from phyai.golden import Comparison, GoldenRun, Records, absolute, exact
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.processing.prompts import TOKENIZER, PromptTokenizer

if TYPE_CHECKING:
    from phyai.models.gr00t.golden.runs import Case

PIXELS = 1e-6
SETTINGS = "preprocessor_config.json"
_IMAGE = re.compile(r"in\.image_(\d+)_(\d+)")


def input_runs(case: Case) -> list[GoldenRun]:
    """Return the run that compares images -> patches and instructions -> ids; none without them.

    Needs the backbone's settings and tokenizer beside the case's weights.
    """
    images = _images(case)
    files = all((case.root / name).is_file() for name in (SETTINGS, TOKENIZER))
    if not images or "instructions" not in case.metadata or not files:
        return []

    def compare(adapter: Any, result: Any, records: Records) -> list[Comparison]:
        return _compare(case, images)

    return [GoldenRun(f"{case.path.stem}[inputs]", compare)]


def _images(case: Case) -> list[list[Tensor]]:
    """Return each row's images, uint8 [H, W, 3], in the order of their numbers."""
    found: dict[int, dict[int, Tensor]] = {}
    for name, tensor in case.tensors.items():
        if match := _IMAGE.fullmatch(name):
            found.setdefault(int(match[1]), {})[int(match[2])] = tensor
    return [[row[i] for i in sorted(row)] for _, row in sorted(found.items())]


def _compare(case: Case, images: list[list[Tensor]]) -> list[Comparison]:
    tensors, root = case.tensors, case.root
    flat = [image.numpy() for row in images for image in row]
    patches, grids = patch_rows(flat, PixelSettings.from_folder(root))
    wanted = [tuple(grid) for grid in tensors["in.image_grid_thw"].tolist()]
    found = [
        absolute("in.pixel_values", patches, tensors["in.pixel_values"], PIXELS),
        exact("in.image_grid_thw", [tuple(grid) for grid in grids], wanted),
    ]
    instructions = json.loads(case.metadata["instructions"])
    config = GrootConfig.from_folder(root)
    tokenizer = _tokenizer(root, config)
    counts = iter([t * h * w // config.merge for t, h, w in grids])
    rows = []
    for instruction, row in zip(instructions, images, strict=True):
        here = [next(counts) for _ in row]
        rows.append(torch.from_numpy(tokenizer.encode(instruction, here, len(instruction) + 512)))
    ids = torch.cat(rows)
    return [*found, exact("in.input_ids", ids, tensors["in.input_ids"][case.mask])]


def _tokenizer(root: Path, config: GrootConfig) -> PromptTokenizer:
    return PromptTokenizer(
        root / TOKENIZER,
        image_token_id=config.image_token_id,
        vocab_size=config.backbone[1].vocab_size,
    )
