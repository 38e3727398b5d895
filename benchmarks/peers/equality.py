"""Inputs both sides read, and whether their actions are the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.peers.sizes import Sizes
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

TOLERANCE = {"bf16": 0.03, "fp32": 1e-4}
LEAST_MOVE = 0.1
INPUTS = ("images", "image_masks", "tokens", "token_mask", "noise")


class OutputsDiffer(Exception):
    """The two sides do not compute the same thing, so no time may be compared."""


@dataclass(frozen=True, slots=True)
class Equality:
    """relative: ||a - b|| / ||b||.  moved: ||b - noise|| / ||noise||, what the network did."""

    relative: float
    moved: float
    tolerance: float


def write_inputs(path: Path, sizes: Sizes, cameras: int, tokens: int, rows: int, seed: int) -> None:
    """Write a request of valid cameras and tokens only; names and shapes as in ``base.Batch``."""
    random = torch.Generator().manual_seed(seed)
    side, channels = sizes.vision.image_size, sizes.vision.num_channels
    save_file(
        {
            "images": torch.rand(rows, cameras, channels, side, side, generator=random) * 2 - 1,
            "image_masks": torch.ones(rows, cameras, dtype=torch.bool),
            "tokens": torch.randint(1, sizes.text.vocab_size, (rows, tokens), generator=random),
            "token_mask": torch.ones(rows, tokens, dtype=torch.bool),
            "noise": torch.randn(rows, sizes.chunk, sizes.action_dim, generator=random),
        },
        path,
    )


def compared(
    ours: Path, peer: Path, inputs: Path, dtype: str, tolerance: float | None = None
) -> Equality:
    """Return how equal the actions in two result files are.

    tolerance: None for that of the dtype; quantised sides need another.

    Raises: OutputsDiffer when they are farther apart than the dtype allows, of different shapes,
    not finite, or so close to the noise that the comparison says nothing about the network.
    """
    a, b = (_actions(path) for path in (ours, peer))
    noise = load_file(inputs)["noise"].double()
    if a.shape != b.shape or b.shape != noise.shape:
        raise OutputsDiffer(
            f"actions of both sides must have the shape of the noise, {list(noise.shape)}; got "
            f"{list(a.shape)} and {list(b.shape)}."
        )
    for label, actions in (("ours", a), ("the peer", b)):
        if not torch.isfinite(actions).all():
            raise OutputsDiffer(f"actions must be finite; those of {label} are not.")
    found = Equality(relative(a, b), relative(b, noise), tolerance or TOLERANCE[dtype])
    if found.moved < LEAST_MOVE:
        raise OutputsDiffer(
            f"actions must differ from the noise by {LEAST_MOVE:g} relative norm, or equal actions "
            f"prove nothing; got {found.moved:.2e}. Use other weights."
        )
    if found.relative > found.tolerance:
        raise OutputsDiffer(
            f"actions must agree to a relative norm of {found.tolerance:g} in {dtype}; got "
            f"{found.relative:.3e}. No time was taken."
        )
    return found


def _actions(path: Path) -> Tensor:
    try:
        return load_file(path)["actions"].double()
    except (OSError, KeyError, SafetensorError) as error:
        raise OutputsDiffer(
            f"result {path.name} must be a safetensors file with actions; got {error!r}."
        ) from error


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
