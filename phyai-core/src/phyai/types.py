"""Words of the contract: what goes in, what comes out, and the shape of every part.

Layer 1: imports no torch at run time, so torch-free plugin modules and clients may use it.
Dims in docstrings: B rows, H horizon, A action dim, T suffix tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from phyai.cache import Cache

    Tensors: TypeAlias = dict[str, Tensor]

_Value = TypeVar("_Value")
Prediction = Literal["velocity", "clean", "noise"]


# ---------------------------------------------------------------- requests and results


@dataclass(frozen=True, slots=True)
class RTCOptions:
    """Real-time chunking for one row: what is left of the previous chunk.

    prev_chunk: [T_prev, A] float32, the not yet executed actions; model space (normalised), or
        with space="robot" absolute robot units, which ``prepare`` re-expresses against the current
        state (needed by relative-action policies).
    inference_delay: control periods that will pass before the new chunk arrives (d >= 0).
    execution_horizon: rows of the left-over that guide.  schedule: how their weight falls, see
        ``phyai.rtc.prefix_weights``.  max_guidance_weight: limit of the pull.  mode: ``guided``,
        ``trained``, or ``ramp`` (of the velocity).  None, each: the checkpoint's setting.

    >>> from phyai.types import RTCOptions
    >>> rest = [[0.1, 0.2], [0.3, 0.4]]
    >>> RTCOptions(rest, inference_delay=1).with_chunk(rest[1:]).prev_chunk
    [[0.3, 0.4]]
    """

    prev_chunk: Any
    inference_delay: int = 0
    execution_horizon: int | None = None
    schedule: str | None = None
    max_guidance_weight: float | None = None
    mode: Literal["guided", "trained", "ramp"] | None = None
    space: Literal["model", "robot"] = "model"

    def with_chunk(self, prev_chunk: Any) -> RTCOptions:
        """Return the same options with another left-over, in model space."""
        return replace(self, prev_chunk=prev_chunk, space="model")


@dataclass(frozen=True, slots=True)
class Observation:
    """One robot's inputs at one tick (one row of a request).

    images: camera name -> uint8 [height, width, 3] RGB, or float32 in [0, 1] of that shape
        or [3, height, width]. A camera the checkpoint knows may be left out (masked).
    state: [D_state] float, robot units; None for models without proprioception.
    options: seed, noise, num_steps, guidance_scale, rtc, session_id, seq, deadline. session_id
        (text) and seq (0, 1, ...) belong together: the session of a plugin that keeps some, and
        the place of this request in it; see ``phyai.sessions``. deadline: seconds from submission
        until the result is needed; core's alone, it limits how long others are waited for.

    >>> from phyai.types import Observation
    >>> Observation(images={}, state=[0.0, 0.1], prompt="pick up the cup", options={"seed": 7}).seed
    7
    """

    images: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None
    prompt: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int | None:
        return self.options.get("seed")

    @property
    def session_id(self) -> str | None:
        return self.options.get("session_id")

    @property
    def seq(self) -> int | None:
        return self.options.get("seq")


@dataclass(frozen=True)
class ActionChunk:
    """The actions of one row, in robot units.

    actions: float32 [H, A] robot units.  mask: bool [H], False for rows not to be executed.
    model_actions: float32 [H, A_model] model space; what RTC needs of the next request.
    control_hz: commands per second the actions were trained for; None when unknown.
    timing: milliseconds per stage.

    >>> import numpy as np
    >>> from phyai.types import ActionChunk
    >>> rows = np.zeros((3, 2), np.float32)
    >>> ActionChunk(rows, ("x", "y"), np.ones(3, bool), model_actions=rows, control_hz=20.0).horizon
    3
    """

    actions: np.ndarray
    names: tuple[str, ...]
    mask: np.ndarray
    model_actions: np.ndarray
    control_hz: float | None = None
    units: tuple[str, ...] = ()
    timing: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def horizon(self) -> int:
        return int(self.actions.shape[0])


@dataclass(frozen=True)
class Media:
    """A generated video, image or sound of one row.

    data: video uint8 [frames, height, width, 3], image uint8 [height, width, 3], sound float32
        [samples, channels].  rate: frames or samples per second.  sound: what a video sounds like.

    >>> import numpy as np
    >>> from phyai.types import Media
    >>> Media("image", np.zeros((2, 2, 3), np.uint8)).kind
    'image'
    """

    kind: Literal["video", "image", "sound"]
    data: np.ndarray
    rate: float | None = None
    timing: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    sound: Media | None = None


# ---------------------------------------------------------------- one prepared request


@dataclass(frozen=True, slots=True)
class Key:
    """Everything of a request that changes shapes or control flow; requests with equal keys join.

    buckets: (name, size) pairs, such as (("cameras", 3), ("tokens", 48)).
    branches: ("cond",), or ("cond", "uncond") for guidance; each branch has a cache of its own,
        and a bucket "uncond.tokens" stands for "tokens" in the second one.
    guidance_interval: (low, high) in sigma; a step not strictly inside is not guided.
    extra: anything else an adapter's control flow depends on. Lengths, masks, embodiment ids,
    guidance scales and noise are data and never part of a key.

    >>> from phyai.types import Key
    >>> Key(num_steps=10, buckets=(("cameras", 3), ("tokens", 48))).bucket("tokens")
    48
    """

    num_steps: int = 1
    buckets: tuple[tuple[str, int], ...] = ()
    grid: str = "default"
    branches: tuple[str, ...] = ("cond",)
    rtc: Literal["off", "guided", "trained"] = "off"
    rollout: bool = False
    guidance_interval: tuple[float, float] | None = None
    extra: tuple[tuple[str, Any], ...] = ()

    def bucket(self, name: str) -> int:
        """Return the size of bucket ``name``; KeyError when the key has none."""
        return dict(self.buckets)[name]

    def for_branch(self, branch: str) -> Key:
        """Return the key as one branch sees it: its own buckets in place of the shared ones.

        >>> key = Key(branches=("cond", "uncond"), buckets=(("tokens", 48), ("uncond.tokens", 8)))
        >>> key.for_branch("cond").buckets, key.for_branch("uncond").buckets
        ((('tokens', 48),), (('tokens', 8),))
        """
        if len(self.branches) == 1:
            return self
        buckets = dict(_of_branch(self.buckets, branch, self.branches, "."))
        return replace(self, buckets=tuple(buckets.items()))


@dataclass(frozen=True)
class Prepared:
    """A validated request, ready for the device.

    tensors: name -> CPU tensor whose first dim is ``rows``. Reserved names: ``noise.<leaf>``,
        ``known.<leaf>.mask|value``, ``rtc.w`` [B, T], ``rtc.prev`` [B, T, A], ``rtc.max`` [B],
        ``guidance.scale`` [B]. With guidance every branch's cache gets every tensor, but
        ``uncond/<name>`` is ``<name>`` of the unconditional one and of no other.
    meta: one host object per row for ``Output.decode``; None for a model request, whose result
        is the model-space tensor.
    session_ids, seqs: of every row, None for a row without a session; see
        ``phyai.sessions.session_rows``.
    joinable: False keeps other requests out of this one's batch.

    >>> import torch
    >>> from phyai.types import Key, Prepared
    >>> Prepared({"noise.action": torch.zeros(1, 50, 32)}, rows=1, key=Key(num_steps=10)).rows
    1
    """

    tensors: Mapping[str, Tensor]
    rows: int
    key: Key
    meta: tuple[Any, ...] | None = None
    session_ids: tuple[str | None, ...] | None = None
    seqs: tuple[int | None, ...] | None = None
    joinable: bool = True

    def for_branch(self, branch: str) -> Prepared:
        """Return what one guidance branch gets of the request, under the branch's own key."""
        if len(self.key.branches) == 1:
            return self
        tensors = dict(_of_branch(self.tensors.items(), branch, self.key.branches, "/"))
        return replace(self, tensors=tensors, key=self.key.for_branch(branch))


def _of_branch(
    named: Iterable[tuple[str, _Value]], branch: str, branches: Sequence[str], mark: str
) -> list[tuple[str, _Value]]:
    """Return the shared values by name, and behind them the branch's (``branch<mark>name``)."""
    shared, own = [], []
    for name, value in named:
        owner, found, bare = name.partition(mark)
        if not found or owner not in branches:
            shared.append((name, value))
        elif owner == branch:
            own.append((bare, value))
    return shared + own


# ---------------------------------------------------------------- solver steps


@dataclass(frozen=True, slots=True)
class Step:
    """One network call of a solver.

    sigma: noise level, 1 (noise) -> 0 (data).  dt: the stored step size, so Euler is bit-exact.
    grid: sigmas of all steps of this grid, the same object in each of its steps; per-step tables
        are looked up by it.
    position: int64 [1] device tensor holding ``index`` when the step is itself a graph input
        (unit ``step``; what the network gets then has no index, sigma and dt). None in a loop
        graph, where the index is a constant, and outside the network.

    >>> import torch
    >>> from phyai.types import Step
    >>> Step(index=1, sigma=0.5, dt=-0.5, grid=(1.0, 0.5)).row(torch.tensor([[1.0], [2.0]]))
    tensor([2.])
    """

    index: int
    sigma: float
    dt: float
    grid: tuple[float, ...] = ()
    position: Tensor | None = None

    def row(self, table: Tensor) -> Tensor:
        """Return this step's row of a per-step table [N(+1), ...]."""
        if self.position is None:
            return table[self.index]
        return table.index_select(0, self.position)[0]


Grid: TypeAlias = tuple[Step, ...]


# ---------------------------------------------------------------- parts


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One named static buffer of a Cache.

    shape excludes the row dim when ``rows`` is True.  zero: cleared by ``Cache.reset``.
    scratch: may be written inside the solver loop.  session: what is in a row
        after a valid result is there again at the next request of its session, and zeros at the
        first one; the same shape for every key.

    >>> import torch
    >>> from phyai.types import BufferSpec
    >>> BufferSpec((968, 1, 256), torch.bfloat16).shape
    (968, 1, 256)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: bool = True
    zero: bool = False
    scratch: bool = False
    session: bool = False


CacheSpec: TypeAlias = Callable[[Key], Mapping[str, BufferSpec]]


@runtime_checkable
class Denoiser(Protocol):
    """The bare network: what it predicts for x at one noise level.

    It is called once per guidance branch, with that branch's cache.
    Optional methods: ``prepare_grid(grid)`` writes per-step tables for each live cache of a grid
    (several may share one) and, in place, after ``Adapter.refresh``; ``release_grid(grid)`` says no
    live cache uses the grid any more.
    Optional attributes: ``approximate`` (False): left out of rollouts; ``capture_safe`` (True):
    False keeps the region eager; ``inner``: what a wrapper wraps. Core calls an optional method on
    the outermost part that has it, so a wrapper with one of its own passes the call on.
    """

    prediction: Prediction

    def __call__(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        """Return the prediction, with the same leaves and shapes as ``x`` (float32)."""
        ...


@runtime_checkable
class Conditioning(Protocol):
    """Fills the cache from its inputs, once per branch per request.

    Optional method ``plan(cache, batch)``: host work of a batch that a captured region cannot do,
    such as index lists; called after the inputs are loaded, outside every region. A wrapper keeps
    the wrapped part in attribute ``inner``, where core finds it.
    """

    def encode(self, cache: Cache) -> None:
        """Read ``cache.inputs``, write prefix K/V and friends. Runs inside a captured region."""
        ...


@runtime_checkable
class Solver(Protocol):
    """Integrates x from noise to data over a grid of steps."""

    accepts: frozenset[Prediction]

    def grid(self, key: Key) -> Grid: ...

    def solve(
        self,
        denoiser: Denoiser,
        x: Tensors,
        cache: Cache,
        grid: Grid,
        trace: Any = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Tensors:
        """Return x at sigma 0. History lives in local variables, never on ``self``."""
        ...


@runtime_checkable
class Output(Protocol):
    """Turns the solver variable into results."""

    def decode(self, x: Tensors, cache: Cache, prepared: Prepared) -> Sequence[ActionChunk | Media]:
        """Return one result per row, robot units."""
        ...

    def tensors(self, x: Tensors, cache: Cache, prepared: Prepared) -> Any:
        """Return the model-space tensor (or a mapping) of a model request."""
        ...
