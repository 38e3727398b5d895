"""Our side of any model: PhyAI by its public Engine, and a count of what it really computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
from benchmarks.peers.base import Refused, Setup
from benchmarks.peers.options import engine_settings, split_options
from benchmarks.peers.timing import stages_of
from torch import Tensor

from phyai import Engine, EngineArgs
from phyai.engine_builder import config_from_mapping


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and the work it must cost.

    positions: valid ones of the longest row.
    counter: of the plugin; a run must raise it by ``valid``, or computes too much or too little.
    """

    request: Any
    positions: int
    counter: str
    valid: int


class EngineSide(ABC):
    """One engine on the CPU.

    model: the plugin.  options: settings, such as ``config.runtime.graph_backend=inductor``.
    """

    distribution: ClassVar[str]
    """The package that holds the plugin."""

    def __init__(self, model: str, options: str = "") -> None:
        self.model, self.options = model, options
        self.plugin, self.config = split_options(options)
        self.engine: Engine | None = None
        self.setup: Setup | None = None
        self.asked: Asked | None = None

    @abstractmethod
    def estimate(self, setup: Setup) -> int:
        """Return an upper estimate of the bytes held at the peak."""

    @abstractmethod
    def args(self, **fields: Any) -> Any:
        """Return the plugin's arguments."""

    @abstractmethod
    def ask(self, path: Path, steps: int, setup: Setup) -> Asked:
        """Return the request in an inputs file."""

    def precision(self, setup: Setup) -> str:
        return str(self.plugin.get("precision", setup.dtype))

    def stages(self, timing: dict[str, float]) -> dict[str, float]:
        """Return seconds per stage from the engine's milliseconds."""
        return stages_of(timing)

    def step(self, request: Any) -> Tensor:
        """Return what is compared of the result."""
        assert self.engine is not None
        actions: Tensor = self.engine.step(request)
        return actions

    def describe(self) -> dict[str, Any]:
        return {
            "name": "phyai",
            "versions": {name: version(name) for name in ("phyai-core", self.distribution)},
            "computes": f"PhyAI engine, plugin {self.model} {self.options}".strip(),
        }

    def load(self, setup: Setup) -> dict[str, Any]:
        precision = self.precision(setup)
        if (precision in ("fp32", "float32")) != (setup.dtype == "fp32"):
            raise Refused(
                f"precision must fit --dtype {setup.dtype}; got {precision!r}. Leave it out."
            )
        args = self.args(
            checkpoint_dir=setup.checkpoint,
            max_batch_size=setup.rows,
            **{**self.plugin, "precision": precision},
        )
        config = config_from_mapping(engine_settings(self.config, setup), directory=".")
        self.engine = Engine(EngineArgs(self.model, args, config))
        self.setup = setup
        return {"precision": precision}

    def inputs(self, path: Path, steps: int) -> dict[str, Any]:
        if self.setup is None:
            raise Refused("inputs must follow load.")
        self.asked = self.ask(path, steps, self.setup)
        return {"prefix_positions": self.asked.positions}

    def run(self) -> tuple[Tensor, dict[str, float]]:
        engine, asked = self.engine, self.asked
        if engine is None or asked is None:
            raise Refused("run must follow inputs.")
        counters = engine.core.services.profile.counters
        before = counters[asked.counter]
        actions = self.step(asked.request)
        check_count(engine, asked, counters[asked.counter] - before)
        return actions.to(torch.float32), self.stages(dict(engine.core.last_timing))


def check_count(engine: Engine, asked: Asked, computed: int) -> None:
    """Raise Refused unless the last run computed the valid positions and no others.

    A compiled or replayed region runs no Python, so counts nothing; an eager one must count.
    """
    regions = engine.core.services.graphs.report()  # the last one ran last
    encode = [region for region in regions if region.name.endswith("/encode")][-1]
    if computed != (asked.valid if encode.mode == "eager" else 0):
        why = f" ({encode.reason})" if encode.reason else ""
        raise Refused(
            f"our side must compute the {asked.valid} valid positions, region {encode.name} in "
            f"mode {encode.mode}{why}; it counted {computed}. Run it eagerly, or report the "
            "difference as a bug."
        )
