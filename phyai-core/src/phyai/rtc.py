"""Real-time chunking: guide a new chunk towards what is left of the previous one.

Formulas: the guided form that is in wide use, whose Jacobian is exactly the identity, so no
backward pass is needed. Trained RTC is not here: its prefix is a known part (``phyai.known``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phyai.errors import PluginContractError, RequestError
from phyai.timers import Recorder
from phyai.types import Denoiser, Prediction, Step

if TYPE_CHECKING:
    from phyai.cache import Cache
    from phyai.types import Tensors

SCHEDULES = ("EXP", "LINEAR", "ONES", "ZEROS")
LEAF = "action"


def prefix_weights(schedule: str, delay: int, horizon: int, chunk_size: int) -> Tensor:
    """Return w [chunk_size] float32: how strongly each row is pulled to the left-over.

    delay d: rows already committed.  horizon H: rows of the left-over that count; d is cut to H.
    ZEROS: 1 for i < d.  ONES: 1 for i < H.  LINEAR: 1 for i < d, then linspace(1, 0, H-d+2)
    without its end points, 0 from H on.  EXP: the same with u -> u*(e^u - 1)/(e - 1).

    Raises: RequestError for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise RequestError(
            f"rtc schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}. "
            "Set prefix_attention_schedule to one of them."
        )
    horizon = min(horizon, chunk_size)
    delay = min(delay, horizon)
    weights = torch.zeros(chunk_size)
    if schedule == "ONES":
        weights[:horizon] = 1.0
        return weights
    weights[:delay] = 1.0
    if schedule in ("LINEAR", "EXP") and horizon > delay:
        ramp = torch.linspace(1.0, 0.0, horizon - delay + 2)[1:-1]
        if schedule == "EXP":
            ramp = ramp * torch.expm1(ramp) / (math.e - 1.0)
        weights[delay:horizon] = ramp
    return weights


def guidance_weight(sigma: float) -> float:
    """Return g(sigma) = (1-tau)/tau * ((1-tau)^2 + tau^2)/(1-tau)^2 with tau = 1-sigma.

    Infinity at both ends, where the row's maximum decides.
    """
    tau = 1.0 - sigma
    if tau <= 0.0 or sigma <= 0.0:
        return math.inf
    return sigma / tau * ((sigma * sigma + tau * tau) / (sigma * sigma))


class GuidedRTC:
    """Wraps a velocity: v - g*w*(prev - x_hat), x_hat = x - sigma*v.

    Inputs (made in ``prepare``): ``rtc.w`` [B, T], ``rtc.prev`` [B, T, A], ``rtc.max`` [B];
    rows of zeros in w mean off. Known elements are left alone.
    Raises: PluginContractError when ``inner`` predicts anything but velocity.

    >>> from types import SimpleNamespace
    >>> from phyai.cache import CacheInputs
    >>> class Still:
    ...     prediction = "velocity"
    ...     def __call__(self, x, step, cache):
    ...         return {leaf: torch.zeros_like(tensor) for leaf, tensor in x.items()}
    >>> inputs = {"rtc.w": torch.tensor([[1.0, 0.0]]), "rtc.prev": torch.ones(1, 2, 1)}
    >>> cache = SimpleNamespace(inputs=CacheInputs({**inputs, "rtc.max": torch.tensor([5.0])}))
    >>> guided = GuidedRTC(Still(), Recorder())
    >>> guided({"action": torch.zeros(1, 2, 1)}, Step(0, 1.0, -1.0), cache)["action"].flatten()
    tensor([-5.,  0.])
    """

    prediction: Prediction = "velocity"

    def __init__(self, inner: Denoiser, recorder: Recorder) -> None:
        if inner.prediction != "velocity":
            raise PluginContractError(
                f"guided RTC needs a velocity; got a denoiser that predicts {inner.prediction!r}. "
                "Wrap it with phyai.solver.to_velocity."
            )
        self.inner, self.recorder = inner, recorder

    def __call__(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        out = dict(self.inner(x, step, cache))
        velocity = out[LEAF]
        gain = torch.clamp(cache.inputs["rtc.max"], max=guidance_weight(step.sigma))
        x_hat = x[LEAF] - step.sigma * velocity
        error = (cache.inputs["rtc.prev"] - x_hat) * cache.inputs["rtc.w"][..., None]
        guided = velocity - gain[:, None, None] * error
        mask = cache.inputs.get(f"known.{LEAF}.mask")
        out[LEAF] = guided if mask is None else torch.where(mask, velocity, guided)
        if self.recorder.active:
            for name, value in (
                ("rtc.x_hat", x_hat),
                ("rtc.v_guided", guided),
                ("rtc.gain", gain),
                ("rtc.weights", cache.inputs["rtc.w"]),
            ):
                self.recorder.put(name, value[: cache.rows])
        return out
