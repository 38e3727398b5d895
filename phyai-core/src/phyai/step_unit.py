"""Graph unit ``step``: the network as a graph of its own, replayed once per solver step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch import Tensor

from phyai.errors import PluginContractError
from phyai.graph import GraphService
from phyai.timers import Recorder
from phyai.types import Denoiser, Prediction, Step

if TYPE_CHECKING:
    from phyai.cache import Cache
    from phyai.types import Tensors


class GraphStep:
    """The step as a captured network sees it: ``grid``, ``position`` and ``row(table)``.

    One graph serves every step, so index, sigma and dt do not exist: reading one is an error, also
    where the region runs eagerly, so that it shows before there is a GPU.

    >>> import torch
    >>> from phyai.step_unit import GraphStep
    >>> step = GraphStep((1.0, 0.5), torch.tensor([1]))
    >>> step.row(torch.tensor([[10.0], [20.0]]))
    tensor([20.])
    """

    def __init__(self, grid: tuple[float, ...], position: Tensor) -> None:
        self.grid, self.position = grid, position

    def row(self, table: Tensor) -> Tensor:
        """Return this step's row of a per-step table [N(+1), ...]."""
        return table.index_select(0, self.position)[0]

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("index", "sigma", "dt"):
            raise PluginContractError(
                f"a network with graph_unit 'step' must not read step.{name}: one graph serves all "
                "steps. Take step.row(table) of a table made in prepare_grid, or graph_unit "
                "'loop'."
            )
        raise AttributeError(name)


class StepUnit:
    """Wraps the network: copies x and the step's position into static buffers, runs the region.

    It stands inside third-party wrappers of the network, which run between replays and see real
    steps. Its answers are fresh tensors. A cache that was not attached runs the network as it is.
    """

    def __init__(self, inner: Denoiser, graphs: GraphService, recorder: Recorder) -> None:
        self.inner, self.graphs, self.recorder = inner, graphs, recorder
        self.prediction: Prediction = inner.prediction
        self.approximate: bool = getattr(inner, "approximate", False)
        self._networks: dict[str, _Network] = {}

    def attach(
        self,
        cache: Cache,
        grid: tuple[float, ...],
        buffers: Mapping[str, Tensor],
        *,
        unsafe: str | None,
        reads: object,
    ) -> None:
        """Give a cache its region.

        buffers: ``x.<leaf>`` and ``out.<leaf>`` like x, and ``position`` int64 [1]; the caches of
        one request share them.  unsafe, reads: see ``GraphService.capture``.
        """
        network = _Network(self.inner, cache, grid, buffers, real_steps=unsafe is not None)
        network.region = self.graphs.capture(
            f"{cache.name}/network",
            network.run,
            (cache.key, cache.capacity),
            unsafe=unsafe,
            reads=reads,
            updates=tuple(cache.session_buffers.values()),
        )
        self._networks[cache.name] = network

    def detach(self, cache: Cache) -> None:
        """Forget a cache's region; its holder releases it."""
        self._networks.pop(cache.name, None)

    def __call__(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        network = self._networks.get(cache.name)
        if network is None:
            return self.inner(x, step, cache)
        return network(x, step, eager=self.recorder.inside)


class _Network:
    """The network of one cache, over static buffers."""

    def __init__(
        self,
        inner: Denoiser,
        cache: Cache,
        grid: tuple[float, ...],
        buffers: Mapping[str, Tensor],
        real_steps: bool,
    ) -> None:
        self.inner, self.cache, self.real_steps = inner, cache, real_steps
        self.x = _leaves(buffers, "x.")
        self.out = _leaves(buffers, "out.")
        self.position = buffers["position"]
        self.step: Any = GraphStep(grid, self.position)
        self.region: Any = None

    def run(self) -> None:
        for leaf, tensor in self.inner(self.x, cast(Step, self.step), self.cache).items():
            self.out[leaf].copy_(tensor)

    def __call__(self, x: Tensors, step: Step, eager: bool) -> Tensors:
        for leaf, tensor in x.items():
            self.x[leaf].copy_(tensor)
        self.position.fill_(step.index)
        if self.real_steps:
            self.step = replace(step, position=self.position)
        (self.run if eager else self.region)()
        # Copies: a solver may keep predictions of several steps, and the graph overwrites these.
        return {leaf: tensor.clone() for leaf, tensor in self.out.items()}


def _leaves(buffers: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in buffers.items() if n.startswith(prefix)}
