"""Hook plugin: every second solver step takes the prediction of the step before. No torch.

Approximate: half of the network calls at a small error; rollouts leave it out.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from phyai.hooks import hookimpl

if TYPE_CHECKING:
    from phyai.cache import Cache
    from phyai.types import BufferSpec, CacheSpec, Denoiser, Key, Prediction, Step, Tensors

PREFIX = "step_cache."


def is_reused(step: Step) -> bool:
    """Return whether a step reuses the last prediction: 1, 3, 5, ... but never the last step.

    A step that is itself a graph input has no index to decide by; it is computed.
    """
    return step.position is None and step.index % 2 == 1 and step.index + 1 < len(step.grid)


def leaf_shapes(adapter: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of x, without rows; empty for an adapter this cache does not know."""
    if adapter.name not in ("pi0", "pi05"):
        return {}
    return {"action": (adapter.pi.chunk_size, adapter.pi.max_action_dim)}


@hookimpl(wrapper=True)
def phyai_cache(adapter: Any, services: Any) -> Generator[None, Any, Any]:
    inner = yield
    shapes = leaf_shapes(adapter)
    return WithLastPrediction(inner, shapes) if shapes else inner


@hookimpl(wrapper=True)
def phyai_denoiser(adapter: Any, services: Any, stage: str) -> Generator[None, Any, Any]:
    inner = yield
    return StepCache(inner) if stage == "network" and leaf_shapes(adapter) else inner


class WithLastPrediction:
    """The wrapped CacheSpec with a buffer per leaf, written inside the solver loop.

    Buffers of the Cache belong to a row and a guidance branch; state of the wrapper itself would be
    shared by both, and a replayed graph would not see it.
    """

    def __init__(self, inner: CacheSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.inner, self.shapes = inner, dict(shapes)

    def __call__(self, key: Key) -> Mapping[str, BufferSpec]:
        import torch
        from phyai.types import BufferSpec

        mine = {
            PREFIX + leaf: BufferSpec(shape, torch.float32, scratch=True)
            for leaf, shape in self.shapes.items()
        }
        return {**self.inner(key), **mine}


class StepCache:
    """The wrapped network, asked at the steps ``is_reused`` does not name."""

    approximate = True

    def __init__(self, inner: Denoiser) -> None:
        self.inner = inner
        self.prediction: Prediction = inner.prediction

    def __call__(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        if is_reused(step):
            return {leaf: cache[PREFIX + leaf].clone() for leaf in x}
        out = self.inner(x, step, cache)
        for leaf, value in out.items():
            cache[PREFIX + leaf].copy_(value)
        return out
