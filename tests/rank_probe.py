"""A hook plugin of the tests: every rank writes what it exchanged, counted and saw.

It is installed by ``installed`` and silent unless environment variable RANK_PROBE names a folder.
There each rank leaves ``load-<rank>.json``, and per request ``<number>-<rank>.json`` with what its
encoding, each of its steps and its output did. Where the folder has a file ``record``, all tensors
that the rank's recorder is given lie beside it, ``<number>-<rank>.safetensors``.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phyai.hooks import hookimpl
from phyai.testing.sandbox import Sandbox

FOLDER = "RANK_PROBE"
NAME = "rank_probe"
AXES = ("tp", "cfg", "world")
SPLIT = {"ColumnLinear", "QKVLinear", "RowLinear", "VocabParallelEmbedding"}
_made: dict[int, Probe] = {}


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Let this process, and all that it starts meanwhile, see the plugin."""
    sandbox = Sandbox(folder)
    sandbox.distribution("rank-probe-dist", {}, {"phyai.hooks": {NAME: __name__}})
    try:
        with sandbox.visible():
            yield
    finally:
        _made.clear()


class Probe:
    """What one rank notes, and where."""

    def __init__(self, services: Any, folder: Path) -> None:
        self.services, self.folder = services, folder
        self.rank: int = services.parallel.rank
        self.requests = 0
        self._begin()

    def _begin(self) -> None:
        self.encode: Counter[str] = Counter()
        self.steps: list[dict[str, int]] = []
        self.output: Counter[str] = Counter()
        self._recording: Any = None
        self._records: dict[str, list[Any]] = {}

    def totals(self) -> Counter[str]:
        """Everything counted so far: collectives and bytes per axis, and work done."""
        found: Counter[str] = Counter(self.services.profile.counters)
        for axis in AXES:
            traffic = getattr(self.services.parallel, axis).traffic
            found[f"{axis}.collectives"] = traffic.collectives
            found[f"{axis}.bytes"] = traffic.payload_bytes
        return found

    @contextmanager
    def counting(self, into: Counter[str]) -> Iterator[None]:
        """Add what is counted meanwhile."""
        before = self.totals()
        yield
        into.update(self.totals() - before)

    def listen(self) -> None:
        """Begin to record, where a test wants it; what a failed request left is dropped."""
        if self.steps:
            self._stop()
        if self._recording is None and (self.folder / "record").exists():
            self._recording = self.services.profile.recorder.recording()
            self._records = self._recording.__enter__()

    def finish(self) -> None:
        """Write what a request did."""
        found = {"encode": dict(self.encode), "steps": self.steps, "output": dict(self.output)}
        self.write(f"{self.requests}-{self.rank}", found)
        if self._recording is not None:
            from safetensors.torch import save_file

            flat = {
                f"{name}#{i}": tensor.contiguous()
                for name, tensors in self._records.items()
                for i, tensor in enumerate(tensors)
            }
            save_file(flat, self.folder / f"{self.requests}-{self.rank}.safetensors")
        self.requests += 1
        self._stop()

    def _stop(self) -> None:
        if self._recording is not None:
            self._recording.__exit__(None, None, None)
        self._begin()

    def write(self, name: str, found: dict[str, Any]) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")


def probe_of(services: Any) -> Probe | None:
    """Return the probe of one rank's services; None where nobody asked for one."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return None
    return _made.setdefault(id(services), Probe(services, Path(folder)))


def _held(adapter: Any) -> dict[str, int]:
    """Bytes of the parameters in layers that ranks split, and of the others."""
    found = Counter(split=0, whole=0)
    for module in adapter.modules.modules():
        kinds = {cls.__name__ for cls in type(module).__mro__}
        kind = "split" if kinds & SPLIT else "whole"
        for parameter in module.parameters(recurse=False):
            found[kind] += parameter.numel() * parameter.element_size()
    return dict(found)


class _Around:
    """A part that is watched; what it does not have is the inner part's."""

    def __init__(self, inner: Any, probe: Probe) -> None:
        self.inner, self.probe = inner, probe

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "probe"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class _Encoding(_Around):
    def encode(self, cache: Any) -> None:
        self.probe.listen()
        with self.probe.counting(self.probe.encode):
            self.inner.encode(cache)


class _Prediction(_Around):
    def __call__(self, x: Any, step: Any, cache: Any) -> Any:
        found: Counter[str] = Counter()
        with self.probe.counting(found):
            out = self.inner(x, step, cache)
        self.probe.steps.append(dict(found))
        return out


class _Output(_Around):
    def decode(self, x: Any, cache: Any, prepared: Any) -> Any:
        return self._watched(self.inner.decode, x, cache, prepared)

    def tensors(self, x: Any, cache: Any, prepared: Any) -> Any:
        return self._watched(self.inner.tensors, x, cache, prepared)

    def _watched(self, act: Any, *given: Any) -> Any:
        with self.probe.counting(self.probe.output):
            found = act(*given)
        self.probe.finish()
        return found


@hookimpl(wrapper=True)
def phyai_conditioning(adapter: Any, services: Any) -> Generator[None, Any, Any]:
    inner = yield
    probe = probe_of(services)
    if probe is None:
        return inner
    counters = services.profile.counters
    probe.write(
        f"load-{probe.rank}", {"read": counters.get("weight_bytes_read", 0), **_held(adapter)}
    )
    return _Encoding(inner, probe)


@hookimpl(wrapper=True)
def phyai_denoiser(stage: str, services: Any) -> Generator[None, Any, Any]:
    inner = yield
    probe = probe_of(services)
    return inner if probe is None or stage != "prediction" else _Prediction(inner, probe)


@hookimpl(wrapper=True)
def phyai_output(services: Any) -> Generator[None, Any, Any]:
    inner = yield
    probe = probe_of(services)
    return inner if probe is None else _Output(inner, probe)
