"""From short slices to ratios: what is counted, what is left out, and how it is printed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Slice:
    """A path under load for a moment. cpu_s: by process. foreign: cores that others used."""

    path: str
    in_flight: int
    seconds: float
    latencies_s: list[float]
    acks_s: list[float]
    cpu_s: Mapping[str, float]
    foreign: float

    @property
    def rate(self) -> float:
        return len(self.latencies_s) / self.seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """A path between two slices of the direct one."""

    before: Slice
    slice: Slice
    after: Slice

    @property
    def drift(self) -> float:
        """How much the direct path changed over the pair, relative to the slower one."""
        low, high = sorted((self.before.rate, self.after.rate))
        return high / low - 1

    @property
    def ratio(self) -> float:
        """Its throughput in that of the direct path."""
        return 2 * self.slice.rate / (self.before.rate + self.after.rate)

    def added_s(self, q: float) -> float:
        """How much later than on the direct path the answers come, at a quantile."""
        direct = [*self.before.latencies_s, *self.after.latencies_s]
        return quantile(self.slice.latencies_s, q) - quantile(direct, q)


@dataclass(slots=True)
class Pairs:
    """All pairs of one path at one load. kept: those that the drift rule leaves."""

    path: str
    in_flight: int
    pairs: list[Pair] = field(default_factory=list)

    def kept(self, drift: float) -> list[Pair]:
        return [pair for pair in self.pairs if pair.drift <= drift]


def quantile(values: Iterable[float], q: float) -> float:
    """Return the nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles and extremes."""
    return {
        "median": statistics.median(values),
        "low": quantile(values, 0.25),
        "high": quantile(values, 0.75),
        "min": min(values),
        "max": max(values),
    }


def summary(found: Pairs, drift: float, bare: Pairs) -> dict[str, Any]:
    """Return a path's figures; ``few`` says that too few pairs were steady to leave any out."""
    kept = found.kept(drift)
    few = len(kept) < 5
    used = found.pairs if few else kept
    slices = [pair.slice for pair in used]
    latencies = [second for one in slices for second in one.latencies_s]
    acks = [second for one in slices for second in one.acks_s]
    cpu = {
        name: sum(one.cpu_s[name] for one in slices) / len(latencies) for name in slices[0].cpu_s
    }
    in_bare = [
        pair.ratio / other.ratio for pair, other in zip(found.pairs, bare.pairs, strict=True)
    ]
    return {
        "path": found.path,
        "in_flight": found.in_flight,
        "pairs": len(found.pairs),
        "kept": len(kept),
        "few": few,
        "requests": len(latencies),
        "per_second": statistics.median(one.rate for one in slices),
        "direct_ratio": spread([pair.ratio for pair in used]),
        "bare_ratio": spread(in_bare),
        "p50_ms": 1000 * quantile(latencies, 0.5),
        "p99_ms": 1000 * quantile(latencies, 0.99),
        "added_p50_ms": {k: 1000 * v for k, v in spread([p.added_s(0.5) for p in used]).items()},
        "added_p99_ms": {k: 1000 * v for k, v in spread([p.added_s(0.99) for p in used]).items()},
        "ack_p50_ms": 1000 * quantile(acks, 0.5) if acks else None,
        "ack_p99_ms": 1000 * quantile(acks, 0.99) if acks else None,
        "cpu_ms": {name: 1000 * value for name, value in cpu.items()},
        "foreign_cores": statistics.median(one.foreign for one in slices),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the summaries as text, one line each."""
    lines = [
        f"{'path':<8}{'in flight':>10}{'req/s':>8}  {'of direct (quartiles)':<24}{'of bare':>8}"
        f"{'p50 ms':>9}{'added':>8}{'p99 ms':>9}{'added':>8}{'CPU ms':>8}{'pairs':>9}"
    ]
    for row in rows:
        ratio, middle = row["direct_ratio"], f"{row['bare_ratio']['median']:.2f}"
        shown = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        own = row["cpu_ms"]["bare" if row["path"] == "bare" else "gateway"]
        lines.append(
            f"{row['path']:<8}{row['in_flight']:>10}{row['per_second']:>8.0f}  {shown:<24}"
            f"{middle:>8}{row['p50_ms']:>9.2f}{row['added_p50_ms']['median']:>8.2f}"
            f"{row['p99_ms']:>9.2f}{row['added_p99_ms']['median']:>8.2f}{own:>8.2f}"
            f"{row['kept']:>5}/{row['pairs']}" + (" few" if row["few"] else "")
        )
        if row["ack_p50_ms"] is not None:
            lines.append(
                f"{'':<8}{'':>10}{'':>8}  acknowledged after p50 {row['ack_p50_ms']:.2f} ms, "
                f"p99 {row['ack_p99_ms']:.2f} ms"
            )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure must be on two cores. at_least: else at most."""

    path: str
    in_flight: int
    what: str
    limit: float
    at_least: bool = False

    def value(self, rows: Sequence[Mapping[str, Any]]) -> float:
        row = next(r for r in rows if (r["path"], r["in_flight"]) == (self.path, self.in_flight))
        found = row[self.what]
        return float(found["median"] if isinstance(found, Mapping) else found)

    def met(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        value = self.value(rows)
        return value >= self.limit if self.at_least else value <= self.limit


TARGETS = (
    Target("native", 8, "direct_ratio", 0.5, at_least=True),
    Target("native", 1, "added_p50_ms", 1.5),
    Target("lerobot", 1, "p50_ms", 4.0),
    Target("lerobot", 1, "ack_p50_ms", 2.0),
    Target("openpi", 1, "p50_ms", 3.0),
    Target("gr00t", 1, "p50_ms", 3.0),
)


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each target with what was measured."""
    return [
        {
            "target": f"{t.path} at {t.in_flight}: {t.what} {'>=' if t.at_least else '<='} "
            f"{t.limit:g}",
            "measured": t.value(rows),
            "met": t.met(rows),
        }
        for t in TARGETS
    ]
