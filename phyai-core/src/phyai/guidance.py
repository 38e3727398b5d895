"""Classifier-free guidance: two evaluations of the network, one prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phyai.errors import ConfigError, PluginContractError
from phyai.parallel import Group
from phyai.timers import Recorder
from phyai.types import Denoiser, Key, Prediction, Step

if TYPE_CHECKING:
    from phyai.cache import Cache
    from phyai.types import Prepared, Tensors

COND, UNCOND = BRANCHES = ("cond", "uncond")
SCALE = "guidance.scale"


class Guidance:
    """Wraps a denoiser: ``u + g * (c - u)`` in float32, g per row from input ``guidance.scale``.

    inner: called once per branch, with that branch's cache.  caches: of the branches this rank
    evaluates: both, or one when there are two cfg ranks.  interval: (low, high) in sigma; a step
    not strictly inside takes the conditional prediction alone, and the other is not computed.
    cfg: the ranks that share the branches. With two, each evaluates its own and every rank combines
    the same numbers after one all_gather per step of all leaves in one buffer.

    >>> from types import SimpleNamespace
    >>> from phyai.cache import CacheInputs
    >>> class Level:
    ...     prediction = "velocity"
    ...     def __call__(self, x, step, cache):
    ...         return {leaf: torch.full_like(t, cache.level) for leaf, t in x.items()}
    >>> inputs = CacheInputs({"guidance.scale": torch.tensor([1.0, 3.0])})
    >>> cond, uncond = (SimpleNamespace(level=n, inputs=inputs, rows=2) for n in (2.0, 1.0))
    >>> guided = Guidance(Level(), {"cond": cond, "uncond": uncond})
    >>> guided({"action": torch.zeros(2, 1)}, Step(0, 1.0, -1.0), cond)["action"].flatten()
    tensor([2., 4.])
    """

    def __init__(
        self,
        inner: Denoiser,
        caches: Mapping[str, Cache],
        *,
        interval: tuple[float, float] | None = None,
        cfg: Group | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.inner, self.interval, self.recorder = inner, interval, recorder
        self.prediction: Prediction = inner.prediction
        self.caches = dict(caches)
        self.cfg = cfg if cfg is not None and cfg.size > 1 else None
        # What the host's ranks tell each other is no work of a device, and no graph holds it.
        self.capture_safe: bool = self.cfg is None or _on_device(self.caches)

    def __call__(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        guided = self.interval is None or self.interval[0] < step.sigma < self.interval[1]
        scale = cache.inputs[SCALE]
        if self.cfg is not None:
            out = self._shared(self.cfg, x, step, scale, guided)
        else:
            out = self.inner(x, step, self.caches[COND])
            if guided:
                other = self.inner(x, step, self.caches[UNCOND])
                out = {leaf: combined(out[leaf], other[leaf], scale) for leaf in x}
        if self.recorder is not None and self.recorder.active:
            for leaf, tensor in out.items():
                self.recorder.put(f"steps.guided.{leaf}.{self.prediction}", tensor[: cache.rows])
        return out

    def _shared(self, cfg: Group, x: Tensors, step: Step, scale: Tensor, guided: bool) -> Tensors:
        """Evaluate this rank's branch, and combine what all ranks evaluated."""
        own = BRANCHES[cfg.rank]
        if guided or own == COND:
            out = self.inner(x, step, self.caches[own])
            mine = torch.cat([out[leaf].float().flatten(1) for leaf in x], 1)
        else:  # takes part in the exchange, and has nothing to say
            rows, width = scale.shape[0], sum(tensor[0].numel() for tensor in x.values())
            mine = torch.zeros(rows, width, device=scale.device)
        cond, uncond = cfg.all_gather(mine)
        whole = combined(cond, uncond, scale) if guided else cond
        parts = whole.split([tensor[0].numel() for tensor in x.values()], 1)
        return {
            leaf: part.reshape(tensor.shape)
            for (leaf, tensor), part in zip(x.items(), parts, strict=True)
        }


def _on_device(caches: Mapping[str, Cache]) -> bool:
    return all(cache.device.type == "cuda" for cache in caches.values())


def combined(cond: Tensor, uncond: Tensor, scale: Tensor) -> Tensor:
    """Return uncond + scale * (cond - uncond) in float32.

    Shapes: cond and uncond [B, ...], scale [B].
    """
    gain = scale.float().view(-1, *(1,) * (cond.ndim - 1))
    base = uncond.float()
    return base + gain * (cond.float() - base)


def check_guidance(key: Key) -> None:
    """Raise ConfigError for branches or an interval that nothing can evaluate."""
    if key.branches not in ((COND,), BRANCHES):
        raise ConfigError(
            f"guidance branches must be ('cond',) or ('cond', 'uncond'); got {key.branches!r}. "
            "Correct Key.branches."
        )
    if key.guidance_interval is None:
        return
    low, high = key.guidance_interval
    if not low < high:
        raise ConfigError(
            f"guidance_interval must be (low, high) in sigma; got {key.guidance_interval!r}. "
            "Correct it, or leave it out to guide every step."
        )


def check_scale(batch: Prepared) -> None:
    """Raise PluginContractError when a guided batch lacks its scales [B]."""
    scale = batch.tensors.get(SCALE)
    if scale is None or scale.ndim != 1:
        got = "none" if scale is None else f"shape {list(scale.shape)}"
        raise PluginContractError(
            f"a request with two guidance branches must hold {SCALE!r} [B]; got {got}. Put it into "
            "Prepared.tensors, or use one branch."
        )


def local_branches(key: Key, cfg: Group) -> tuple[str, ...]:
    """Return the branches that this rank evaluates: its own one of two, or all of the key's."""
    if cfg.size == 1 or len(key.branches) == 1:
        return key.branches
    if cfg.size != len(key.branches):
        raise ConfigError(
            f"cfg ranks must be 1 or {len(key.branches)} for {len(key.branches)} guidance "
            f"branches; got {cfg.size}. Set parallel.cfg_size to one of them."
        )
    return (key.branches[cfg.rank],)
