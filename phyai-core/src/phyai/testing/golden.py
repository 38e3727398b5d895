"""Runs golden cases through real engines and compares every tensor."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phyai.adapter import Adapter
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.errors import ConfigError
from phyai.golden import Comparison, GoldenRun, Records
from phyai.plugins import find

CASE_PREFIXES = ("case_", "track_case_", "preprocess_")


@dataclass(frozen=True)
class CaseResult:
    """One run of one case file; no comparisons = the adapter cannot run this kind yet."""

    path: Path
    label: str
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.comparisons)


class GoldenRunner:
    """Runs cases of one plugin, keeping an engine per set of adapter arguments.

    >>> GoldenRunner(plugin_id).run(path, root)                          # doctest: +SKIP
    """

    def __init__(self, plugin: str, config: EngineConfig | None = None) -> None:
        self.plugin = plugin
        self.config = config or EngineConfig(
            device=DeviceConfig(target="cpu", params_dtype=torch.float32)
        )
        manifest = find(plugin).manifest
        if manifest is None or not manifest.golden:
            raise ConfigError(
                f"plugin {plugin!r} declares no golden cases (manifest field golden). "
                "Choose another plugin."
            )
        module, _, name = manifest.golden.partition(":")
        self._runs: Callable[[Path, Path], Sequence[GoldenRun]] = getattr(
            importlib.import_module(module), name
        )
        self._engines: dict[str, Engine] = {}

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Return the engines that are open, one per set of adapter arguments."""
        return tuple(self._engines.values())

    def run(self, path: Path, root: Path) -> list[CaseResult]:
        """Return one result per run of the case; an empty one when its kind has no run."""
        runs = self._runs(path, root)
        if not runs:
            return [CaseResult(path, path.stem, ())]
        return [CaseResult(path, run.label, tuple(self._execute(run))) for run in runs]

    def _execute(self, run: GoldenRun) -> list[Comparison]:
        return run.compare(*self.outcome(run))

    def outcome(self, run: GoldenRun) -> tuple[Adapter | None, Any, Records]:
        """Return what ``run.compare`` takes: adapter, result and records; Nones without request."""
        if run.request is None:
            return None, None, {}
        engine = self._engine(run)
        with engine.core.services.profile.recorder.recording(run.records) as records:
            result = engine.step(run.request)
        return engine.adapter, result, records

    def _engine(self, run: GoldenRun) -> Engine:
        if run.args is None:
            raise ConfigError(f"golden run {run.label!r} has a request but no adapter arguments.")
        key = repr(dataclasses.asdict(run.args))
        if key not in self._engines:
            self._engines[key] = Engine(EngineArgs(self.plugin, run.args, self.config))
        return self._engines[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()


@contextmanager
def golden_runner(plugin: str, config: EngineConfig | None = None) -> Iterator[GoldenRunner]:
    """Open a GoldenRunner and close its engines afterwards."""
    runner = GoldenRunner(plugin, config)
    try:
        yield runner
    finally:
        runner.close()


def case_files(folder: Path) -> list[Path]:
    """Return all case files of a golden folder, sub-folders included, sorted."""
    found: list[Any] = [
        path
        for path in folder.rglob("*")
        if path.name.startswith(CASE_PREFIXES) and path.suffix in (".safetensors", ".json")
    ]
    return sorted(found)
