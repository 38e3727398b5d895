"""Two rooflines: what a machine allows a kernel, and what inference allows a robot's control loop.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from phyai.cost import StageCost
from phyai.errors import ConfigError

Verdict = Literal["inference-bound", "environment-bound"]
Bound = Literal["compute", "memory"]


# ---------------------------------------------------------------- kernels


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine can do at best: operations and bytes per second, one dtype.

    >>> from phyai.profile.roofline import Machine
    >>> machine = Machine("two cores", "bfloat16", flops_per_s=7e12, bytes_per_s=29e9)
    >>> round(machine.ridge), machine.bound_of(flops=1e12, bytes_=1e9)
    (241, 'compute')
    """

    name: str
    dtype: str
    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check_positive("machine", flops_per_s=self.flops_per_s, bytes_per_s=self.bytes_per_s)

    @property
    def ridge(self) -> float:
        """Operations per byte above which the arithmetic bounds, below which memory does."""
        return self.flops_per_s / self.bytes_per_s

    def attainable(self, intensity: float) -> float:
        """Return the operations per second this machine allows at operations per byte."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    def bound_of(self, flops: float, bytes_: float) -> Bound:
        """Return which of the two bounds this work."""
        return "compute" if flops >= self.ridge * bytes_ else "memory"

    def least_ms(self, stages: Iterable[StageCost]) -> float:
        """Return the milliseconds the stages need at least, one after the other."""
        return sum(
            1e3 * max(stage.flops / self.flops_per_s, stage.bytes / self.bytes_per_s)
            for stage in stages
        )


# ---------------------------------------------------------------- control time


@dataclass(frozen=True, slots=True)
class ControlTime:
    """Control-time Roofline of a robot that plans chunks of actions and executes them.

    inference_ms: one call, t_i.  horizon: actions executed per call, H.  environment_ms: time the
    robot or simulator takes per action, t_e.  other_ms: anything else per call, t_o (network,
    preprocessing).  Give inference per action with horizon 1.

    supply = H/(t_i + t_o); environment = 1/t_e; overlapped f = min of the two; one after the
    other 1/f = sum of their inverses; the ridge is where t_i + t_o = H t_e.

    >>> from phyai.profile.roofline import ControlTime
    >>> libero = ControlTime(inference_ms=3.79, environment_ms=23.42)
    >>> libero.verdict, round(libero.synchronous_hz, 1), f"{libero.largest_gain:.0%}"
    ('environment-bound', 36.8, '16%')
    """

    inference_ms: float
    environment_ms: float
    horizon: int = 1
    other_ms: float = 0.0

    def __post_init__(self) -> None:
        _check_positive(
            "control time", inference_ms=self.inference_ms, environment_ms=self.environment_ms
        )
        if isinstance(self.horizon, bool) or not isinstance(self.horizon, int) or self.horizon < 1:
            raise ConfigError(
                f"control time horizon must be an integer of at least 1; got {self.horizon!r}."
            )
        if not math.isfinite(self.other_ms) or self.other_ms < 0:
            raise ConfigError(f"control time other_ms must be at least 0; got {self.other_ms!r}.")

    @property
    def call_ms(self) -> float:
        """t_i + t_o."""
        return self.inference_ms + self.other_ms

    @property
    def supply_hz(self) -> float:
        """Actions inference supplies per second."""
        return 1e3 * self.horizon / self.call_ms

    @property
    def environment_hz(self) -> float:
        """Actions the environment takes per second."""
        return 1e3 / self.environment_ms

    @property
    def overlapped_hz(self) -> float:
        """Control rate when the next chunk is computed while this one is executed."""
        return min(self.supply_hz, self.environment_hz)

    @property
    def synchronous_hz(self) -> float:
        """Control rate when the robot waits for each chunk."""
        return 1e3 / (self.call_ms / self.horizon + self.environment_ms)

    @property
    def ridge_ms(self) -> float:
        """Time per call, t_i + t_o, up to which inference hides behind the environment: H t_e."""
        return self.horizon * self.environment_ms

    @property
    def ridge_horizon(self) -> float:
        """Actions per call from which inference hides behind the environment."""
        return self.call_ms / self.environment_ms

    @property
    def verdict(self) -> Verdict:
        """Which side is slower; at the ridge the environment."""
        return "inference-bound" if self.call_ms > self.ridge_ms else "environment-bound"

    @property
    def largest_gain(self) -> float:
        """Gain in synchronous control rate if inference took no time at all: 0.16 = 16 %."""
        free_ms = self.other_ms / self.horizon + self.environment_ms
        return 1e3 / free_ms / self.synchronous_hz - 1.0

    @property
    def largest_overlapped_gain(self) -> float:
        """The same for the overlapped rate; 0 when the environment bounds it."""
        free_hz = 1e3 * self.horizon / self.other_ms if self.other_ms else math.inf
        return min(free_hz, self.environment_hz) / self.overlapped_hz - 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the inputs and everything derived, JSON-ready."""
        names = (
            "inference_ms", "other_ms", "horizon", "environment_ms", "supply_hz",
            "environment_hz", "overlapped_hz", "synchronous_hz", "ridge_ms", "ridge_horizon",
            "verdict", "largest_gain", "largest_overlapped_gain",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


def _check_positive(what: str, **values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{what} {name} must be positive and finite; got {value!r}.")
