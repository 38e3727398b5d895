"""What a request cost and what it computed: stage timers, counters, a recorder of tensors."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


class Timers:
    """Wall milliseconds per stage of the current request, and running totals of work done.

    Stages belong to the thread that runs them: a request is prepared while another one computes.
    A stage inside another one is called "outer/inner". Repeated stages add up. On CUDA the device
    is synchronised at both ends of a stage, except while a graph records.
    A stage inside a compiled region does nothing: only the region as a whole can be timed.

    >>> from phyai.timers import Timers
    >>> timers = Timers()
    >>> with timers.stage("encode"), timers.stage("vision"):
    ...     pass
    >>> sorted(timers.collect())
    ['encode', 'encode/vision']
    """

    def __init__(
        self, device: str | torch.device = "cpu", counters: Counter[str] | None = None
    ) -> None:
        self.device = torch.device(device)
        self.counters: Counter[str] = counters if counters is not None else Counter()
        self._lock = threading.Lock()
        self._mine = threading.local()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context that adds its wall time to the stage."""
        if torch.compiler.is_compiling():
            return nullcontext()
        return self._timed(name)

    def collect(self) -> dict[str, float]:
        """Return this thread's milliseconds per stage since the last collect or reset."""
        done: dict[str, float] = self._mine.__dict__.pop("ms", {})
        return done

    def reset(self) -> None:
        """Forget what this thread measured."""
        self.collect()

    @property
    def current(self) -> str:
        """The path of the innermost stage open in this thread; "" outside every stage."""
        stack: list[str] = self._mine.__dict__.get("stack", [])
        return stack[-1] if stack else ""

    def count(self, name: str, n: int = 1) -> None:
        """Add n to a counter; counters are never reset here.

        Inside a captured region this counts only when its Python runs (eager, warm-up, capture).
        """
        if not torch.compiler.is_compiling():
            with self._lock:
                self.counters[name] += n

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        stack: list[str] = self._mine.__dict__.setdefault("stack", [])
        path = f"{stack[-1]}/{name}" if stack else name
        stack.append(path)
        totals: dict[str, float] = self._mine.__dict__.setdefault("ms", {})
        totals.setdefault(path, 0.0)  # a stage stands before those inside it
        self._synchronize()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            ms = 1e3 * (time.perf_counter() - started)
            stack.pop()
            totals[path] = totals.get(path, 0.0) + ms

    def _synchronize(self) -> None:
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.device)


class Recorder:
    """Keeps CPU copies of named tensors while somebody listens; costs one attribute test otherwise.

    >>> import torch
    >>> from phyai.timers import Recorder
    >>> recorder = Recorder()
    >>> recorder.put("x", torch.zeros(1))
    >>> with recorder.recording(names=["x"]) as tensors:
    ...     recorder.put("x", torch.ones(1)); recorder.put("y", torch.ones(1))
    >>> tensors
    {'x': [tensor([1.])]}
    """

    def __init__(self) -> None:
        self.active = False
        self._names: frozenset[str] | None = None
        self._tensors: dict[str, list[Tensor]] = {}

    def wants(self, name: str) -> bool:
        return self.active and (self._names is None or name in self._names)

    @property
    def inside(self) -> bool:
        """Whether somebody listens to what only eager code says: all but ``result.<leaf>``."""
        names = self._names
        return self.active and (names is None or any(not n.startswith("result.") for n in names))

    def put(self, name: str, tensor: Tensor) -> None:
        """Append a detached CPU copy of the tensor to the list under this name."""
        if self.wants(name):
            self._tensors.setdefault(name, []).append(tensor.detach().to("cpu", copy=True))

    @contextmanager
    def recording(self, names: Collection[str] | None = None) -> Iterator[dict[str, list[Tensor]]]:
        """Record these names (None: all) and yield the dict they arrive in.

        Captured regions do not run Python: the runner takes their eager functions meanwhile,
        unless only results are wanted.
        Recordings nest; the inner one takes the tensors.
        """
        before = (self.active, self._names, self._tensors)
        self.active, self._names = True, None if names is None else frozenset(names)
        mine: dict[str, list[Tensor]] = {}
        self._tensors = mine
        try:
            yield mine
        finally:
            self.active, self._names, self._tensors = before


class Profile:
    """The timers, the counters and the recorder of one rank.

    counters: running totals of work done, such as tokens through a network.

    >>> from phyai.timers import Profile
    >>> profile = Profile()
    >>> profile.count("vision_tokens", 256)
    >>> profile.counters["vision_tokens"]
    256
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        timers: Timers | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.timers = timers if timers is not None else Timers(device)
        self.recorder = recorder if recorder is not None else Recorder()
        self.counters = self.timers.counters

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context that times a stage of the current request."""
        return self.timers.stage(name)

    def count(self, name: str, n: int = 1) -> None:
        """Add n to a counter; see ``Timers.count``."""
        self.timers.count(name, n)

    def record(self, name: str, tensor: Tensor) -> None:
        """Give a tensor to the recorder, which keeps it only while somebody listens."""
        self.recorder.put(name, tensor)
