"""Checkpoints with other settings than the golden set's, against the full computation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.groot.full_reference import FullReference, RowInputs
from tests.groot.groot_engines import (
    ROOT,
    STATE_DIM,
    cpu_config,
    engine_of,
    random_rows,
    request_of,
)

ATOL = 2e-5
FILES = ("config.json", "qwen3_vl_config.json")
DIT = r"action_head\.model\.transformer_blocks\.{}\."
GRIDS = [
    [(1, 4, 4), (1, 2, 2)],
    [(1, 6, 2)],
    [(1, 2, 2), (1, 2, 4), (1, 4, 4)],
    [(1, 10, 6), (1, 4, 4), (1, 4, 4), (1, 4, 4)],
]
TEXT = [4, 21, 13, 1]

# changed settings (None = left out), and the tensors such a checkpoint does not have
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "every block sees all": ({"use_alternate_vl_dit": False}, ""),
    "every other even block sees text": ({"attend_text_every_n_blocks": 3}, ""),
    "no block sees images": ({"attend_text_every_n_blocks": 1}, ""),
    "no VL self-attention": ({"vl_self_attention_cfg": None}, "vl_self_attention"),
    "no VL norm": ({"use_vlln": False}, "vlln"),
    "no position table": ({"add_pos_embed": False}, "position_embedding"),
    "fewer language layers": ({"select_layer": 2}, r"language_model\.layers\.[2-9]\."),
    "odd number of blocks": ({"diffusion_model_cfg.num_layers": 5}, DIT.format("[5-9]")),
    "one block, no image seen": ({"diffusion_model_cfg.num_layers": 1}, DIT.format("[1-9]")),
    "coarse time": ({"num_timestep_buckets": 100}, ""),
    "three states": ({"state_history_length": 3}, ""),
}


def write_variant(folder: Path, changes: Mapping[str, Any], absent: str) -> None:
    """Write the golden checkpoint with settings changed and without some tensors."""
    for name in FILES:
        (folder / name).write_bytes((ROOT / name).read_bytes())
    config = json.loads((ROOT / "config.json").read_text())
    for name, value in changes.items():
        part, _, key = name.rpartition(".")
        target = config[part] if part else config
        if value is None:
            del target[key]
        else:
            target[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    w = load_file(ROOT / "model.safetensors")
    kept = {name: t for name, t in w.items() if not absent or not re.search(absent, name)}
    first = "action_head.state_encoder.layer1.W"
    kept[first] = _longer(kept[first], changes.get("state_history_length", 1))
    save_file(kept, folder / "model.safetensors")


def _longer(weight: Tensor, times: int) -> Tensor:
    """Return an encoder weight [E, in, out] for ``times`` states, each seen in its own way."""
    return torch.cat([weight.roll(i, dims=1) for i in range(times)], dim=1).contiguous()


def rows_for(history: int) -> list[RowInputs]:
    states = torch.randn(4, history, STATE_DIM, generator=torch.Generator().manual_seed(8))
    rows = random_rows(GRIDS, TEXT, seed=4)
    return [replace(row, state=state) for row, state in zip(rows, states, strict=True)]


@pytest.fixture(scope="module")
def unchanged() -> Tensor:
    """Return the actions of the golden checkpoint itself."""
    with engine_of() as engine:
        out: Tensor = engine.step(request_of(rows_for(1)))
        return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_equals_the_full_computation(
    variant: str, tmp_path: Path, unchanged: Tensor
) -> None:
    changes, absent = VARIANTS[variant]
    write_variant(tmp_path, changes, absent)
    rows = rows_for(changes.get("state_history_length", 1))
    want = FullReference(tmp_path).actions(rows, 3)
    for static in (False, True):
        with engine_of(cpu_config(static_shapes=static), checkpoint_dir=str(tmp_path)) as engine:
            got = engine.step(request_of(rows))
        torch.testing.assert_close(got, want, atol=ATOL, rtol=0)
    assert (unchanged - want).abs().max() > 100 * ATOL  # it is the variant that was computed


def test_official_padding_matters_without_vl_layers_only_where_all_is_seen(tmp_path: Path) -> None:
    """Text and image blocks see no padding; blocks that see all tokens see it, too."""
    no_vl, absent = VARIANTS["no VL self-attention"]
    for see_all in (False, True):
        folder = tmp_path / str(see_all)
        folder.mkdir()
        write_variant(folder, {**no_vl, "use_alternate_vl_dit": not see_all}, absent)
        rows = rows_for(1)
        want = FullReference(folder).actions(rows, 3)
        with engine_of(checkpoint_dir=str(folder), official_padding=True) as engine:
            far = (engine.step(request_of(rows)) - want).abs().amax(dim=(1, 2))
        longest = max(range(4), key=lambda i: len(rows[i].ids))
        assert far[longest] < ATOL
        assert bool((far[:3] > 100 * ATOL).all()) is see_all
