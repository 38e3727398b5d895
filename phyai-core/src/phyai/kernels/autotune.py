"""Kernels by measurement: time every row that fits, once, and remember the fastest in a file."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phyai.errors import ConfigError
from phyai.kernels.policy import fingerprint
from phyai.kernels.rows import Kernel, KernelRow
from phyai.kernels.samples import Sample, packed, sample

log = logging.getLogger("phyai")

CACHE_VERSION = 1
_WARM_UP, _MIN_RUNS, _BUDGET_S = 2, 5, 0.02

Fit = tuple[KernelRow, Callable[..., Any]]


@dataclass(frozen=True)
class Candidate:
    """One kernel to measure. ``sample`` holds made-up arguments of the layer's sizes, or is None
    where the layer does not tell them.
    """

    op: str
    kernel: str
    fn: Callable[..., Any]
    facts: Mapping[str, Any]
    sample: Sample | None

    def __call__(self) -> Any:
        """Run the kernel on its sample."""
        if self.sample is None:
            raise ConfigError(f"kernel {self.kernel!r} has no sample arguments to run on.")
        return self.fn(*self.sample.args, **self.sample.kwargs)


Benchmark = Callable[[Candidate], float]
"""Returns the cost of one candidate in any unit; the smallest wins."""


@dataclass(frozen=True)
class Measured:
    """The winner, and what is said about the others."""

    kernel: str
    others: tuple[tuple[str, str], ...] = ()


class Autotuner:
    """Measures the rows that fit a decision, once per set of facts.

    benchmark: None for ``seconds``, which skips ops without a sample.
    cache: JSON file of results; they hold for the same rows, policy, facts and device.
    capturing: whether a graph is being recorded; nothing is measured then.
    worth: tells from the facts whether a decision is worth measuring.
    """

    def __init__(
        self,
        benchmark: Benchmark | None = None,
        cache: str | os.PathLike[str] | None = None,
        *,
        capturing: Callable[[], bool] = lambda: False,
        worth: Callable[[Mapping[str, Any]], bool] = lambda facts: True,
    ) -> None:
        self._benchmark = benchmark
        self._path = None if cache is None else Path(cache)
        self._capturing, self._worth = capturing, worth
        self._known: dict[str, dict[str, Any]] = {} if self._path is None else _read(self._path)

    def best(
        self,
        fits: Sequence[Fit],
        facts: Mapping[str, Any],
        scope: tuple[str, str],
        *,
        measure: bool = True,
    ) -> Measured | None:
        """Return the cheapest of the rows that fit, or None when that is not known.

        scope: fingerprints of catalogue and policy.  measure: False to look at the cache only.
        Raises: ConfigError when the benchmark returns no finite number.
        """
        if not self._worth(facts):
            return None
        names = [row.name for row, _ in fits]
        plain = {name: facts[name] for name in sorted(facts)}
        key = fingerprint([CACHE_VERSION, scope, plain, names])
        entry = self._known.get(key)
        if entry is not None:
            return _verdict(entry["costs"])
        if not measure or facts.get("capture") or self._capturing():
            return None
        costs = self._measure(fits, facts)
        if not any(type(cost) is float for cost in costs.values()):
            return None
        shown = {name: str(value) for name, value in plain.items() if "." not in name}
        self._known[key] = {"facts": shown, "catalogue": scope[0], "policy": scope[1],
                            "costs": costs}  # fmt: skip
        if self._path is not None:
            _write(self._path, self._known)
        return _verdict(costs)

    def _measure(self, fits: Sequence[Fit], facts: Mapping[str, Any]) -> dict[str, float | str]:
        """Return the cost of each row, or the sentence that says why it has none."""
        made = sample(facts)
        if made is None and self._benchmark is None:
            return {}
        costs: dict[str, float | str] = {}
        for row, fn in fits:
            try:
                given = None if made is None else packed(made, Kernel(fn, row), facts)
                candidate = Candidate(str(facts["op"]), row.name, fn, facts, given)
                cost = (self._benchmark or seconds)(candidate)
            except Exception as error:  # a row that cannot run these sizes is no candidate
                costs[row.name] = f"measuring it failed: {type(error).__name__}: {error}"
                continue
            if type(cost) not in (int, float) or not math.isfinite(cost):
                raise ConfigError(
                    f"kernel.benchmark must return a finite number; got {cost!r} for "
                    f"{row.name!r}. Return the cost of the candidate."
                )
            costs[row.name] = float(cost)
        return costs


def _verdict(costs: Mapping[str, float | str]) -> Measured:
    ranked = sorted((cost, name) for name, cost in costs.items() if isinstance(cost, float))
    best, winner = ranked[0]
    others = [
        (name, f"costs {cost:.3g}, the chosen one {best:.3g}")
        if isinstance(cost, float)
        else (name, cost)
        for name, cost in costs.items()
        if name != winner
    ]
    return Measured(winner, tuple(others))


@torch.no_grad()
def seconds(candidate: Candidate) -> float:
    """Return the median time of a few calls, after warm-up calls that do not count."""
    cuda = str(candidate.facts["device"]) == "cuda"
    times: list[float] = []
    for number in range(_WARM_UP + 200):
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        candidate()
        if cuda:
            torch.cuda.synchronize()
        if number >= _WARM_UP:
            times.append(time.perf_counter() - started)
        if len(times) >= _MIN_RUNS and sum(times) > _BUDGET_S:
            break
    return statistics.median(times)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a cache file; a damaged one is worth a warning and nothing else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("kernel autotune cache %s cannot be read and starts anew: %s", path, error)
        return {}
    if not isinstance(data, dict) or data.get("version") != CACHE_VERSION:
        log.warning("kernel autotune cache %s is of another version and starts anew", path)
        return {}
    entries = data.get("entries")
    return {
        key: entry
        for key, entry in (entries.items() if isinstance(entries, dict) else ())
        if _is_entry(entry)
    }


def _is_entry(entry: object) -> bool:
    costs = entry.get("costs") if isinstance(entry, dict) else None
    if not isinstance(costs, dict):
        return False
    numbers = [cost for cost in costs.values() if type(cost) is float]
    return bool(numbers) and all(math.isfinite(cost) for cost in numbers)


def _write(path: Path, entries: Mapping[str, Any]) -> None:
    """Write the cache in one step, with what other processes added meanwhile."""
    text = json.dumps({"version": CACHE_VERSION, "entries": {**_read(path), **entries}}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("kernel autotune cache %s cannot be written: %s", path, error)
