"""Engines over the tiny golden checkpoint, and random model requests for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from phyai import Engine, EngineArgs, EngineConfig
from phyai.models.gr00t.main_gr00t import GrootArgs, GrootRequest
from tests.conftest import GOLDEN
from tests.cpu_engines import cpu_config, recording_engine, reference_config
from tests.groot.full_reference import RowInputs

ROOT = GOLDEN / "groot"
PLUGIN = "gr00t_n17"
HORIZON, ACTION_DIM, STATE_DIM, EMBODIMENTS, IMAGE_TOKEN, VOCAB = 8, 10, 12, 6, 261, 256

Grid = tuple[int, int, int]


def groot_args(**changes: Any) -> GrootArgs:
    return GrootArgs(**{"checkpoint_dir": str(ROOT), "max_batch_size": 4, **changes})


@contextmanager
def engine_of(settings: EngineConfig | None = None, /, **changes: Any) -> Iterator[Engine]:
    """Open an engine over the golden checkpoint; float32 on the CPU by default."""
    with Engine(EngineArgs(PLUGIN, groot_args(**changes), settings or cpu_config())) as engine:
        yield engine


@contextmanager
def recorded_engine(**changes: Any) -> Iterator[Engine]:
    """Open an engine over the golden checkpoint that replays recorded graphs."""
    with recording_engine(PLUGIN, groot_args(**changes), reference_config()) as engine:
        yield engine


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
        head, tail = ids[:1], ids[1:]
        parts = [head, *(torch.full((h * w // 4,), IMAGE_TOKEN) for _, h, w in images), tail]
        patches = sum(h * w for _, h, w in images)
        chosen = i % EMBODIMENTS if embodiments is None else embodiments[i]
        rows.append(
            RowInputs(
                torch.cat(parts),
                torch.rand(patches, 1536, generator=random) * 2 - 1,
                images,
                torch.randn(1, STATE_DIM, generator=random),
                chosen,
                torch.randn(HORIZON, ACTION_DIM, generator=random),
            )
        )
    return rows


def request_of(rows: Sequence[RowInputs], *, pad_to: int = 0, **changes: Any) -> GrootRequest:
    """Return the rows as one request, padded on the left with random tokens' ids."""
    longest = max(pad_to, *(len(row.ids) for row in rows))
    ids = torch.full((len(rows), longest), 256)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row.ids) :] = row.ids
        mask[i, longest - len(row.ids) :] = 1
    return GrootRequest(
        **{
            "pixel_values": torch.cat([row.pixels for row in rows]),
            "image_grid_thw": torch.tensor([grid for row in rows for grid in row.grids]),
            "input_ids": ids,
            "attention_mask": mask,
            "state": torch.stack([row.state for row in rows]),
            "embodiment_id": torch.tensor([row.embodiment for row in rows]),
            "noise": torch.stack([row.noise for row in rows]),
            "num_steps": 3,
            **changes,
        }
    )
