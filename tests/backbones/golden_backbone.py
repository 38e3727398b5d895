"""The backbone of the recorded cases, built from their config and weights."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from phyai.backbones.qwen3_vl import (
    Grid,
    Qwen3VLTextConfig,
    Qwen3VLVisionConfig,
    TextLayout,
    TextStack,
    VisionLayout,
    VisionTower,
    text_layout,
    vision_layout,
)
from phyai.kernels import KernelTable
from phyai.layers import Placement
from phyai.weights import load_pretrained
from tests.conftest import GOLDEN

FOLDER = GOLDEN / "groot"
CASES = sorted(FOLDER.glob("case_*.safetensors"))
PREFIX = "backbone.model.model"


class Backbone(nn.Module):
    """Tower and stack with the weights of the recorded cases."""

    def __init__(self, at: Placement) -> None:
        super().__init__()
        config = json.loads((FOLDER / "qwen3_vl_config.json").read_text(encoding="utf-8"))
        self.image_token_id: int = config["image_token_id"]
        self.pad_token_id: int = config["text_config"]["pad_token_id"]
        self.vision_config = Qwen3VLVisionConfig.from_json(config["vision_config"])
        self.text_config = Qwen3VLTextConfig.from_json(config["text_config"])
        policy = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
        self.vision = VisionTower(f"{PREFIX}.visual", self.vision_config, at)
        self.text = TextStack(
            f"{PREFIX}.language_model", self.text_config, policy["select_layer"], at
        )


@functools.cache
def backbone(dtype: torch.dtype = torch.float32, *, reference: bool = False) -> Backbone:
    """Return the loaded backbone; ``reference``: with the reference row of every op."""
    table = KernelTable()
    if reference:
        truth = {op: next(r.name for r in table.rows(op) if r.reference) for op in table.ops}
        table = KernelTable(force=truth)
    model = Backbone(Placement(table, torch.device("cpu"), dtype))
    load_pretrained(model, FOLDER / "model.safetensors", strict=False)
    return model


@dataclass(frozen=True)
class Case:
    """One recorded case: its tensors, and the inputs in the form the backbone takes."""

    tensors: Mapping[str, Tensor]
    rows: Sequence[Tensor]
    grids: Sequence[Sequence[Grid]]

    @property
    def valid(self) -> Tensor:
        """bool [B, S]: which places hold tokens."""
        return self.tensors["in.attention_mask"].bool()

    def packed(self, name: str) -> Tensor:
        """Return a recorded tensor [B, S, ...] as the tokens [M, ...] alone."""
        return self.tensors[name][self.valid]


def case(path: Path, model: Backbone) -> Case:
    """Return a case; which images belong to which row follows from the image tokens."""
    tensors = load_file(path)
    mask = tensors["in.attention_mask"].bool()
    rows = [ids[seen] for ids, seen in zip(tensors["in.input_ids"], mask, strict=True)]
    left = [tuple(grid) for grid in tensors["in.image_grid_thw"].tolist()]
    grids: list[list[Grid]] = []
    for row in rows:
        need = int((row == model.image_token_id).sum())
        grids.append([])
        while need:
            grids[-1].append(left.pop(0))
            need -= grids[-1][-1][1] * grids[-1][-1][2] // model.vision_config.merge
    assert not left
    return Case(tensors, rows, grids)


def layouts(found: Case, model: Backbone) -> tuple[VisionLayout, TextLayout]:
    flat = [grid for row in found.grids for grid in row]
    text = text_layout(
        found.rows, found.grids, model.text_config, image_token_id=model.image_token_id
    )
    return vision_layout(flat, model.vision_config), text


def run(
    model: Backbone, patches: Tensor, vision: VisionLayout, text: TextLayout
) -> dict[str, Tensor]:
    """Return everything the two modules record, and the features, packed."""
    seen: dict[str, Tensor] = {}

    def under(group: str):  # type: ignore[no-untyped-def]
        return lambda name, tensor: seen.update({f"{group}.{name}": tensor.clone()})

    with torch.no_grad():
        merged, taps = model.vision(patches, vision, under("vision"))
        seen["text.inputs_embeds"] = x = model.text.inputs(text, merged)
        features = model.text(x, text, taps, record=under("text"))
    seen["backbone.features"] = features
    seen[f"vision.block_{model.vision_config.depth - 1}"] = seen.pop("vision.block_last")
    return seen
