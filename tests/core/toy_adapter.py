"""A second adapter for core's tests: no camera, no prefix, no flow; plus a small flow one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phyai import engine_core, plugins
from phyai.adapter import Adapter, AdapterArgs, NoConditioning, draw_noise, observations
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, RuntimeConfig
from phyai.errors import RequestError
from phyai.plugins import add_hooks, create_manager
from phyai.solver import Direct, to_velocity
from phyai.types import BufferSpec, Key, Prepared

HORIZON, ACTIONS, STATE = 3, 2, 4


@dataclass
class ToyArgs(AdapterArgs):
    """known: rows of the chunk given by the request.  factor: scales the policy's weights."""

    max_batch_size: int = 4
    known: int = 0
    factor: float = 1.0
    fail: str = ""
    closed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ToyRequest:
    """Model request: state [B, 4] float32."""

    state: Tensor
    steps: int = 1


class Policy(torch.nn.Module):
    """Linear regression of a chunk from the state; predicts the data itself."""

    prediction = "clean"

    def __init__(self, args: ToyArgs) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(STATE, HORIZON * ACTIONS)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.linear.weight.copy_(
                args.factor * torch.randn(self.linear.weight.shape, generator=generator)
            )
            self.linear.bias.fill_(0.25)

    def forward(self, x: Any, step: Any, cache: Any) -> dict[str, Tensor]:
        return {"action": self.linear(cache["features"]).view(-1, HORIZON, ACTIONS)}


class Features(NoConditioning):
    """Writes the one buffer of this adapter."""

    def encode(self, cache: Any) -> None:
        cache["features"].copy_(2.0 * cache.inputs["state"])


class ToyAdapter(Adapter):
    """Regression from a state vector."""

    name = "toy"
    args_cls = ToyArgs

    def load(self) -> None:
        self.policy = Policy(self.args)
        if self.args.fail == "load":
            self.services.memory.allocate("half", (8,), torch.float32)
            raise OSError("disk on fire")

    def close(self) -> None:
        self.args.closed.append("adapter")
        if self.args.fail:
            raise RuntimeError("close failed too")

    def prepare(self, request: Any) -> Prepared:
        if isinstance(request, ToyRequest):
            return self._prepared(request.state, None, request.steps)
        rows = observations(request, max_rows=self.args.max_batch_size)
        states = [np.asarray(row.state, dtype=np.float32) for row in rows]
        for state in states:
            if state.shape != (STATE,):
                raise RequestError(f"state must have {STATE} values; got {list(state.shape)}.")
        return self._prepared(torch.from_numpy(np.stack(states)), rows, 1)

    def _prepared(self, state: Tensor, meta: Any, steps: int) -> Prepared:
        rows = state.shape[0]
        shape = (rows, HORIZON, ACTIONS)
        tensors = {"state": state, "noise.action": draw_noise(shape, 0)}
        if self.args.known:
            mask = torch.zeros(shape, dtype=torch.bool)
            mask[:, : self.args.known] = True
            tensors["known.action.mask"] = mask
            tensors["known.action.value"] = torch.full(shape, 0.1)
        return Prepared(tensors, rows, Key(num_steps=steps), meta)

    def denoiser(self) -> Any:
        return self.policy

    def conditioning(self) -> Features:
        return Features()

    def cache(self) -> Callable[[Key], Mapping[str, BufferSpec]]:
        return lambda key: {"features": BufferSpec((STATE,), torch.float32)}

    def solver(self) -> Any:
        return Direct()


class MismatchedAdapter(ToyAdapter):
    """Predicts the data but leaves the solver to core, which integrates velocities."""

    name = "toy-mismatch"

    def solver(self) -> Any:
        return Adapter.solver(self)


class FlowAdapter(MismatchedAdapter):
    """The same network behind Euler."""

    name = "toy-flow"

    def denoiser(self) -> Any:
        return to_velocity(self.policy)


def config(**runtime: Any) -> EngineConfig:
    return EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype="float32"), runtime=RuntimeConfig(**runtime)
    )


def open_engine(cls: type[Adapter] = ToyAdapter, *, runtime: Any = None, **args: Any) -> Engine:
    """Return an engine over a toy adapter; ``registry`` must be in use."""
    Engine.register(cls)
    return Engine(EngineArgs(cls.name, cls.args_cls(**args), config(**(runtime or {}))))


@contextmanager
def registry() -> Iterator[None]:
    """Forget what was registered inside."""
    before = dict(plugins._registered)
    try:
        yield
    finally:
        plugins._registered.clear()
        plugins._registered.update(before)


def use_hooks(monkeypatch: pytest.MonkeyPatch, **modules: SimpleNamespace) -> None:
    """Let engines find these hook plugins, through a real manager, besides the installed ones."""

    def load() -> Any:
        manager = create_manager()
        for name, module in modules.items():
            add_hooks(manager, module, name)
        return manager

    monkeypatch.setattr(engine_core, "load_hook_plugins", load)
