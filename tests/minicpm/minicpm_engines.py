"""Engines over the tiny golden checkpoint, and random model requests for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phyai import Engine, EngineArgs, EngineConfig
from phyai.models.minicpm_robot.main_minicpm_robot import MiniCPMRobotArgs, MiniCPMRobotRequest
from phyai.models.minicpm_robot.ops import kernel_rows
from tests.conftest import GOLDEN
from tests.cpu_engines import cpu_config, recording_engine, reference_config

ROOT = GOLDEN / "minicpm"
PLUGIN = "minicpm_robot"
HORIZON, ACTION_DIM, STATE_DIM, EMBODIMENTS = 6, 12, 12, 3
IMAGE_TOKEN, VOCAB, PATCH_VALUES, WIDTH = 310, 300, 588, 64

Grid = tuple[int, int]


def minicpm_args(**changes: Any) -> MiniCPMRobotArgs:
    return MiniCPMRobotArgs(**{"checkpoint_dir": str(ROOT), "max_batch_size": 4, **changes})


@contextmanager
def engine_of(settings: EngineConfig | None = None, /, **changes: Any) -> Iterator[Engine]:
    """Open an engine over the golden checkpoint; float32 on the CPU by default."""
    args = EngineArgs(PLUGIN, minicpm_args(**changes), settings or cpu_config())
    with Engine(args) as engine:
        yield engine


@contextmanager
def recorded_engine(**changes: Any) -> Iterator[Engine]:
    """Open an engine over the golden checkpoint that replays recorded graphs."""
    with recording_engine(
        PLUGIN, minicpm_args(**changes), reference_config(kernel_rows())
    ) as engine:
        yield engine


@dataclass(frozen=True)
class RowInputs:
    """One row: ids [S], patches [N, values], grids, state, embodiment and noise."""

    ids: Tensor
    patches: Tensor
    grids: tuple[Grid, ...]
    state: Tensor
    embodiment: int
    noise: Tensor


def random_rows(
    grids: Sequence[Sequence[Grid]],
    text: Sequence[int],
    *,
    seed: int = 0,
    embodiments: Sequence[int] | None = None,
) -> list[RowInputs]:
    """Return one row per entry: its images' grids and how many text tokens it has."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for i, (images, count) in enumerate(zip(grids, text, strict=True)):
        ids = torch.randint(0, VOCAB, (count,), generator=random)
        parts = [ids[:1], *(torch.full((h * w // 16,), IMAGE_TOKEN) for h, w in images), ids[1:]]
        patches = sum(h * w for h, w in images)
        rows.append(
            RowInputs(
                torch.cat(parts),
                torch.rand(patches, PATCH_VALUES, generator=random) * 2 - 1,
                tuple(images),
                torch.randn(STATE_DIM, generator=random),
                i % EMBODIMENTS if embodiments is None else embodiments[i],
                torch.randn(HORIZON, ACTION_DIM, generator=random),
            )
        )
    return rows


def strip_of(patches: Tensor) -> Tensor:
    """Return patch rows [N, 588] as the official strip [1, 3, 14, 14 * N]."""
    return patches.view(-1, 3, 14, 14).permute(1, 2, 0, 3).reshape(1, 3, 14, -1)


def request_of(
    rows: Sequence[RowInputs], *, pad_to: int = 0, left: bool = True, **changes: Any
) -> MiniCPMRobotRequest:
    """Return the rows as one request, padded on one side with ids of some text token."""
    longest = max(pad_to, *(len(row.ids) for row in rows))
    ids = torch.full((len(rows), longest), 7)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(longest - len(row.ids), None) if left else slice(0, len(row.ids))
        ids[i, place] = row.ids
        mask[i, place] = 1
    return MiniCPMRobotRequest(
        **{
            "pixel_values": strip_of(torch.cat([row.patches for row in rows])),
            "target_sizes": torch.tensor(
                [g for row in rows for g in row.grids], dtype=torch.int64
            ).view(-1, 2),
            "input_ids": ids,
            "attention_mask": mask,
            "state": torch.stack([row.state for row in rows]),
            "embodiment_id": torch.tensor([row.embodiment for row in rows]),
            "noise": torch.stack([row.noise for row in rows]),
            "num_steps": 3,
            **changes,
        }
    )
