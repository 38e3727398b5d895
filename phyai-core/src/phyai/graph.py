"""Captured regions: the same function eager, compiled by inductor, or replayed as a CUDA graph."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from phyai.addresses import addresses, moved
from phyai.compiling import compiled, disk_cache_counts
from phyai.cuda_graph import (
    GRAPH_CAPTURING,
    Capturer,
    CudaGraph,
    CudaGraphRegistry,
    PooledCapturer,
    capture_on_stream,
    capturing,
)
from phyai.errors import ConfigError, CudaGraphError

__all__ = [
    "GRAPH_CAPTURING",
    "Capturer",
    "CudaGraph",
    "CudaGraphRegistry",
    "GraphBackend",
    "GraphService",
    "Region",
    "RegionReport",
    "capture_on_stream",
    "capturing",
]

log = logging.getLogger("phyai.graph")

GraphBackend: TypeAlias = Literal["eager", "inductor", "cuda"]


@dataclass(frozen=True, slots=True)
class RegionReport:
    """What one region has done: mode it runs in, replays, seconds to compile, graph memory.

    captures: 1, and one more for every time it was dropped or its tensors moved.
    reason: why it runs eagerly; "" when its back end runs it.
    cached: the compiler found its result on disk.
    """

    name: str
    key: str
    mode: str
    replays: int
    compile_s: float
    nbytes: int
    reason: str
    captures: int = 0
    cached: bool = False


class Region:
    """A function that runs as its back end allows; ``region()`` runs it once.

    Nothing is compiled or captured before the first call.
    """

    def __init__(
        self,
        service: GraphService,
        name: str,
        fn: Callable[[], object],
        key: Hashable,
        unsafe: str | None,
        reads: object = None,
        updates: Sequence[Tensor] = (),
    ) -> None:
        self.name, self.key, self.fn, self.reads = name, key, fn, reads
        self.updates = tuple(updates)
        self.mode: GraphBackend = "eager" if unsafe else service.backend
        self.reason = f"part {unsafe} is not capture-safe" if unsafe else ""
        self.replays = 0
        self.compile_s = 0.0
        self.nbytes = 0
        self.captures = 0
        self.cached = False
        self._addresses: dict[str, int] = {}
        self._service = service
        self._compiled: Callable[[], object] | None = None

    def __call__(self) -> None:
        self._service._touch(self)
        with torch.no_grad():
            if self.mode == "eager":
                self.fn()
            elif self._compiled is None:
                self._first_call()
            else:
                self._run_compiled(self._compiled)
        self.replays += 1

    def report(self) -> RegionReport:
        return RegionReport(
            self.name,
            str(self.key),
            self.mode,
            self.replays,
            self.compile_s,
            self.nbytes,
            self.reason,
            self.captures,
            self.cached,
        )

    def moved(self) -> list[str]:
        """Return the paths of the tensors that are no longer where the graph reads them."""
        if self._compiled is None or self.mode != "cuda":
            return []  # the compiler asks for its inputs at every call
        return moved(self._addresses, addresses(self.reads))

    def _first_call(self) -> None:
        """Compile or capture, and run; when that fails run eagerly from now on, and say so."""
        started = time.perf_counter()
        service = self._service
        before = disk_cache_counts() if self.mode == "inductor" else (0, 0)
        trial = _Trial(self.fn, self.updates)
        try:
            if self.mode == "inductor":
                ready = service._compile(self.fn)
            else:
                ready, self.nbytes = service._record(trial)
                self._addresses = addresses(self.reads)
            trial.over = True
            trial.put_back()
            ready()
        except Exception as error:
            trial.put_back()
            self._run_eagerly(error)
            return
        finally:
            trial.first.clear()
        seconds = time.perf_counter() - started
        self.compile_s += seconds
        self.captures += 1
        service.captures += 1
        self._compiled = ready
        done = f"captured, {self.nbytes:,} bytes"
        if self.mode == "inductor":
            loaded, made = disk_cache_counts()
            self.cached = loaded > before[0] and made == before[1]
            done = "loaded from the compiler's cache" if self.cached else "compiled by inductor"
        log.info("region %s %s, in %.2f s", self.name, done, seconds)

    def _run_compiled(self, compiled: Callable[[], object]) -> None:
        try:
            compiled()
        except Exception as error:
            # The tracer gives up (too many recompilations) before it runs anything.
            if not type(error).__module__.startswith("torch._dynamo"):
                raise
            self._run_eagerly(error)

    def _run_eagerly(self, error: Exception) -> None:
        self.fn()  # an error of the function itself is raised here, not counted as a fallback
        mode, self.mode = self.mode, "eager"
        self.reason = f"{mode} failed: {type(error).__name__}: {_first_line(error)}"
        self._drop()
        self._service._fell_back(self)

    def _drop(self) -> None:
        self._compiled, self.nbytes = None, 0
        self._addresses = {}


class _Trial:
    """Runs a function for a capture; after each run what it updates is as it was before."""

    def __init__(self, fn: Callable[[], object], updates: Sequence[Tensor]) -> None:
        self.fn = fn
        self.first = [(tensor, tensor.clone()) for tensor in updates]
        self.over = False  # a replay without CUDA calls this again, and that run counts

    def __call__(self) -> None:
        self.fn()
        if not self.over and not capturing():  # else it would be a part of the graph
            self.put_back()

    def put_back(self) -> None:
        for tensor, value in self.first:
            tensor.copy_(value)


class GraphService:
    """Captures regions and keeps the most recently used ones.

    static_shapes: None = what the back end needs; True makes eager the twin of the graphs, with
    their buckets, pads and sentinels.
    capturer: what back end ``cuda`` records with; None = CUDA graphs in one shared pool. Another
    one needs no CUDA device (``phyai.testing.capture``).

    A region's fn takes no arguments, reads and writes static buffers only, and gives the same
    result when it runs again on the same inputs: capturing runs it several times. What it reads and
    overwrites is named as ``updates``.

    >>> import torch
    >>> from phyai.graph import GraphService
    >>> graphs = GraphService("eager", torch.device("cpu"))
    >>> x, y = torch.ones(2), torch.zeros(2)
    >>> region = graphs.capture("double", lambda: y.copy_(2 * x), key=1)
    >>> region(); y
    tensor([2., 2.])
    """

    def __init__(
        self,
        backend: GraphBackend,
        device: str | torch.device,
        limit: int = 64,
        *,
        num_warmup_iters: int = 3,
        compile_options: Mapping[str, Any] | None = None,
        static_shapes: bool | None = None,
        capturer: Capturer | None = None,
    ) -> None:
        self.backend: GraphBackend = backend
        self._static_shapes = backend != "eager" if static_shapes is None else static_shapes
        self.device = torch.device(device)
        self.limit, self.num_warmup_iters = limit, num_warmup_iters
        self.captures = 0
        self.recaptures = 0
        self.fallbacks = 0
        self._capturer: Capturer = capturer or PooledCapturer(self.device, num_warmup_iters)
        self._compile_options = dict(compile_options or {})
        self._regions: OrderedDict[tuple[str, Hashable], Region] = OrderedDict()
        self._told: set[str] = set()  # parts that cannot be captured
        self._lock = threading.RLock()  # stats are read while another thread runs regions
        self._retired_replays = 0
        self._compiler_missing = False
        self._closed = False
        if backend not in ("eager", "inductor", "cuda"):
            raise ConfigError(
                f"graph backend must be 'cuda', 'eager' or 'inductor'; got {backend!r}. "
                "Choose one of them."
            )
        if backend == "cuda" and self.device.type != "cuda" and capturer is None:
            raise ConfigError(
                f"graph backend 'cuda' needs a CUDA device; got {str(self.device)!r}. "
                "Use 'inductor' or 'eager'."
            )
        if not self._static_shapes and backend != "eager":
            raise ConfigError(
                f"static shapes must be on for graph backend {backend!r}; got {static_shapes!r}. "
                "Leave the setting out, or use 'eager'."
            )
        if limit < 1:
            raise ConfigError(f"graph limit must be at least 1; got {limit!r}. Raise it.")

    @property
    def static_shapes(self) -> bool:
        """Whether batches must be padded to full buckets; eager runs exact shapes by default."""
        return self._static_shapes

    def capture(
        self,
        name: str,
        fn: Callable[[], object],
        key: Hashable = None,
        unsafe: str | None = None,
        reads: object = None,
        updates: Sequence[Tensor] = (),
    ) -> Region:
        """Return the region of (name, key); nothing is compiled before its first call.

        unsafe: name of a part that cannot be captured; the region then stays eager.
        reads: the objects whose tensors fn reads besides its cache, see ``recapture_moved``.
        updates: tensors that fn reads and overwrites; the runs of a capture put them back.
        A known (name, key) gives the same region while fn is equal; another fn replaces it,
        because its buffers may be others.
        Raises: CudaGraphError after close().
        """
        self._check_open()
        with self._lock:
            region = self._regions.get((name, key))
            if region is not None and region.fn == fn:
                return region
            if unsafe and self.backend != "eager" and unsafe not in self._told:
                self._told.add(unsafe)
                log.warning("region %s runs eagerly: part %s is not capture-safe", name, unsafe)
            region = Region(self, name, fn, key, unsafe, reads, updates)
            self._touch(region)
        return region

    def release(self, name: str) -> int:
        """Drop the regions called ``name`` or ``name/...``; return how many."""
        with self._lock:
            gone = [
                r for r in self._regions.values() if r.name == name or r.name.startswith(f"{name}/")
            ]
            for region in gone:
                self._retire(region)
        return len(gone)

    def recapture_moved(self) -> int:
        """Drop the graphs that read a tensor which has moved since; return how many.

        Called after a weight update. They are captured anew at their next call; a tensor that was
        only written in place costs nothing.
        """
        with self._lock:
            found = [(region, region.moved()) for region in self._regions.values()]
            stale = [(region, paths) for region, paths in found if paths]
            for region, paths in stale:
                more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
                log.info("region %s is captured again: %s%s moved", region.name, paths[0], more)
                region._drop()
            self.recaptures += len(stale)
        return len(stale)

    def close(self) -> None:
        """Drop every region; calling one afterwards is an error."""
        with self._lock:
            for region in list(self._regions.values()):
                self._retire(region)
            self._capturer.close()
            self._closed = True

    def report(self) -> list[RegionReport]:
        """Return one row per live region, least recently used first."""
        with self._lock:
            return [region.report() for region in self._regions.values()]

    @property
    def nbytes(self) -> int:
        """Device memory that the live graphs hold."""
        return sum(row.nbytes for row in self.report())

    def stats(self) -> dict[str, Any]:
        """Return counts, memory and the live regions, as plain JSON types."""
        with self._lock:
            rows, retired = self.report(), self._retired_replays
        return {
            "backend": self.backend,
            "captures": self.captures,
            "recaptures": self.recaptures,
            "replays": retired + sum(row.replays for row in rows),
            "fallbacks": self.fallbacks,
            "nbytes": sum(row.nbytes for row in rows),
            "regions": [{f: getattr(row, f) for f in RegionReport.__slots__} for row in rows],
        }

    # ------------------------------------------------------------ used by Region

    def _touch(self, region: Region) -> None:
        """Make the region the most recent one; over the limit the oldest loses its graph."""
        self._check_open()
        with self._lock:
            other = self._regions.get((region.name, region.key))
            if other is not None and other is not region:
                self._retire(other)
            self._regions[region.name, region.key] = region
            self._regions.move_to_end((region.name, region.key))
            while len(self._regions) > self.limit:
                self._retire(next(iter(self._regions.values())))

    def _retire(self, region: Region) -> None:
        """Forget a region and free its graph. Its holder may call it again: captured anew."""
        with self._lock:
            self._regions.pop((region.name, region.key), None)
            self._retired_replays += region.replays
            region.replays = 0
            region._drop()

    def _compile(self, fn: Callable[[], object]) -> Callable[[], object]:
        if self._compiler_missing:
            raise RuntimeError("no C++ compiler was found")
        return compiled(fn, self._compile_options)

    def _record(self, fn: Callable[[], object]) -> tuple[Callable[[], object], int]:
        return self._capturer.record(fn)

    def _fell_back(self, region: Region) -> None:
        self.fallbacks += 1
        if "InvalidCxxCompiler" in region.reason and not self._compiler_missing:
            self._compiler_missing = True
            log.warning(
                "region %s and all others run eagerly: no C++ compiler was found", region.name
            )
        elif not self._compiler_missing:
            log.warning("region %s runs eagerly: %s", region.name, region.reason)

    def _check_open(self) -> None:
        if self._closed:
            raise CudaGraphError(
                "graph service must be open; got a call after close(). Create a new engine."
            )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
