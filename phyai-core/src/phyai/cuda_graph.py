"""One captured CUDA graph, a registry of them, and the flag that says a capture is going on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from phyai.errors import CudaGraphError, did_you_mean

GRAPH_CAPTURING: ContextVar[bool] = ContextVar("GRAPH_CAPTURING", default=False)
"""True while a graph records; ops that cannot be captured must not run then."""

_CAPTURE_STREAM: ContextVar[Any] = ContextVar("CAPTURE_STREAM", default=None)


def capturing() -> bool:
    """Return whether a graph is being recorded in this context."""
    return GRAPH_CAPTURING.get()


@contextmanager
def capture_on_stream(stream: Any) -> Iterator[None]:
    """Record on this CUDA stream. Warm-up keeps its own: first calls of libraries fail on some."""
    token = _CAPTURE_STREAM.set(stream)
    try:
        yield
    finally:
        _CAPTURE_STREAM.reset(token)


class CudaGraph:
    """Records a function over private static buffers once and replays it.

    fn takes its inputs by keyword and returns tensors, or tuples, lists or dicts of them. It runs
    ``num_warmup_iters`` times and once for the record, so it must not build on its own effects.
    The outputs keep their storage and are overwritten by the next replay: clone what must stay.
    Without CUDA (device "cpu") nothing is recorded, ``replay`` calls fn; every rule still holds.

    >>> import torch
    >>> from phyai.graph import CudaGraph
    >>> graph = CudaGraph(device="cpu")
    >>> graph.capture(lambda x: x + 1, {"x": torch.zeros(2)})
    >>> graph.replay({"x": torch.ones(2)})
    tensor([2., 2.])
    """

    def __init__(
        self,
        num_warmup_iters: int = 3,
        mempool: Any = None,
        *,
        device: str | torch.device | None = None,
    ) -> None:
        self.num_warmup_iters, self.mempool = num_warmup_iters, mempool
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(default if device is None else device)
        self._fn: Callable[..., Any] | None = None
        self._buffers: dict[str, Tensor] = {}
        self._outputs: Any = None
        self._graph: Any = None
        self.nbytes = 0
        """Device memory the capture added; what a shared pool already had costs nothing."""

    @property
    def captured(self) -> bool:
        return self._fn is not None

    def capture(self, fn: Callable[..., Any], example_inputs: Mapping[str, Tensor]) -> None:
        """Record ``fn(**buffers)``, the buffers being private copies of the example inputs.

        Raises: CudaGraphError when captured before, for tensors of another device, without CUDA.
        """
        if self.captured:
            raise CudaGraphError(
                "graph may be captured once; got a second capture. Create a new CudaGraph."
            )
        for name, tensor in example_inputs.items():
            if tensor.device.type != self.device.type:
                raise CudaGraphError(
                    f"graph input {name!r} must live on {self.device.type}; got a tensor on "
                    f"{tensor.device}. Move it there first."
                )
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise CudaGraphError(
                "graph on device 'cuda' needs a CUDA device; got none. Use device='cpu'."
            )
        self._buffers = {name: tensor.detach().clone() for name, tensor in example_inputs.items()}
        if self.device.type == "cuda":
            self._record(fn)
        else:
            with recording_flag():
                self._outputs = fn(**self._buffers)
        self._fn = fn

    def replay(self, inputs: Mapping[str, Tensor] | None = None) -> Any:
        """Copy the given inputs into their buffers, run, and return the (static) outputs.

        Inputs left out keep their last value.
        Raises: CudaGraphError before capture, for unknown names, other shapes or dtypes.
        """
        if self._fn is None:
            raise CudaGraphError(
                "graph must be captured before replay; got none. Call capture() first."
            )
        given = dict(inputs or {})
        for name, tensor in given.items():
            self._check(name, tensor)
        for name, tensor in given.items():
            self._buffers[name].copy_(tensor)
        if self._graph is not None:
            self._graph.replay()
        else:
            _copy_into(self._outputs, self._fn(**self._buffers))
        return self._outputs

    def _check(self, name: str, tensor: Tensor) -> None:
        if name not in self._buffers:
            raise CudaGraphError(
                f"graph input must be one of {', '.join(sorted(self._buffers)) or 'none'}; got "
                f"{name!r}.{did_you_mean(name, self._buffers)} Use the names of the capture."
            )
        want, got = self._buffers[name], tensor
        if want.shape != got.shape or want.dtype != got.dtype:
            raise CudaGraphError(
                f"graph input {name!r} must be {list(want.shape)} {want.dtype} as captured; got "
                f"{list(got.shape)} {got.dtype}. Pad to the bucket or capture another graph."
            )

    def _record(self, fn: Callable[..., Any]) -> None:
        with torch.cuda.device(self.device), torch.no_grad():
            current = torch.cuda.current_stream()
            side: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(self.num_warmup_iters):
                    fn(**self._buffers)
            current.wait_stream(side)
            torch.cuda.synchronize(self.device)
            gc.collect()
            torch.cuda.empty_cache()  # what the warm-up left must not count as the graph's
            before = torch.cuda.memory_reserved(self.device)
            graph = torch.cuda.CUDAGraph()
            stream = _CAPTURE_STREAM.get()
            # thread_local: an allocation of another thread's engine must not end this capture.
            with (
                recording_flag(),
                torch.cuda.graph(
                    graph,
                    pool=self.mempool,
                    stream=stream,
                    capture_error_mode="thread_local",
                ),
            ):
                self._outputs = fn(**self._buffers)
            self.nbytes = max(0, torch.cuda.memory_reserved(self.device) - before)
        self._graph = graph


class CudaGraphRegistry:
    """Captured graphs by key; a key is taken once.

    >>> import torch
    >>> from phyai.graph import CudaGraph, CudaGraphRegistry
    >>> graph, graphs = CudaGraph(device="cpu"), CudaGraphRegistry()
    >>> graph.capture(torch.sin, {"input": torch.zeros(2)})
    >>> graphs.register(("encode", 2), graph)
    >>> ("encode", 2) in graphs, len(graphs)
    (True, 1)
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, CudaGraph] = {}

    def register(self, key: Hashable, graph: CudaGraph) -> None:
        """Raises: CudaGraphError when the key is taken or the graph not captured."""
        if key in self._graphs:
            raise CudaGraphError(
                f"graph key must be new; got {key!r} again. Remove the old graph first."
            )
        if not graph.captured:
            raise CudaGraphError(
                f"graph {key!r} must be captured before it is registered; got an empty one. "
                "Call capture() first."
            )
        self._graphs[key] = graph

    def get(self, key: Hashable) -> CudaGraph | None:
        return self._graphs.get(key)

    def remove(self, key: Hashable) -> None:
        self._graphs.pop(key, None)

    def clear(self) -> None:
        self._graphs.clear()

    def __contains__(self, key: object) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)


class Capturer(Protocol):
    """What the graph service needs of a back end that records and replays."""

    def record(self, fn: Callable[[], object]) -> tuple[Callable[[], object], int]:
        """Return what runs the recorded work of fn again, and the bytes the record holds."""
        ...

    def close(self) -> None:
        """Let go of what the records share."""
        ...


class PooledCapturer:
    """CUDA graphs of one device in one memory pool.

    The graphs may share it because a region leaves its results in static buffers outside the pool
    and regions run one after another: what one graph keeps there between two of its operators is
    of no use once it has run. Allocating inside a capture is therefore allowed: it takes a place in
    the pool, for ever at the same address.

    >>> import torch
    >>> from phyai.cuda_graph import PooledCapturer
    >>> x, y = torch.ones(2), torch.zeros(2)
    >>> replay, nbytes = PooledCapturer("cpu").record(lambda: y.copy_(2 * x))
    >>> _ = x.fill_(3), replay(); y
    tensor([6., 6.])
    """

    def __init__(self, device: str | torch.device, num_warmup_iters: int = 3) -> None:
        self.device, self.num_warmup_iters = torch.device(device), num_warmup_iters
        self._pool: Any = None

    def record(self, fn: Callable[[], object]) -> tuple[Callable[[], object], int]:
        if self._pool is None and self.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        graph = CudaGraph(self.num_warmup_iters, self._pool, device=self.device)

        def nothing_kept() -> None:
            fn()  # a returned tensor of the pool would be overwritten by the next graph

        try:
            graph.capture(nothing_kept, {})
        except BaseException:
            self._pool = None  # a capture that broke off may have left it in use
            raise
        return graph.replay, graph.nbytes

    def close(self) -> None:
        self._pool = None


@contextmanager
def recording_flag() -> Iterator[None]:
    """Say in this context that a graph records."""
    token = GRAPH_CAPTURING.set(True)
    try:
        yield
    finally:
        GRAPH_CAPTURING.reset(token)


def _copy_into(static: Any, fresh: Any) -> None:
    """Overwrite the tensors of one output structure with those of another."""
    if isinstance(static, Tensor):
        static.copy_(fresh)
    elif isinstance(static, Mapping):
        for name in static:
            _copy_into(static[name], fresh[name])
    elif isinstance(static, tuple | list):
        for old, new in zip(static, fresh, strict=True):
            _copy_into(old, new)
