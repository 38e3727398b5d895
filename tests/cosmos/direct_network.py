"""The Cosmos3 network by itself: built, loaded and evaluated without an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from phyai.cache import Cache
from phyai.kernels import KernelTable
from phyai.layers import Placement
from phyai.memo import Memo
from phyai.memory import Arena
from phyai.models.cosmos3.checkpoint import Cosmos3Weights
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.network.conditioning import Cosmos3Conditioning
from phyai.models.cosmos3.network.denoiser import Cosmos3Denoiser
from phyai.models.cosmos3.network.layout import MediaLayout
from phyai.models.cosmos3.network.positions import media_positions
from phyai.models.cosmos3.network.text import Cosmos3Text
from phyai.parallel import SOLE, Group
from phyai.timers import Profile
from phyai.types import Grid, Key, Prepared
from phyai.unipc import UniPC, explicit_grid, sigma_at
from phyai.weights import LoadReport

ROOT = Path(__file__).parents[1] / "golden/cosmos3"
ModelCase = tuple[dict[str, Tensor], dict[str, Any]]


def read_case(name: str) -> ModelCase:
    """Return the tensors and the decoded metadata of a golden case."""
    with safe_open(str(ROOT / f"{name}.safetensors"), "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = {}
        for key, value in (file.metadata() or {}).items():
            try:
                metadata[key] = json.loads(value)
            except ValueError:
                metadata[key] = value
    return tensors, metadata


@dataclass
class Network:
    """Text and media experts with the golden weights, of one tensor-parallel rank."""

    config: Cosmos3Config = field(default_factory=lambda: Cosmos3Config.from_folder(ROOT))
    folder: Path | None = ROOT
    tp: Group = SOLE
    memo: Memo | None = None
    full_last: bool = False
    static: bool = False
    dtype: torch.dtype = torch.float32
    heads: Mapping[str, bool] = field(default_factory=dict)
    remap: Any = None
    report: LoadReport | None = None

    def __post_init__(self) -> None:
        at = Placement(KernelTable(), torch.device("cpu"), self.dtype, tp=self.tp)
        self.profile = Profile()
        self.text = Cosmos3Text(self.config, at, self.profile, self.memo, full_last=self.full_last)
        self.denoiser = Cosmos3Denoiser(self.config, at, self.profile, **self.heads)
        self.conditioning = Cosmos3Conditioning(
            self.text, self.denoiser, self.profile, static=self.static
        )
        has = self.denoiser.heads
        weights = Cosmos3Weights(
            self.config,
            self.folder,
            action="action" in has,
            sound="sound" in has,
            full_last=self.full_last,
            remap=self.remap,
        )
        self.report = weights.load_into(self.conditioning.modules(), torch.float32)
        self.weights = weights

    @property
    def counters(self) -> Mapping[str, int]:
        return self.profile.counters

    def cache(
        self, rows: Sequence[Row], *, capacity: int | None = None, branch: str = "cond"
    ) -> Cache:
        """Return a cache with these rows loaded and encoded."""
        batch = prepared(rows, self.config)
        key = batch.key
        buffers = self.conditioning.cache_buffers(key)
        count = capacity or len(rows)
        cache = Cache("c", key, count, buffers, Arena("cpu"), torch.device("cpu"), branch)
        cache.load(batch)
        self.encode(cache, batch)
        return cache

    def encode(self, cache: Cache, batch: Prepared) -> None:
        with torch.no_grad():
            self.conditioning.plan(cache, batch)
            self.conditioning.encode(cache)

    def velocity(self, rows: Sequence[Row], cache: Cache, timestep: int) -> dict[str, Tensor]:
        """Return the network's velocity of each leaf of the rows, at one timestep."""
        grid = one_step(timestep)
        self.denoiser.prepare_grid(grid)
        x = {leaf: torch.stack([row.x[leaf] for row in rows]) for leaf in rows[0].x}
        with torch.no_grad():
            return self.denoiser(x, grid[0], cache)


def one_step(timestep: int) -> Grid:
    return UniPC().grid(Key(num_steps=1, grid=explicit_grid([sigma_at(timestep)])))


@dataclass(frozen=True)
class Row:
    """One row's inputs. clean: leaf -> known frames or rows."""

    ids: Tensor
    x: Mapping[str, Tensor]
    clean: Mapping[str, Sequence[int]] = field(default_factory=dict)
    fps: float | None = None
    action_start: int = 1
    domain: int = 0
    pad: int = 0

    @cached_property
    def masks(self) -> dict[str, Tensor]:
        """Return which elements of each leaf are known; of action rows all channels."""
        found = {}
        for leaf, tensor in self.x.items():
            mask = torch.zeros(tensor.shape, dtype=torch.bool)
            for index in self.clean.get(leaf, ()):
                if leaf == "video":
                    mask[:, index] = True
                elif leaf == "action":
                    mask[index] = True
                else:
                    mask[:, index] = True
            found[leaf] = mask
        return found


def row_of(case: ModelCase) -> Row:
    """Return the row of a case of one evaluation."""
    tensors, about = case
    leaves = [leaf for leaf in ("video", "action", "sound") if leaf in tensors]
    clean = {
        "video": about["vision_condition_frames"],
        "action": about["action_condition_rows"],
    }
    return Row(
        tensors["input_ids"],
        {leaf: tensors[leaf] for leaf in leaves},
        clean,
        about["fps"],
        about["action_start_frame_offset"],
        int(tensors["domain_id"]) if "domain_id" in tensors else 0,
    )


def key_of(rows: Sequence[Row]) -> Key:
    x = rows[0].x
    frames, height, width = x["video"].shape[1:]
    buckets = [
        ("tokens", max(len(row.ids) + row.pad for row in rows)),
        ("frames", frames),
        ("height", height),
        ("width", width),
    ]
    if "action" in x:
        buckets.append(("actions", x["action"].shape[0]))
    if "sound" in x:
        buckets.append(("sound", x["sound"].shape[1]))
    return Key(buckets=tuple(buckets))


def prepared(rows: Sequence[Row], config: Cosmos3Config) -> Prepared:
    key = key_of(rows)
    layout = MediaLayout.of(key, config)
    frames, patch_rows, columns = layout.grid
    tokens = torch.zeros(len(rows), layout.text, dtype=torch.int64)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row.ids)] = row.ids
    tensors = {
        "tokens": tokens,
        "token_len": torch.tensor([len(row.ids) for row in rows]),
        "positions": torch.stack(
            [
                media_positions(
                    config,
                    frames=frames,
                    rows=patch_rows,
                    columns=columns,
                    fps=row.fps,
                    actions=layout.actions,
                    action_start=row.action_start,
                    sound=layout.sound,
                )
                for row in rows
            ]
        ),
    }
    if layout.actions:
        tensors["domain"] = torch.tensor([row.domain for row in rows])
    for leaf in rows[0].x:
        tensors[f"known.{leaf}.mask"] = torch.stack([row.masks[leaf] for row in rows])
        tensors[f"known.{leaf}.value"] = torch.stack([row.x[leaf] for row in rows])
    return Prepared(tensors, len(rows), key)


def masked(rows: Sequence[Row], velocity: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return velocities with known parts at zero, as core's Hold leaves them."""
    return {
        leaf: torch.where(torch.stack([row.masks[leaf] for row in rows]), 0.0, tensor)
        for leaf, tensor in velocity.items()
    }
