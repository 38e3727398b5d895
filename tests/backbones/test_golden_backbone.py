"""Every recorded tensor of vision tower and language model, within the README's tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phyai.backbones.qwen3_vl import rope_tables, text_positions
from tests.backbones.golden_backbone import CASES, backbone, case, layouts, run

TOLERANCE = 5e-5
HOST = {"text.position_ids", "text.rope_cos", "text.rope_sin"}


def test_there_are_cases() -> None:
    assert len(CASES) == 5


@pytest.mark.parametrize("reference", [False, True], ids=["own kernels", "reference kernels"])
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_recorded_tensors(path: Path, reference: bool) -> None:
    model = backbone(reference=reference)
    found = case(path, model)
    vision, text = layouts(found, model)
    seen = run(model, found.tensors["in.pixel_values"], vision, text)
    prefixes = ("vision.", "text.", "backbone.")
    wanted = {name for name in found.tensors if name.startswith(prefixes)}
    assert wanted <= set(seen) | HOST
    assert {"vision.block0_in", "vision.merged", "backbone.features"} < wanted
    for name in sorted(wanted - HOST):
        want = found.tensors[name] if name.startswith("vision.") else found.packed(name)
        torch.testing.assert_close(seen[name], want, rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_positions_and_rotation(path: Path) -> None:
    model = backbone()
    found = case(path, model)
    packed = text_positions(found.rows, found.grids, model.image_token_id, 2)
    ids = torch.ones_like(found.tensors["text.position_ids"])  # of padding it is 1
    ids[:, found.valid] = packed.to(ids.dtype)
    assert torch.equal(ids, found.tensors["text.position_ids"])
    for name, table in zip(("cos", "sin"), rope_tables(ids, model.text_config), strict=True):
        want = found.tensors[f"text.rope_{name}"]
        torch.testing.assert_close(table, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_bfloat16_stays_close(path: Path) -> None:
    """Of the recorded float32 features."""
    model = backbone(torch.bfloat16)
    found = case(path, model)
    seen = run(model, found.tensors["in.pixel_values"], *layouts(found, model))
    got, want = seen["backbone.features"].double(), found.packed("backbone.features").double()
    assert seen["backbone.features"].dtype == torch.bfloat16
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    assert cosine > 0.9995
