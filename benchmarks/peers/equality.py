"""Whether the actions of both sides are the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

TOLERANCE = {"bf16": 0.03, "fp32": 1e-4}
LEAST_MOVE = 0.1


class OutputsDiffer(Exception):
    """The two sides do not compute the same thing, so no time may be compared."""


@dataclass(frozen=True, slots=True)
class Equality:
    """relative: ||a - b|| / ||b||.  moved: ||b - noise|| / ||noise||, what the network did."""

    relative: float
    moved: float
    tolerance: float


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
