"""Checked rows of a request, and how they become a Prepared batch. Host only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phyai.errors import RequestError
from phyai.guidance import BRANCHES, COND, SCALE, UNCOND
from phyai.known import mask_name, value_name
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.network.layout import EVEN
from phyai.models.cosmos3.network.positions import TEMPORAL, media_positions
from phyai.types import Key, Prepared
from phyai.unipc import sigma_at

PIXELS = "pixels"
RAW = "raw"
"""Name in ``Key.extra`` of how many action channels are in use, which the result has."""
PIXEL_AXES = ("frames", "rows", "columns")
Known = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request is sampled; one for all of its rows.

    interval: guided timesteps, (low, high) strictly.
    """

    num_steps: int
    grid: str
    interval: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class HostRow:
    """One checked row.

    tokens, uncond int64 [n] without padding; uncond None where guidance is 1.
    shape: frames, height and width of the latent.  known: leaf -> mask (bool) and value.
    noise: leaf -> float32 without the row dim.  pixels: float32 [3, F, H, W] in [-1, 1], of which
    the known video is made; None when it is given, or nothing is.  raw_dim: action channels in use.
    """

    tokens: Tensor
    uncond: Tensor | None
    shape: tuple[int, int, int]
    fps: float | None
    scale: float
    noise: Mapping[str, Tensor]
    known: Mapping[str, Known] = field(default_factory=dict)
    pixels: Tensor | None = None
    domain: int | None = None
    action_start: int = 0
    raw_dim: int = 0


def assemble(
    config: Cosmos3Config,
    rows: Sequence[HostRow],
    sampling: Sampling,
    *,
    meta: tuple[Any, ...] | None,
    temporal: int = TEMPORAL,
    text_step: int = 1,
) -> Prepared:
    """Return the Prepared batch of rows.

    temporal: frames of a video in one frame of its latent.  text_step: texts are padded to a
        multiple of it, and what is padded is hidden by a mask.
    Raises: RequestError when their sizes differ: they have to be sent as separate requests.
    """
    first = rows[0]
    for i, row in enumerate(rows):
        if _sizes(row) != _sizes(first):
            raise RequestError(
                f"rows of a request must have equal sizes; got {_sizes(row)} in row {i} and "
                f"{_sizes(first)} in row 0. Send them as separate requests."
            )
    frames, height, width = first.shape
    patch = config.latent_patch_size
    actions = first.noise["action"].shape[0] if "action" in first.noise else 0
    sound = first.noise["sound"].shape[1] if "sound" in first.noise else 0
    guided = any(row.scale != 1.0 for row in rows)
    tensors, buckets, even = _texts(rows, guided, text_step)
    buckets += [("frames", frames), ("height", height), ("width", width)]
    buckets += [("actions", actions)] if actions else []
    buckets += [("sound", sound)] if sound else []
    tensors["positions"] = torch.stack(
        [
            media_positions(
                config,
                frames=frames,
                rows=math.ceil(height / patch),
                columns=math.ceil(width / patch),
                fps=row.fps,
                actions=actions,
                action_start=row.action_start,
                sound=sound,
                temporal=temporal,
            )
            for row in rows
        ]
    )
    if actions:
        tensors["domain"] = torch.tensor([row.domain or 0 for row in rows])
    if guided:
        tensors[SCALE] = torch.tensor([row.scale for row in rows], dtype=torch.float32)
    for leaf in first.noise:
        tensors[f"noise.{leaf}"] = torch.stack([row.noise[leaf] for row in rows])
    for leaf in first.known:
        tensors[mask_name(leaf)] = torch.stack([row.known[leaf][0] for row in rows])
        tensors[value_name(leaf)] = torch.stack([row.known[leaf][1] for row in rows])
    if first.pixels is not None:
        tensors[PIXELS] = torch.stack([row.pixels for row in rows if row.pixels is not None])
        clip = first.pixels.shape[1:]
        buckets += [(f"pixel_{n}", s) for n, s in zip(PIXEL_AXES, clip, strict=True)]
    low, high = sampling.interval or (0, 0)
    extra: list[tuple[str, Any]] = [(EVEN, even)] if even else []
    extra += [(RAW, first.raw_dim)] if first.raw_dim else []
    key = Key(
        num_steps=sampling.num_steps,
        buckets=tuple(buckets),
        grid=sampling.grid,
        branches=BRANCHES if guided else (COND,),
        # Strict in timesteps, which are noise levels cut to whole thousandths.
        guidance_interval=(math.nextafter(sigma_at(low + 1), -math.inf), sigma_at(high))
        if guided and sampling.interval
        else None,
        extra=tuple(extra),
    )
    return Prepared(tensors, len(rows), key, meta)


def _sizes(row: HostRow) -> dict[str, Any]:
    return {
        "latent": list(row.shape),
        "action channels": row.raw_dim,
        **{f"noise of {leaf}": list(noise.shape) for leaf, noise in row.noise.items()},
        "known": sorted(row.known),
        "pixels": None if row.pixels is None else list(row.pixels.shape),
    }


def _texts(
    rows: Sequence[HostRow], guided: bool, step: int
) -> tuple[dict[str, Tensor], list[tuple[str, int]], tuple[str, ...]]:
    """Return token tensors, their buckets, and the branches in which no key has to be hidden.

    Where texts are padded there are none of these: a text that happens to fill its bucket shares
    the key, and so the graph, of those that do not.
    """
    tensors: dict[str, Tensor] = {}
    buckets: list[tuple[str, int]] = []
    even: list[str] = []
    for branch in BRANCHES if guided else (COND,):
        # A row with guidance 1 needs no other text, but must have one: any will do.
        texts = [row.tokens if branch == COND or row.uncond is None else row.uncond for row in rows]
        lens = [len(text) for text in texts]
        bucket = math.ceil(max(lens) / step) * step
        prefix, name = ("", "tokens") if branch == COND else (f"{UNCOND}/", f"{UNCOND}.tokens")
        padded = torch.zeros(len(rows), bucket, dtype=torch.int64)
        for line, text in zip(padded, texts, strict=True):
            line[: len(text)] = text
        tensors[f"{prefix}tokens"] = padded
        tensors[f"{prefix}token_len"] = torch.tensor(lens)
        buckets.append((name, bucket))
        if step == 1 and min(lens) == bucket:
            even.append(branch)
    return tensors, buckets, tuple(even)
