"""Stage times of requests of many sizes: warm-up, repeats, medians and their spread."""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from phyai.cost import StageCost, Workload
from phyai.errors import ConfigError

if TYPE_CHECKING:
    from phyai.engine import Engine

WAITED = ("queue",)
"""Timers that tell nothing about the engine's own speed."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of some values.

    >>> from phyai.profile.sweep import Spread
    >>> Spread.of([3.0, 1.0, 2.0])
    Spread(median=2.0, low=1.0, high=3.0, count=3)
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values), len(values))

    @property
    def relative(self) -> float:
        """Most minus least over the median; 0 for a median of 0."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Measurement:
    """One workload, measured.

    stages_ms: timer path -> milliseconds, "total" among them, parents before their children.
    first_ms: the very first request of this size, with everything built on the way.
    computed, published: the stages' cost by the two accounts; empty when the plugin has none.
    """

    workload: Workload
    stages_ms: Mapping[str, Spread]
    first_ms: float
    computed: Sequence[StageCost] = field(default=())
    published: Sequence[StageCost] = field(default=())

    @property
    def total_ms(self) -> Spread:
        return self.stages_ms["total"]

    @property
    def rows_per_s(self) -> float:
        return 1e3 * self.workload.rows / self.total_ms.median

    @property
    def timed(self) -> list[StageCost]:
        """The computed stages that were timed; in a captured graph no timer runs, and its stages
        count as the region they are in."""
        found = [stage for stage in self.computed if stage.timer in self.stages_ms]
        regions = {stage.timer.rpartition("/")[0] for stage in found}
        missing: dict[str, list[StageCost]] = {}
        for stage in self.computed:
            region = stage.timer.rpartition("/")[0]
            if stage.timer not in self.stages_ms and region not in regions:
                missing.setdefault(region, []).append(stage)
        whole = [_whole(r, parts) for r, parts in missing.items() if r in self.stages_ms]
        return whole + found

    def latency_shares(self) -> dict[str, float]:
        """Return stage -> part of the total time, and "other" for what no stage covers."""
        total = self.total_ms.median
        shares = {s.stage: self.stages_ms[s.timer].median / total for s in self.timed}
        shares["other"] = max(0.0, 1.0 - sum(shares.values()))
        return shares


def _whole(region: str, parts: Sequence[StageCost]) -> StageCost:
    """Return the stages of a region as one."""
    return StageCost(
        region,
        region,
        sum(stage.flops for stage in parts),
        sum(stage.weight_bytes for stage in parts),
        sum(stage.other_bytes for stage in parts),
        " + ".join(stage.stage for stage in parts),
    )


def grid(base: Workload, **values: Sequence[int] | None) -> list[Workload]:
    """Return every combination of the values given for rows, cameras, tokens and steps.

    A size without values keeps the base's. The last size varies fastest.
    """
    names = ("rows", "cameras", "tokens", "steps")
    axes = [values.get(name) or (getattr(base, name),) for name in names]
    return [Workload(**dict(zip(names, sizes, strict=True))) for sizes in itertools.product(*axes)]


def parse_sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    """Return the numbers of ``1,2,4`` in the order given; None stays None."""
    if text is None:
        return None
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} must be integers such as 1,2,4; got {text!r}.") from None
    if len(set(sizes)) != len(sizes):
        raise ConfigError(f"{option} must name a size once; got {text!r}.")
    return sizes


def measure(
    engine: Engine,
    workload: Workload,
    request: Any,
    *,
    repeat: int,
    warmup: int,
    on_run: Callable[[int, int, str], None] | None = None,
) -> Measurement:
    """Return the stage times of a request: the first run, ``warmup`` unseen ones, ``repeat``."""
    times: list[Mapping[str, float]] = []
    for done in range(1 + warmup + repeat):
        if on_run is not None:
            on_run(done, 1 + warmup + repeat, workload.label)
        engine.step(request)
        times.append(dict(engine.core.last_timing))
    kept = times[1 + warmup :]
    names = [name for name in kept[0] if name not in WAITED]
    stages = {name: Spread.of([timing.get(name, 0.0) for timing in kept]) for name in names}
    return Measurement(workload, stages, times[0]["total"])


@dataclass(frozen=True, slots=True)
class Conditions:
    """What decides about the numbers besides the code."""

    machine: str
    torch: str
    python: str
    threads: int
    load_before: float | None
    load_after: float | None
    started: str

    def lines(self) -> list[str]:
        """Return them as sentences for a table's head."""
        load = "unknown"
        if self.load_before is not None and self.load_after is not None:
            load = f"{self.load_before:.1f} before, {self.load_after:.1f} after"
        return [
            f"{self.started}, {self.machine}",
            f"torch {self.torch}, Python {self.python}, load {load}",
        ]


class Watch:
    """Notes the conditions of a series of measurements, from its start to ``conditions()``."""

    def __init__(self) -> None:
        self.load_before = load()
        self.started = time.strftime("%Y-%m-%d")

    def conditions(self, device: Any) -> Conditions:
        import torch

        from phyai.profile.probe import describe

        return Conditions(
            machine=describe(torch.device(device)),
            torch=str(torch.__version__),
            python=platform.python_version(),
            threads=torch.get_num_threads(),
            load_before=self.load_before,
            load_after=load(),
            started=self.started,
        )


def load() -> float | None:
    """Return the load average of the last minute, None where the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def batches(measured: Sequence[Measurement]) -> Iterator[list[Measurement]]:
    """Yield the measurements that differ in rows only, by rows, where there are several."""
    groups: dict[tuple[int, int, int], list[Measurement]] = {}
    for one in measured:
        work = one.workload
        groups.setdefault((work.cameras, work.tokens, work.steps), []).append(one)
    for group in groups.values():
        if len(group) > 1:
            yield sorted(group, key=lambda one: one.workload.rows)
