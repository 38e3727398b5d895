"""Captured regions: the same function eager, compiled by inductor, or replayed as a CUDA graph."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from phyai.cuda_graph import (
    GRAPH_CAPTURING,
    CudaGraph,
    CudaGraphRegistry,
    capture_on_stream,
    capturing,
)
from phyai.errors import ConfigError, CudaGraphError

__all__ = [
    "GRAPH_CAPTURING",
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
    """What one region has done: mode it runs in, replays, seconds to compile, graph memory."""

    name: str
    key: str
    mode: str
    replays: int
    compile_s: float
    nbytes: int
    reason: str


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
    ) -> None:
        self.name, self.key, self.fn = name, key, fn
        self.mode: GraphBackend = "eager" if unsafe else service.backend
        self.reason = f"part {unsafe} is not capture-safe" if unsafe else ""
        self.replays = 0
        self.compile_s = 0.0
        self.nbytes = 0
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
        )

    def _first_call(self) -> None:
        """Compile or capture, and run; when that fails run eagerly from now on, and say so."""
        started = time.perf_counter()
        service = self._service
        try:
            if self.mode == "inductor":
                compiled = service._compile(self.fn)
            else:
                compiled, self.nbytes = service._record(self.fn)
            compiled()
        except Exception as error:
            self._run_eagerly(error)
            return
        self.compile_s += time.perf_counter() - started
        service.captures += 1
        self._compiled = compiled

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


class GraphService:
    """Captures regions and keeps the most recently used ones.

    static_shapes: None = what the back end needs; True makes eager the twin of the graphs, with
    their buckets, pads and sentinels.

    A region's fn takes no arguments, reads and writes static buffers only, and gives the same
    result when it runs again on the same inputs: capturing runs it several times.

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
    ) -> None:
        self.backend: GraphBackend = backend
        self._static_shapes = backend != "eager" if static_shapes is None else static_shapes
        self.device = torch.device(device)
        self.limit, self.num_warmup_iters = limit, num_warmup_iters
        self.captures = 0
        self.fallbacks = 0
        self._compile_options = dict(compile_options or {})
        self._regions: OrderedDict[tuple[str, Hashable], Region] = OrderedDict()
        self._lock = threading.RLock()  # stats are read while another thread runs regions
        self._retired_replays = 0
        self._pool: Any = None
        self._compiler_missing = False
        self._closed = False
        if backend not in ("eager", "inductor", "cuda"):
            raise ConfigError(
                f"graph backend must be 'cuda', 'eager' or 'inductor'; got {backend!r}. "
                "Choose one of them."
            )
        if backend == "cuda" and self.device.type != "cuda":
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
    ) -> Region:
        """Return the region of (name, key); nothing is compiled before its first call.

        unsafe: name of a part that cannot be captured; the region then stays eager.
        A known (name, key) gives the same region while fn is equal; another fn replaces it,
        because its buffers may be others.
        Raises: CudaGraphError after close().
        """
        self._check_open()
        with self._lock:
            region = self._regions.get((name, key))
            if region is not None and region.fn == fn:
                return region
            if unsafe and self.backend != "eager":
                log.warning("region %s runs eagerly: part %s is not capture-safe", name, unsafe)
            region = Region(self, name, fn, key, unsafe)
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

    def close(self) -> None:
        """Drop every region; calling one afterwards is an error."""
        with self._lock:
            for region in list(self._regions.values()):
                self._retire(region)
            self._pool, self._closed = None, True

    def report(self) -> list[RegionReport]:
        """Return one row per live region, least recently used first."""
        with self._lock:
            return [region.report() for region in self._regions.values()]

    def stats(self) -> dict[str, Any]:
        """Return counts, memory and the live regions, as plain JSON types."""
        with self._lock:
            rows, retired = self.report(), self._retired_replays
        return {
            "backend": self.backend,
            "captures": self.captures,
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
        # A fresh code object: torch counts recompilations per code object, and many regions
        # share one. The whole function or nothing: half a region must not run before a failure.
        compiled: Callable[[], object] = torch.compile(
            _own_code(fn),
            backend="inductor",
            dynamic=False,
            fullgraph=True,
            options=self._compile_options or None,
        )
        return compiled

    def _record(self, fn: Callable[[], object]) -> tuple[Callable[[], object], int]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.memory_reserved(self.device)
        graph = CudaGraph(self.num_warmup_iters, self._pool, device=self.device)
        graph.capture(fn, {})
        return graph.replay, max(0, torch.cuda.memory_reserved(self.device) - before)

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


def _own_code(fn: Callable[[], object]) -> Callable[[], object]:
    """Return a function that calls fn and shares its code object with nobody."""

    def region() -> object:
        return fn()

    region.__code__ = region.__code__.replace(co_name=f"region_{id(region):x}")
    return region


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
