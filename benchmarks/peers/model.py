"""What a model is to a paired measurement: one object that says where its parts are.

Sizes, weights and requests are the model's ``Sizes``; how a side computes it is a ``Peer``, found
by name and imported in that side's worker alone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from benchmarks.peers.base import Dtype, Peer, Refused
from torch import Tensor


class Sizes(Protocol):
    """The sizes of one checkpoint in the released layout."""

    @property
    def layers(self) -> int:
        """Layers of the language model."""
        ...

    @property
    def vision_layers(self) -> int: ...

    def positions(self, cameras: int, tokens: int) -> int:
        """Return the prefix positions of so many cameras and prompt tokens."""
        ...

    def files(self) -> dict[str, Any]:
        """Return the JSON files beside the weights, by path."""
        ...

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor; ``part/name`` for one in the folder of a part."""
        ...

    def moments(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Return mean and standard deviation of a tensor's random values."""
        ...

    def inputs(
        self, cameras: int, tokens: int, rows: int, random: torch.Generator
    ) -> dict[str, Tensor]:
        """Return a random request of valid inputs; ``noise`` [B, ...] float32 is one of them."""
        ...


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """One check against a golden case.

    inputs: what ``Peer.inputs`` reads.  wanted: actions [B, T, A], or what else they ask for.
    measure: ``norm`` of the difference relative to the wanted actions', or its ``largest`` element.
    """

    inputs: Mapping[str, Tensor]
    wanted: Tensor
    dtype: Dtype
    cameras: int
    tokens: int
    steps: int
    measure: Literal["norm", "largest"]
    limit: float


@dataclass(frozen=True, slots=True)
class Shares:
    """The official code's shares of the time by stage, at so many prefix positions in bf16."""

    positions: int
    stages: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model.

    of_depth: released sizes with so many language layers, the other parts cut alike.
    peers: name -> module below ``benchmarks.peers`` with ``peer(model, name, options) -> Peer``.
    environments: peer -> environment below ``.peers``, where it is not the usual one of that name.
    golden_cases: the checks of one case file; none where the wiring leaves its feature out.
    golden_files: pattern of the case files.
    cameras, tokens, steps: defaults of the command line.
    pads: whether the official code pads a single request, as it is deployed.
    """

    name: str
    of_depth: Callable[[int], Sizes]
    from_folder: Callable[[Path], Sizes]
    peers: Mapping[str, str]
    golden_cases: Callable[[Path], Sequence[GoldenCase]]
    released_layers: int
    least_layers: int = 1
    cameras: int = 2
    tokens: int = 20
    steps: int = 10
    pads: bool = True
    golden_files: str = "case_b*.safetensors"
    environments: Mapping[str, str] = field(default_factory=dict)
    shares: Shares | None = None

    @property
    def first_peer(self) -> str:
        """The peer that is meant when none is named."""
        return next(name for name in self.peers if name != "phyai")

    def peer(self, name: str, options: str = "") -> Peer:
        """Return a peer; imports its packages only.

        Raises: Refused when they are not installed, or for a name the model does not have.
        """
        if name not in self.peers:
            raise Refused(
                f"peer must be one of {self.name}'s, {', '.join(self.peers)}; got {name!r}."
            )
        try:
            module = importlib.import_module(f"benchmarks.peers.{self.peers[name]}")
        except ImportError as error:
            raise Refused(
                f"peer {name!r} needs its packages in {sys.executable}; got {error}. "
                "Install them with paired.py --setup."
            ) from error
        found: Peer = module.peer(self.name, name, options)
        return found
