"""UniPC for flow models: second-order multistep steps over one of four noise schedules.

The grid name of a key names its schedule: ``native:<shift>``, ``diffusers_flow:<shift>``,
``karras:<sigma_min>:<sigma_max>:<rho>``, or ``sigmas:<s0>,<s1>,...`` with every noise level given.
The final 0 is appended to each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from phyai.errors import ConfigError, did_you_mean
from phyai.solver import float32
from phyai.types import Denoiser, Grid, Key, Prediction, Step

if TYPE_CHECKING:
    from phyai.cache import Cache
    from phyai.types import Tensors

TRAIN_STEPS = 1000
"""Integer timesteps of training: what sigma 1 is for the network."""
MAX_STEPS = 10_000
_ORDER = 2
_TOP = float32(1 - 1 / TRAIN_STEPS)  # kept as float32 by the official native schedule
_BELOW_ONE = 1e-6


# ---------------------------------------------------------------- schedules


def timestep(sigma: float) -> int:
    """Return the integer timestep of a noise level: 1000 * sigma in double, truncated.

    Steps carry sigma in double for this: of a sigma rounded to float32 some timesteps are one off.

    >>> [timestep(sigma) for sigma in sigmas_of("native:5", 4)]
    [999, 937, 833, 624, 0]
    """
    return int(TRAIN_STEPS * sigma)


def sigma_at(step: int) -> float:
    """Return the least noise level whose ``timestep`` is ``step``, about step / 1000.

    >>> all(timestep(sigma_at(step)) == step for step in range(1000))
    True
    """
    sigma = step / TRAIN_STEPS
    while timestep(sigma) < step:
        sigma = math.nextafter(sigma, math.inf)
    return sigma


def explicit_grid(sigmas: Sequence[float]) -> str:
    """Return the grid name of given noise levels, without the final 0.

    >>> explicit_grid([0.9, 0.5])
    'sigmas:0.9,0.5'
    """
    return "sigmas:" + ",".join(repr(float(sigma)) for sigma in sigmas)


def sigmas_of(grid: str, num_steps: int) -> tuple[float, ...]:
    """Return the noise levels of a schedule in double: ``num_steps`` of them, then 0.

    Raises: ConfigError for an unknown schedule, bad parameters and a number of steps that does not
    fit.

    >>> [round(sigma, 3) for sigma in sigmas_of("native:5", 4)]
    [1.0, 0.937, 0.833, 0.625, 0.0]
    """
    if isinstance(num_steps, bool) or not isinstance(num_steps, int):
        raise ConfigError(f"num_steps must be an integer; got {num_steps!r}. Pass a whole number.")
    if not 1 <= num_steps <= MAX_STEPS:
        raise ConfigError(f"num_steps must be in [1, {MAX_STEPS}]; got {num_steps}. Change it.")
    name, _, text = grid.partition(":")
    make = _SCHEDULES.get(name)
    if make is None:
        raise ConfigError(
            f"grid must name a schedule ({', '.join(sorted(_SCHEDULES))}); got {grid!r}."
            f"{did_you_mean(name, _SCHEDULES)} Write it like 'native:5.0'."
        )
    sigmas = make(grid, text, num_steps)
    if len(sigmas) != num_steps:
        raise ConfigError(
            f"grid must have as many sigmas as num_steps; got {len(sigmas)} sigmas and "
            f"{num_steps} steps. Make them equal."
        )
    levels = (*sigmas, 0.0)
    rounded = [float32(sigma) for sigma in levels]  # what the solver's weights are made of
    if levels[0] > 1.0 or any(a <= b for a, b in pairwise(rounded)):
        raise ConfigError(
            f"sigmas of a grid must fall from at most 1 to above 0; got {list(sigmas[:8])} from "
            f"{grid[:80]!r}. Change the schedule or take fewer steps."
        )
    return levels


def _native(grid: str, text: str, count: int) -> list[float]:
    (shift,) = _numbers(grid, text, "native:<shift>")
    step = -_TOP / count
    return _shifted([k * step + _TOP for k in range(count)], _positive(grid, shift))


def _diffusers_flow(grid: str, text: str, count: int) -> list[float]:
    (shift,) = _numbers(grid, text, "diffusers_flow:<shift>")
    step = (1 / TRAIN_STEPS - 1.0) / count
    sigmas = _shifted([k * step + 1.0 for k in range(count)], _positive(grid, shift))
    if abs(sigmas[0] - 1.0) < _BELOW_ONE:
        sigmas[0] -= _BELOW_ONE
    return sigmas


def _karras(grid: str, text: str, count: int) -> list[float]:
    low, high, rho = _numbers(grid, text, "karras:<sigma_min>:<sigma_max>:<rho>")
    for value in (low, high, rho):
        _positive(grid, value)
    parts = [k / (count - 1) if count > 1 else 0.0 for k in range(count)]
    try:
        first, last = high ** (1 / rho), low ** (1 / rho)
        levels = [(first + part * (last - first)) ** rho for part in parts]
    except OverflowError as error:
        raise ConfigError(
            f"rho of a grid must keep its levels finite; got {rho:g} in {grid[:80]!r}. Take 7."
        ) from error
    return [level / (1.0 + level) for level in levels]


def _explicit(grid: str, text: str, count: int) -> list[float]:
    if len(text) > 64 * MAX_STEPS:
        raise ConfigError(f"grid must hold at most {MAX_STEPS} sigmas; got more. Take fewer.")
    return [_number(grid, part) for part in text.split(",")]


_SCHEDULES: dict[str, Callable[[str, str, int], list[float]]] = {
    "native": _native,
    "diffusers_flow": _diffusers_flow,
    "karras": _karras,
    "sigmas": _explicit,
}


def _shifted(sigmas: list[float], shift: float) -> list[float]:
    return [shift * sigma / (1.0 + (shift - 1.0) * sigma) for sigma in sigmas]


def _numbers(grid: str, text: str, form: str) -> list[float]:
    values = text.split(":")
    if len(values) != form.count(":"):
        raise ConfigError(f"grid must have the form {form}; got {grid[:80]!r}. Correct it.")
    return [_number(grid, value) for value in values]


def _number(grid: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(
            f"grid must hold finite numbers; got {text[:40]!r} in {grid[:80]!r}. Correct it."
        )
    return value


def _positive(grid: str, value: float) -> float:
    if not 0.0 < value <= 1e6:
        raise ConfigError(
            f"numbers of a grid must be in (0, 1e6]; got {value:g} in {grid[:80]!r}. Change it."
        )
    return value


# ---------------------------------------------------------------- coefficients


@dataclass(frozen=True, slots=True)
class _Update:
    """Weights of one move: x' = x * start + sum of weight * clean prediction.

    newer, older: of the last and the last but one prediction before the move; target: of the
    prediction at the level moved to, which only a corrector has.
    """

    start: float
    newer: float
    older: float = 0.0
    target: float = 0.0


def _log_snr(sigma: float) -> float:
    """Return ln((1 - sigma) / sigma), minus infinity at 1."""
    return math.log1p(-sigma) - math.log(sigma) if sigma < 1.0 else -math.inf


def _predictor(levels: Sequence[float], k: int, order: int) -> _Update:
    """Return the move from level k to level k + 1, which is above 0."""
    move = _log_snr(levels[k + 1]) - _log_snr(levels[k])
    gain = (1.0 - levels[k + 1]) * -math.expm1(-move)
    start = levels[k + 1] / levels[k]
    if order == 1:
        return _Update(start, gain)
    ratio = (_log_snr(levels[k - 1]) - _log_snr(levels[k])) / move
    bend = 0.5 * gain / ratio
    return _Update(start, gain - bend, bend)


def _corrector(levels: Sequence[float], k: int, order: int) -> _Update:
    """Return the move from level k - 1 to level k again, now that the prediction at k is known."""
    move = _log_snr(levels[k]) - _log_snr(levels[k - 1])
    shrink = math.expm1(-move)
    gain = (1.0 - levels[k]) * -shrink
    start = levels[k] / levels[k - 1]
    if order == 1:
        return _Update(start, 0.5 * gain, target=0.5 * gain)
    ratio = (_log_snr(levels[k - 2]) - _log_snr(levels[k - 1])) / move
    phi1 = -shrink / move - 1.0
    phi2 = -phi1 / move - 0.5
    b1, b2 = phi1 / shrink, 2.0 * phi2 / shrink
    older = (b2 - b1) / (ratio - 1.0)  # solves older + target = b1, ratio*older + target = b2
    target = b1 - older
    bend = gain * older / ratio
    return _Update(start, gain * (1.0 - target) - bend, bend, gain * target)


def _moved(start: Tensors, update: _Update, newer: Tensors, older: Any, target: Any) -> Tensors:
    out = {}
    for leaf, x in start.items():
        moved = torch.add(x * update.start, newer[leaf], alpha=update.newer)
        if update.older:
            moved = torch.add(moved, older[leaf], alpha=update.older)
        if update.target:
            moved = torch.add(moved, target[leaf], alpha=update.target)
        out[leaf] = moved
    return out


# ---------------------------------------------------------------- solver


class UniPC:
    """Predictor and corrector of order 2 (B2 form) on clean predictions; first order at both ends.

    Step k asks the network once, at the predicted x. Its clean prediction ``x - sigma * velocity``
    corrects x at this level and predicts x at the next one; the last one is the result. Weights are
    Python floats computed in double from the grid, tensors stay float32. Memory: two predictions
    and one x per leaf besides x itself.

    default: the schedule of keys that name none (grid "default").

    >>> [round(step.sigma, 3) for step in UniPC().grid(Key(num_steps=4, grid="native:5.0"))]
    [1.0, 0.937, 0.833, 0.625]
    >>> class Straight:
    ...     prediction = "velocity"
    ...     def __call__(self, x, step, cache):
    ...         return {"action": torch.ones(2)}
    >>> solver = UniPC()
    >>> grid = solver.grid(Key(num_steps=1, grid="sigmas:1.0"))
    >>> solver.solve(Straight(), {"action": torch.zeros(2)}, None, grid)
    {'action': tensor([-1., -1.])}
    """

    accepts: frozenset[Prediction] = frozenset({"velocity"})

    def __init__(self, default: str = "native:1.0") -> None:
        sigmas_of(default, 1 if not default.startswith("sigmas:") else default.count(",") + 1)
        self.default = default

    def grid(self, key: Key) -> Grid:
        """Return the steps of ``key.grid``, sigma in double.

        Raises: ConfigError, see ``sigmas_of``.
        """
        name = self.default if key.grid == "default" else key.grid
        levels = sigmas_of(name, key.num_steps)
        sigmas = levels[:-1]
        return tuple(
            Step(k, sigma, levels[k + 1] - sigma, sigmas) for k, sigma in enumerate(sigmas)
        )

    def solve(
        self,
        denoiser: Denoiser,
        x: Tensors,
        cache: Cache,
        grid: Grid,
        trace: Any = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Tensors:
        """Return the clean prediction of the last step; every leaf with the same weights."""
        # Of rounded sigmas, as official samplers do: 1 - sigma of the first one is 1 % apart.
        levels = (*(float32(step.sigma) for step in grid), 0.0)
        count = len(grid)
        orders = [min(_ORDER, count - k, k + 1) for k in range(count)]
        start: Tensors = x  # what the last predictor started from
        newer: Tensors = {}
        older: Tensors = {}
        for k, step in enumerate(grid):
            velocity = denoiser(x, step, cache)
            clean = {
                leaf: torch.sub(tensor, velocity[leaf], alpha=levels[k])
                for leaf, tensor in x.items()
            }
            if k + 1 == count:  # a corrected x would not be used
                x = clean
            else:
                if k:
                    update = _corrector(levels, k, orders[k - 1])
                    x = _moved(start, update, newer, older, clean)
                start = x
                x = _moved(start, _predictor(levels, k, orders[k]), clean, newer, None)
                newer, older = clean, newer
            if on_step is not None:
                on_step(step)
        return x
