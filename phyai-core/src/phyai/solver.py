"""Solvers: time grids and the loops that take x from noise (sigma 1) to data (sigma 0).

Core convention for every model: x = sigma*noise + (1-sigma)*data, velocity = noise - data.
A solver acts leaf by leaf and keeps its history in local variables.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phyai.errors import ConfigError
from phyai.types import Denoiser, Grid, Key, Prediction, Step

if TYPE_CHECKING:
    from phyai.cache import Cache
    from phyai.types import Tensors


def float32(value: float) -> float:
    """Return the float32 nearest to ``value``, as a Python float."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def uniform_grid(num_steps: int) -> Grid:
    """Return N steps at sigma_k = float32(1 - k/N), each with the stored dt = -1/N.

    1 + k*dt is computed in double and rounded once: an accumulated or linspace grid differs by
    1e-7 in sigma and by up to 2e-4 in actions.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps must be at least 1; got {num_steps!r}.")
    dt = -1.0 / num_steps
    sigmas = tuple(float32(1.0 + k * dt) for k in range(num_steps))
    return tuple(Step(k, sigma, dt, sigmas) for k, sigma in enumerate(sigmas))


class Euler:
    """First-order integration of a velocity: x <- x + dt * v.

    >>> [step.sigma for step in Euler().grid(Key(num_steps=4))]
    [1.0, 0.75, 0.5, 0.25]
    """

    accepts: frozenset[Prediction] = frozenset({"velocity"})

    def grid(self, key: Key) -> Grid:
        return uniform_grid(key.num_steps)

    def solve(
        self,
        denoiser: Denoiser,
        x: Tensors,
        cache: Cache,
        grid: Grid,
        trace: Any = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Tensors:
        for step in grid:
            velocity = denoiser(x, step, cache)
            x = {leaf: tensor + step.dt * velocity[leaf] for leaf, tensor in x.items()}
            if on_step is not None:
                on_step(step)
        return x


class Direct:
    """One call at sigma 1 that predicts the data itself (regression policies, trackers).

    >>> [step.sigma for step in Direct().grid(Key())]
    [1.0]
    """

    accepts: frozenset[Prediction] = frozenset({"clean"})

    def grid(self, key: Key) -> Grid:
        return (Step(0, 1.0, -1.0, (1.0,)),)

    def solve(
        self,
        denoiser: Denoiser,
        x: Tensors,
        cache: Cache,
        grid: Grid,
        trace: Any = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Tensors:
        (step,) = grid
        clean = denoiser(x, step, cache)
        if on_step is not None:
            on_step(step)
        return {leaf: clean[leaf] for leaf in x}


class ToVelocity:
    """Presents a clean- or noise-predicting denoiser as a velocity.

    clean: v = (x - data) / sigma.  noise: v = (noise - x) / (1 - sigma), undefined at sigma 1.

    >>> class Zero:
    ...     prediction = "clean"
    ...     def __call__(self, x, step, cache):
    ...         return {leaf: 0.0 for leaf in x}
    >>> ToVelocity(Zero())({"action": 2.0}, Step(0, 0.5, -0.5), None)
    {'action': 4.0}
    """

    prediction: Prediction = "velocity"

    def __init__(self, inner: Denoiser) -> None:
        self.inner = inner
        self.approximate: bool = getattr(inner, "approximate", False)
        self.capture_safe: bool = getattr(inner, "capture_safe", True)

    def prepare_grid(self, grid: Grid) -> None:
        if self.inner.prediction == "noise" and any(step.sigma >= 1.0 for step in grid):
            raise ConfigError(
                "a noise prediction has no velocity at sigma 1; got a grid that starts there. "
                "Use a grid below 1 or a solver that accepts noise."
            )
        prepare = getattr(self.inner, "prepare_grid", None)
        if prepare is not None:
            prepare(grid)

    def __call__(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        out = self.inner(x, step, cache)
        if self.inner.prediction == "clean":
            return {leaf: (x[leaf] - data) / step.sigma for leaf, data in out.items()}
        return {leaf: (noise - x[leaf]) / (1.0 - step.sigma) for leaf, noise in out.items()}


def to_velocity(denoiser: Denoiser) -> Denoiser:
    """Return ``denoiser`` itself when it predicts velocity, else wrapped so that it does."""
    return denoiser if denoiser.prediction == "velocity" else ToVelocity(denoiser)
