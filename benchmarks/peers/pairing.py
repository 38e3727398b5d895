"""Pairs of runs: strictly alternating, each between two probes, kept or dropped by rule."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.peers.machine import CpuSample

Probe = Callable[[], Mapping[str, float]]
Sample = Callable[[], CpuSample]
Say = Callable[[str], None]

# The kernel counts CPU time in ticks of 10 ms, per core and process.
TICK_ERROR_S = 0.05


class Runs(Protocol):
    """A side that runs when asked and otherwise waits."""

    label: str

    def ask(self, op: str, limit_s: float, **fields: Any) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """What makes a pair count.

    drift: largest change of a probe over the pair, relative to the lower of the two values.
    foreign: largest CPU time of others, in cores.  most: pairs to try for ``pairs`` kept ones.
    """

    pairs: int = 10
    most: int = 30
    drift: float = 0.10
    foreign: float = 0.10
    run_limit_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of each side. dropped: why it does not count, or empty."""

    ours_s: float
    peer_s: float
    ours_stages: Mapping[str, float]
    peer_stages: Mapping[str, float]
    drift: float
    foreign_cores: float
    dropped: str

    @property
    def ratio(self) -> float:
        """How many times as long the peer took."""
        return self.peer_s / self.ours_s


@dataclass
class Measured:
    """Every pair in the order it ran."""

    pairs: list[Pair] = field(default_factory=list)
    probes: list[dict[str, float]] = field(default_factory=list)

    @property
    def kept(self) -> list[Pair]:
        return [pair for pair in self.pairs if not pair.dropped]

    @property
    def dropped(self) -> Counter[str]:
        """How many pairs were dropped for which reason."""
        return Counter(pair.dropped for pair in self.pairs if pair.dropped)


def measure(
    ours: Runs, peer: Runs, rules: Rules, probe: Probe, sample: Sample, say: Say
) -> Measured:
    """Run ours, peer, ours, peer, ... until enough pairs are kept or ``rules.most`` have run.

    A probe stands between any two pairs; the one after a pair is the one before the next.
    """
    measured = Measured()
    before = dict(probe())
    measured.probes.append(before)
    while len(measured.kept) < rules.pairs and len(measured.pairs) < rules.most:
        began = sample()
        first = ours.ask("run", rules.run_limit_s)
        second = peer.ask("run", rules.run_limit_s)
        ended = sample()
        after = dict(probe())
        measured.probes.append(after)
        pair = judged(first, second, before, after, began, ended, rules)
        measured.pairs.append(pair)
        before = after
        say(
            f"pair {len(measured.pairs)}: {pair.ours_s:.3f} s and {pair.peer_s:.3f} s, ratio "
            f"{pair.ratio:.2f}" + (f", dropped: {pair.dropped}" if pair.dropped else "")
        )
    return measured


def judged(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    before: Mapping[str, float],
    after: Mapping[str, float],
    began: CpuSample,
    ended: CpuSample,
    rules: Rules,
) -> Pair:
    """Return the pair of two replies, kept or dropped."""
    drift = max(abs(after[name] - before[name]) / min(after[name], before[name]) for name in before)
    wall = ended.wall_s - began.wall_s
    foreign_s = ended.foreign_since(began)
    dropped = ""
    if drift > rules.drift:
        dropped = f"machine speed changed by over {100 * rules.drift:.0f} %"
    elif foreign_s > rules.foreign * wall + TICK_ERROR_S:
        dropped = f"others used over {rules.foreign:g} cores"
    return Pair(
        ours_s=float(first["seconds"]),
        peer_s=float(second["seconds"]),
        ours_stages=first.get("stages") or {},
        peer_stages=second.get("stages") or {},
        drift=drift,
        foreign_cores=foreign_s / wall if wall > 0 else 0.0,
        dropped=dropped,
    )


def spread(values: list[float]) -> dict[str, float]:
    """Return median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def medians(stages: list[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each stage that every run reports."""
    names = [name for name in stages[0] if all(name in run for run in stages)] if stages else []
    return {name: statistics.median(run[name] for run in stages) for name in names}
