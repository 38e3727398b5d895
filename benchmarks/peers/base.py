"""What a peer is: load, inputs, run; the worker loop does the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from benchmarks.peers.sizes import Sizes
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

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

    @property
    def sizes(self) -> Sizes:
        return Sizes.from_folder(self.checkpoint)


@dataclass(frozen=True, slots=True)
class Batch:
    """One request.

    images [B, C, 3, S, S] float32 in [-1, 1]; image_masks [B, C] bool; tokens [B, n] int64 right
    padded; token_mask [B, n] bool; noise [B, T, A] float32.
    """

    images: Tensor
    image_masks: Tensor
    tokens: Tensor
    token_mask: Tensor
    noise: Tensor
    steps: int

    @classmethod
    def from_file(cls, path: Path, steps: int) -> Batch:
        return cls(**load_file(path), steps=steps)

    def padded(self, cameras: int, tokens: int) -> Batch:
        """Return the batch with masked black cameras and masked zero tokens up to these counts."""
        more, longer = cameras - self.images.shape[1], tokens - self.tokens.shape[1]
        if more < 0 or longer < 0:
            raise Refused(
                f"padding must not shrink a batch of {self.images.shape[1]} cameras and "
                f"{self.tokens.shape[1]} tokens; got {cameras} and {tokens}."
            )
        return replace(
            self,
            images=pad(self.images, (0,) * 6 + (0, more), value=-1.0),
            image_masks=pad(self.image_masks, (0, more), value=False),
            tokens=pad(self.tokens, (0, longer)),
            token_mask=pad(self.token_mask, (0, longer), value=False),
        )

    @property
    def unpadded(self) -> bool:
        """Whether every camera and token is valid."""
        return bool(self.image_masks.all()) and bool(self.token_mask.all())


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

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Take the next inputs; returns at least ``prefix_positions``."""
        ...

    def run(self) -> tuple[Tensor, dict[str, float]]:
        """Return actions [B, T, A] float32 and seconds per stage (may be empty)."""
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


def weight_bytes(sizes: Sizes, dtype: Dtype, *, float32_vision: bool) -> int:
    """Return bytes of all parameters under the mixed-precision rules of ``hf_model``."""
    total = 0
    for name, shape in sizes.tensors():
        wide = dtype == "fp32" or "norm" in name or ("vision" in name and float32_vision)
        total += torch.Size(shape).numel() * (4 if wide else 2)
    return total


def activation_bytes(setup: Setup) -> int:
    """Return a generous size of the largest temporaries and of the interpreter with torch."""
    sizes, rows = setup.sizes, setup.rows
    positions = sizes.positions(setup.cameras, setup.tokens)
    scores = 4 * sizes.text.num_attention_heads * positions**2
    mlp = 3 * positions * sizes.text.intermediate_size
    return 4 * rows * (scores + mlp) + 3 * GIB // 4
