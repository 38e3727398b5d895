"""What a peer is: load, inputs, run; the worker loop does the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

Dtype = Literal["bf16", "fp32"]
GIB = 2**30


class Refused(Exception):
    """The peer cannot do what it was asked, and says why and what to do."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What to load, and for which inputs.

    cameras, tokens: what the side computes, padding included.
    rope_frequencies: ``official`` rounds them as the official module cast does, ``float32`` does
        not. It costs nothing either way.
    cache: folder for what a side makes of a checkpoint and wants to find again; None = its folder.
    """

    checkpoint: Path
    dtype: Dtype
    threads: int
    cameras: int
    tokens: int
    rows: int = 1
    steps: int = 10
    rope_frequencies: Literal["official", "float32"] = "float32"
    cache: Path | None = None

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Setup:
        fields = {name: message[name] for name in cls.__dataclass_fields__ if name in message}
        fields |= {name: Path(fields[name]) for name in ("checkpoint", "cache") if name in fields}
        return cls(**fields)


class Peer(Protocol):
    """One implementation behind a worker. Methods are called in this order, ``run`` repeatedly."""

    def describe(self) -> dict[str, Any]:
        """Return ``name``, ``versions`` and ``computes`` (one sentence)."""
        ...

    def estimate(self, setup: Setup) -> int:
        """Return an upper estimate of the bytes the loaded side will hold at its peak."""
        ...

    def load(self, setup: Setup) -> dict[str, Any]:
        """Load the weights; returns facts worth reporting. Raises: Refused."""
        ...

    def inputs(self, path: Path, steps: int) -> dict[str, Any]:
        """Take the inputs in a file of the model's; returns at least ``prefix_positions``."""
        ...

    def run(self) -> tuple[Tensor, dict[str, float]]:
        """Return actions [B, T, A] and seconds per stage (may be empty)."""
        ...


@dataclass
class Stages:
    """Wall seconds per named stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
