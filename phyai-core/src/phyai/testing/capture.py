"""A stand-in for CUDA graphs that needs no GPU: records the operators of a region, and is strict.

It plays the rules of a real capture on CPU tensors. While it records, whatever a graph cannot hold
is an error: a read of a value on the host, a size that depends on data, random numbers, a tensor
made from host data, a buffer that is not always the same one. A replay runs the recorded operators
on the recorded addresses, and no Python: a branch, a counter or a buffer that was replaced since
shows as a wrong result. A region may make tensors on the way: a graph gives them a place in its
pool. They are filled with NaN after the capture, as another graph of the pool would overwrite them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phyai.cuda_graph import recording_flag
from phyai.errors import CudaGraphError

SYNCS = frozenset({"_local_scalar_dense", "is_nonzero", "equal"})
SIZES_FROM_DATA = frozenset({"nonzero", "masked_select", "_unique2", "unique_consecutive"})
FROM_HOST = frozenset({"lift_fresh"})
"""torch.tensor(...), torch.from_numpy(...): on a GPU a copy from memory of the host."""
RANDOM = frozenset(
    {"bernoulli", "multinomial", "normal", "rand", "rand_like", "randn", "randn_like", "randint",
     "randperm", "uniform", "exponential"}
)  # fmt: skip
FORBIDDEN = {
    **dict.fromkeys(SYNCS, "waits for a value on the host"),
    **dict.fromkeys(SIZES_FROM_DATA, "makes a size that depends on data"),
    **dict.fromkeys(FROM_HOST, "copies from memory of the host"),
    **dict.fromkeys(RANDOM, "draws random numbers"),
}
HOST_READS = frozenset(
    {"item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__",
     "__index__", "pin_memory", "data_ptr"}
)  # fmt: skip
"""Methods of a tensor; not all of them pass the dispatcher."""

Static = Callable[[], Iterable[Tensor]]


def forbidden(name: str, args: tuple[Any, ...]) -> str | None:
    """Return what is wrong with an operator inside a captured region, or None."""
    for spelled in (name, name.rstrip("_")):
        if spelled in FORBIDDEN:
            return f"operator {name} {FORBIDDEN[spelled]}"
    if name == "index" and any(
        isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    ):
        return "indexing by a mask makes a size that depends on data"
    return None


class RecordingCapturer:
    """Records regions as ``GraphService(backend="cuda", capturer=...)`` asks for, on the CPU.

    static: returns the tensors a region may read and write besides those it makes itself; any
        other one is an error. None = any that is the same in every run.
    replays, records: how many there were.

    >>> import torch
    >>> from phyai.graph import GraphService
    >>> from phyai.testing.capture import RecordingCapturer
    >>> graphs = GraphService("cuda", "cpu", capturer=RecordingCapturer())
    >>> x, y = torch.ones(2), torch.zeros(2)
    >>> region = graphs.capture("double", lambda: y.copy_(2 * x))
    >>> region(); _ = x.fill_(3); region(); y
    tensor([6., 6.])
    """

    def __init__(self, num_warmup_iters: int = 2, static: Static | None = None) -> None:
        self.num_warmup_iters, self.static = num_warmup_iters, static
        self.records = self.replays = 0
        self.closed = False

    def record(self, fn: Callable[[], object]) -> tuple[Callable[[], object], int]:
        """Raises: CudaGraphError for what a graph cannot hold."""
        with torch.no_grad():
            for _ in range(max(0, self.num_warmup_iters - 1)):
                fn()
            before = Tape()
            with before:
                fn()
            tape = Tape(strict=True)
            with recording_flag(), _NoHostReads(), tape:
                fn()
        self._check_outside(before, tape)
        tape.overwrite_pool()
        self.records += 1

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay, tape.pool_nbytes

    def close(self) -> None:
        self.closed = True

    def _check_outside(self, before: Tape, tape: Tape) -> None:
        allowed = set(before.outside)
        rule = "must be the same in every run"
        if self.static is not None:
            allowed = {_storage(tensor) for tensor in self.static()}
            rule = "must be a buffer of its cache or a tensor of the model"
        for place, tensor in tape.outside.items():
            if place not in allowed:
                raise CudaGraphError(
                    f"a tensor that a region uses and did not make {rule}; got "
                    f"{list(tensor.shape)} {tensor.dtype} at a new address. Declare it in the "
                    "CacheSpec or make it in load()."
                )


class _Ref:
    """A tensor that the tape's own operators made."""

    def __init__(self, slot: int) -> None:
        self.slot = slot


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators of one run, and the tensors from outside that they touch.

    strict: what a graph cannot hold is an error at once.
    """

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.strict = strict
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.outside: dict[int, Tensor] = {}
        self._slots: dict[int, int] = {}
        self._made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        problem = forbidden(func.overloadpacket.__name__, args) if self.strict else None
        if problem is not None:
            raise CudaGraphError(
                f"a captured region must be free of host work; got: {problem}. Move it to "
                "prepare() or plan(), or compute it on the device without a size from data."
            )
        recorded = _map(self._reference, (args, kwargs))
        out = func(*args, **kwargs)
        self.calls.append((func, *recorded, _map(self._claim, out)))
        return out

    def replay(self) -> None:
        """Run the operators again, on the addresses of the recording."""
        values: list[Any] = [None] * len(self._made)

        def value(ref: Any) -> Any:
            return values[ref.slot] if isinstance(ref, _Ref) else ref

        def keep(ref: Any, fresh: Any) -> None:
            if isinstance(ref, _Ref):
                values[ref.slot] = fresh
            elif isinstance(ref, list | tuple):
                for one, other in zip(ref, fresh, strict=True):
                    keep(one, other)

        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                fresh = func(*_map(value, args), **_map(value, kwargs))
                keep(out, fresh)

    @property
    def pool_nbytes(self) -> int:
        """Bytes of what the run made, each storage once."""
        sizes = {_storage(t): t.untyped_storage().nbytes() for t in self._pool()}
        return sum(sizes.values())

    def overwrite_pool(self) -> None:
        """Fill what the run made with NaN."""
        with torch.no_grad():
            for tensor in self._pool():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))

    def _pool(self) -> list[Tensor]:
        return [tensor for tensor in self._made if _storage(tensor) not in self.outside]

    def _reference(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        slot = self._slots.get(id(value))
        if slot is not None:
            return _Ref(slot)
        # An alias: when a parameter gets other memory later, the graph still reads the old one.
        alias = value.detach()
        self.outside.setdefault(_storage(value), alias)
        return alias

    def _claim(self, value: Any) -> Any:
        """Give a tensor an operator returned its slot; None for one from outside."""
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._slots:
            self._slots[id(value)] = len(self._made)
            self._made.append(value)  # held: its id must not be given to another tensor
        return _Ref(self._slots[id(value)])


class _NoHostReads(TorchFunctionMode):
    """Refuses the methods of a tensor that make the host wait for the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_READS:
            what = (
                "a kernel outside torch, which a recording cannot follow"
                if name == "data_ptr"
                else f"{name}(), which waits for the device"
            )
            raise CudaGraphError(
                f"a captured region must be free of host work; got {what}. Move it to prepare() "
                "or plan(), or choose another kernel."
            )
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``change`` to what lists, tuples and dicts hold."""
    if isinstance(value, list | tuple):
        return type(value)([_map(change, item) for item in value])
    if isinstance(value, dict):
        return {name: _map(change, item) for name, item in value.items()}
    return change(value)
