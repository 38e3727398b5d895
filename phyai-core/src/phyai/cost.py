"""What a request of a model costs by its shapes: operations and bytes of each stage.

Layer 1, torch-free. A plugin's manifest may name a function that returns a ``CostModel``; what
core measures is set against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from phyai.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Workload:
    """The sizes a request's cost depends on.

    rows: robots in the request.  cameras: valid images per row.  tokens: valid prompt tokens per
    row.  steps: solver steps.

    >>> from phyai.cost import Workload
    >>> Workload(cameras=3, tokens=16, steps=10).label
    '1 row, 3 cameras, 16 tokens, 10 steps'
    """

    rows: int = 1
    cameras: int = 0
    tokens: int = 0
    steps: int = 1

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("cameras", 0), ("tokens", 0), ("steps", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"workload {name} must be an integer of at least {least}; got {value!r}."
                )

    @property
    def label(self) -> str:
        """The sizes in words; those a model has none of are left out."""
        parts = [_count(self.rows, "row")]
        parts += [_count(self.cameras, "camera")] if self.cameras else []
        parts += [_count(self.tokens, "token")] if self.tokens else []
        return ", ".join([*parts, _count(self.steps, "step")])


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage of one request.

    stage: its name.  timer: path of the stage timer that covers it ("encode/vision"); "" = none.
    flops: a multiply-add counts as two; matrix products, convolutions and attention only.
    weight_bytes: weights, once per pass over them (a solver loop reads them at every step).
    other_bytes: what else must pass through memory: inputs, K/V, tables.
    """

    stage: str
    timer: str
    flops: float
    weight_bytes: float
    other_bytes: float = 0.0
    note: str = ""

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.other_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes if self.bytes else float("inf")


@dataclass(frozen=True, slots=True)
class Figure:
    """A latency somebody else published; never one of ours.

    ms: as the publisher wrote it, "27.3" or "20.0 / 27.3 / 36.8".  source: who published it.
    """

    source: str
    model: str
    hardware: str
    conditions: str
    ms: str
    precision: str = "not stated"


@dataclass(frozen=True, slots=True)
class Published:
    """Figures of one model, and what they have in common."""

    note: str
    figures: tuple[Figure, ...] = field(default=())


@runtime_checkable
class CostModel(Protocol):
    """What a plugin knows about the cost of one checkpoint."""

    def workload(self) -> Workload:
        """Return the checkpoint's own full request: all cameras, longest prompt, default steps."""
        ...

    def stages(
        self, workload: Workload, *, published: bool = False, itemsize: int = 2
    ) -> Sequence[StageCost]:
        """Return the stages in the order they run.

        published: count as publications do (everything the architecture describes) instead of
            what this runtime computes.  itemsize: bytes of a weight and of a cached number.
        """
        ...

    def request(self, workload: Workload, seed: int = 0) -> Any:
        """Return a model request of exactly these sizes, with random contents."""
        ...

    def published(self) -> Published:
        """Return latencies published by others."""
        ...


def total_flops(stages: Iterable[StageCost]) -> float:
    """Return the operations of all stages."""
    return sum(stage.flops for stage in stages)


def flop_shares(stages: Sequence[StageCost]) -> dict[str, float]:
    """Return stage -> its part of all operations, in [0, 1]."""
    total = total_flops(stages)
    return {stage.stage: stage.flops / total if total else 0.0 for stage in stages}


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
