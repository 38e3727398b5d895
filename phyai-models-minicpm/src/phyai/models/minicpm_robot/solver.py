"""The solver: each step predicts the clean actions anew and mixes the first noise back in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phyai.errors import ConfigError
from phyai.types import Denoiser, Grid, Key, Prediction, Step

if TYPE_CHECKING:
    from phyai.cache import Cache
    from phyai.types import Tensors


class CleanResample:
    """x_k = sigma_k * noise + (1 - sigma_k) * clean_{k-1}; clean_k = network(x_k); clean_{-1} = 0.

    The noise is the x that solving starts from, the same at every step. Step k of N has
    sigma = (N - k)/N in Python floats; adapters make their integer times of it.

    >>> [step.sigma for step in CleanResample().grid(Key(num_steps=4))]
    [1.0, 0.75, 0.5, 0.25]
    """

    accepts: frozenset[Prediction] = frozenset({"clean"})

    def grid(self, key: Key) -> Grid:
        """Return the steps of ``key.num_steps``.

        Raises: ConfigError for less than one step.
        """
        count = key.num_steps
        if count < 1:
            raise ConfigError(f"num_steps must be at least 1; got {count!r}. Ask for a step.")
        sigmas = tuple((count - k) / count for k in range(count))
        return tuple(Step(k, sigma, -1.0 / count, sigmas) for k, sigma in enumerate(sigmas))

    def solve(
        self,
        denoiser: Denoiser,
        x: Tensors,
        cache: Cache,
        grid: Grid,
        trace: Any = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Tensors:
        """Return the clean prediction of the last step."""
        noise, clean = x, None
        for step in grid:
            clean = denoiser(_mixed(noise, clean, step.sigma), step, cache)
            if on_step is not None:
                on_step(step)
        return x if clean is None else {leaf: clean[leaf] for leaf in x}


def _mixed(noise: Tensors, clean: Tensors | None, sigma: float) -> Tensors:
    """Return sigma * noise + (1 - sigma) * clean; None = zeros."""
    if clean is None:
        return noise if sigma == 1.0 else {leaf: sigma * n for leaf, n in noise.items()}
    return {leaf: sigma * n + (1.0 - sigma) * clean[leaf] for leaf, n in noise.items()}
