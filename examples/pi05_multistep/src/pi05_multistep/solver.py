"""Two-step Adams-Bashforth: Euler's cost, one order more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phyai.solver import uniform_grid
from phyai.types import Denoiser, Grid, Key, Prediction, Step

if TYPE_CHECKING:
    from phyai.cache import Cache
    from phyai.types import Tensors


class AdamsBashforth2:
    """x <- x + dt (3/2 v_k - 1/2 v_(k-1)); the first step is Euler's.

    The grid is Euler's, so known actions, guidance and tables of the network stay as they are. The
    previous velocity is a local variable: a solve leaves nothing behind.
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
        before: Tensors | None = None
        for step in grid:
            now = denoiser(x, step, cache)
            slope = now if before is None else _extrapolated(now, before)
            x = {leaf: value + step.dt * slope[leaf] for leaf, value in x.items()}
            before = now
            if on_step is not None:
                on_step(step)
        return x


def _extrapolated(now: Tensors, before: Tensors) -> Tensors:
    return {leaf: 1.5 * value - 0.5 * before[leaf] for leaf, value in now.items()}
