"""Engines of several ranks: requests through them, and what every rank saw of each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from phyai import Engine
from phyai.engine_config import EngineConfig, ParallelConfig
from phyai.golden import Comparison, GoldenRun, Records
from tests import rank_probe
from tests.cpu_engines import cpu_config


@dataclass(frozen=True)
class Mesh:
    """Ranks of a replica: rank = cfg rank * tp + tp rank."""

    tp: int = 1
    cfg: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.cfg

    def __str__(self) -> str:
        return f"tp{self.tp}" if self.cfg == 1 else f"cfg{self.cfg}xtp{self.tp}"


@dataclass(frozen=True)
class Ask:
    """One request of a run.  record: whether the ranks' tensors are kept.  golden: its case."""

    name: str
    request: Any
    record: bool = True
    golden: GoldenRun | None = None


@dataclass
class Seen:
    """What one rank did for one request: counts of its parts, and what it recorded."""

    encode: dict[str, int]
    steps: list[dict[str, int]]
    output: dict[str, int]
    records: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass
class Run:
    """What an engine of one mesh did.

    answers: of each request, an error where it failed.  seen: of each that did not, by rank.
    loads: bytes that each rank read and holds.
    """

    mesh: Mesh
    answers: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, list[Seen]] = field(default_factory=dict)
    loads: list[dict[str, int]] = field(default_factory=list)


def config_of(mesh: Mesh, timeout_s: float = 60.0) -> EngineConfig:
    """Return the settings of a float32 replica with one thread per rank."""
    parallel = ParallelConfig(tp_size=mesh.tp, cfg_size=mesh.cfg, timeout_s=timeout_s)
    return cpu_config(num_threads=1).replace(parallel=parallel)


@contextmanager
def probing(folder: Path) -> Iterator[None]:
    """Have the ranks of engines that are opened meanwhile write what they see."""
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get(rank_probe.FOLDER)
    os.environ[rank_probe.FOLDER] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[rank_probe.FOLDER]
        else:
            os.environ[rank_probe.FOLDER] = before


def run_all(engine: Engine, mesh: Mesh, asks: Sequence[Ask], folder: Path) -> Run:
    """Send every request and read what the ranks wrote of it; for an engine of ``probing``."""
    done, number, flag = Run(mesh), 0, folder / "record"
    for ask in asks:
        flag.touch() if ask.record else flag.unlink(missing_ok=True)
        try:
            done.answers[ask.name] = engine.step(ask.request)
        except Exception as error:
            done.answers[ask.name] = error
            continue
        done.seen[ask.name] = [_seen(folder, number, rank) for rank in range(mesh.world)]
        number += 1
    for rank in range(mesh.world):
        done.loads.append(json.loads((folder / f"load-{rank}.json").read_text("utf-8")))
    return done


def _seen(folder: Path, number: int, rank: int) -> Seen:
    found = Seen(**json.loads((folder / f"{number}-{rank}.json").read_text("utf-8")))
    tensors = folder / f"{number}-{rank}.safetensors"
    if tensors.exists():
        for name, tensor in sorted(load_file(tensors).items(), key=_place):
            found.records.setdefault(name.partition("#")[0], []).append(tensor)
    return found


def _place(item: tuple[str, Tensor]) -> tuple[str, int]:
    name, _, number = item[0].partition("#")
    return name, int(number)


def golden_errors(ask: Ask, adapter: Any, answer: Any, records: Records) -> list[Comparison]:
    """Return the comparisons of a golden request that are out of tolerance.

    Raises: AssertionError when it failed, or nothing was compared.
    """
    assert ask.golden is not None
    assert not isinstance(answer, BaseException), f"{ask.name}: {answer!r}"
    found = ask.golden.compare(adapter, answer, records)
    assert found, f"{ask.name}: nothing was compared"
    return [comparison for comparison in found if not comparison.ok]
