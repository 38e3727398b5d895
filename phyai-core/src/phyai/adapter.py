"""The adapter contract: what a model package implements, and the parts it may leave to core.

An adapter owns conditioning, solver, cache and output of one model; core owns the rest. Only
``prepare`` and ``denoiser`` have no default. A regression policy needs nothing else but ``load``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from phyai.errors import PluginContractError, RequestError, WeightUpdateError, did_you_mean
from phyai.solver import Euler
from phyai.types import (
    ActionChunk,
    BufferSpec,
    CacheSpec,
    Conditioning,
    Denoiser,
    Key,
    Media,
    Observation,
    Output,
    Prepared,
    Solver,
)

if TYPE_CHECKING:
    from phyai.cache import Cache
    from phyai.engine_config import EngineConfig
    from phyai.services import Services
    from phyai.types import Tensors
    from phyai.weights import LoadReport


@dataclass
class AdapterArgs:
    """Base of every adapter's arguments.

    Fields with these names are filled by the CLI's options: checkpoint_dir, revision, tokenizer,
    precision, max_batch_size, num_steps.

    >>> from dataclasses import dataclass
    >>> from phyai.adapter import AdapterArgs
    >>> @dataclass
    ... class MyArgs(AdapterArgs):
    ...     checkpoint_dir: str | None = None
    ...     max_batch_size: int = 1
    >>> MyArgs(max_batch_size=4).max_batch_size
    4
    """


class NoConditioning:
    """Nothing to encode: the denoiser reads ``cache.inputs`` directly.

    >>> from phyai.adapter import NoConditioning
    >>> NoConditioning().encode(None)
    """

    def encode(self, cache: Cache) -> None:
        return None


def no_buffers(key: Key) -> Mapping[str, BufferSpec]:
    """The CacheSpec of an adapter without buffers."""
    return {}


class DefaultOutput:
    """Leaf ``action`` as it is: one ActionChunk per row, dims named ``action_0`` ...

    >>> import torch
    >>> from phyai.adapter import DefaultOutput
    >>> [chunk] = DefaultOutput().decode({"action": torch.zeros(1, 3, 2)}, None, None)
    >>> chunk.names
    ('action_0', 'action_1')
    """

    def decode(self, x: Tensors, cache: Cache, prepared: Prepared) -> Sequence[ActionChunk | Media]:
        actions = x["action"].float().cpu().numpy()
        names = tuple(f"action_{i}" for i in range(actions.shape[-1]))
        return [
            ActionChunk(row, names, np.ones(len(row), dtype=bool), model_actions=row.copy())
            for row in actions
        ]

    def tensors(self, x: Tensors, cache: Cache, prepared: Prepared) -> Any:
        return x["action"]


class Adapter:
    """One model behind the runtime. Holds weights and weight-derived tables, no request state.

    name: the plugin id.  args_cls: its AdapterArgs.  parallel: parallel axes it implements.
    graph_unit: ``loop``: start and all steps are one captured region (robot policies). ``step``:
    the network is one, and the solver runs between its replays, so that a request tells its
    progress and can be cancelled; the network then takes ``step.row(table)`` and reads no other
    value of a step.

    >>> import torch
    >>> from phyai.adapter import Adapter
    >>> from phyai.solver import Direct
    >>> from phyai.types import Key, Prepared
    >>> class Half:
    ...     prediction = "clean"
    ...     def __call__(self, x, step, cache):
    ...         return {"action": 0.5 * cache.inputs["noise.action"]}
    >>> class HalfAdapter(Adapter):
    ...     name = "half"
    ...     def prepare(self, request):
    ...         return Prepared({"noise.action": request}, len(request), Key())
    ...     def denoiser(self):
    ...         return Half()
    ...     def solver(self):
    ...         return Direct()
    """

    name: ClassVar[str] = ""
    args_cls: ClassVar[type[AdapterArgs]] = AdapterArgs
    parallel: ClassVar[frozenset[str]] = frozenset()
    graph_unit: str = "loop"

    def __init__(self, args: AdapterArgs, config: EngineConfig, services: Services) -> None:
        self.args, self.config, self.services = args, config, services

    # ------------------------------------------------------------ weights

    def load(self) -> LoadReport | None:
        """Build the modules and load their weights; the report goes into the log."""
        return None

    def refresh(self) -> None:
        """Rebuild, in place, everything derived from weights."""

    def update_weights(self, items: Iterable[tuple[str, Tensor]]) -> None:
        """Copy new values into named weights (checkpoint names), same addresses."""
        raise WeightUpdateError(f"plugin {self.name!r} has no online weight update.")

    def dump_targets(self) -> Mapping[str, nn.Module]:
        """Return root modules for the tensor dump."""
        return {}

    def close(self) -> None:
        """Release what ``load`` took; may be called twice."""

    def expects(self) -> Mapping[str, Any]:
        """Return what an Observation should hold, for messages to people; may be empty.

        cameras: names in order.  optional_cameras: whether some of them may be left out.
        state_dim: values of the state.  prompt: whether it must be sent.  tokenizer: where it is
        read from.
        """
        return {}

    # ------------------------------------------------------------ a request

    def prepare(self, request: Any) -> Prepared:
        """Validate, tokenise and draw noise on the host; must be thread-safe.

        Raises: RequestError for anything wrong with the request.
        """
        raise PluginContractError(f"adapter {type(self).__name__} must implement prepare().")

    def start(self, cache: Cache) -> Tensors:
        """Return the initial x: inputs ``noise.<leaf>`` (core then imposes the known parts)."""
        noise = {
            name.removeprefix("noise."): tensor.clone()
            for name, tensor in cache.inputs.tensors.items()
            if name.startswith("noise.")
        }
        if not noise:
            raise PluginContractError(
                f"adapter {type(self).__name__} must put noise.<leaf> tensors into Prepared or "
                "implement start()."
            )
        return noise

    # ------------------------------------------------------------ parts

    def denoiser(self) -> Denoiser:
        """Return the bare network."""
        raise PluginContractError(f"adapter {type(self).__name__} must implement denoiser().")

    def conditioning(self) -> Conditioning:
        return NoConditioning()

    def cache(self) -> CacheSpec:
        return no_buffers

    def solver(self) -> Solver:
        return Euler()

    def output(self) -> Output:
        return DefaultOutput()

    def rollout_solver(self) -> Solver | None:
        return None


KNOWN_OPTIONS = (
    "seed",
    "noise",
    "num_steps",
    "guidance_scale",
    "rtc",
    "session_id",
    "seq",
    "deadline",
)


def observations(
    request: Any, *, max_rows: int, options: Iterable[str] = KNOWN_OPTIONS
) -> tuple[Observation, ...]:
    """Return the rows of an Observation request, checked for count and known options.

    Raises: TypeError when it is neither an Observation nor a sequence of them; RequestError.
    """
    rows = (request,) if isinstance(request, Observation) else tuple(request)
    for row in rows:
        if not isinstance(row, Observation):
            raise TypeError(f"request rows must be Observation; got {type(row).__name__}.")
    check_rows(len(rows), max_rows)
    allowed = sorted(options)
    for row in rows:
        if not isinstance(row.options, Mapping):
            raise RequestError(
                "observation options must be a mapping of names to values; "
                f"got {type(row.options).__name__}."
            )
        for name in row.options:
            if name not in allowed:
                raise RequestError(
                    f"observation option must be one this adapter knows; got {name!r}. "
                    f"Known: {', '.join(allowed)}.{did_you_mean(str(name), allowed)}"
                )
    return rows


def check_rows(rows: int, max_rows: int) -> None:
    """Raise RequestError unless 1 <= rows <= max_rows."""
    if rows < 1:
        raise RequestError("request must hold at least one row; got none. Send an observation.")
    if rows > max_rows:
        raise RequestError(
            f"request must hold at most {max_rows} rows; got {rows}. "
            "Send fewer rows or start the engine with a larger max_batch_size."
        )


def draw_noise(shape: Sequence[int], seed: int | None) -> Tensor:
    """Return standard normal noise [*shape] float32, drawn on the CPU from its own generator."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        if not is_integer(seed) or not 0 <= seed < 2**63:
            raise RequestError(f"seed must be an integer in [0, 2^63); got {seed!r}.")
        generator.manual_seed(int(seed))
    return torch.randn(tuple(shape), generator=generator)


def is_integer(value: Any) -> bool:
    """Return whether an option is an integer: Python's or numpy's, but no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
