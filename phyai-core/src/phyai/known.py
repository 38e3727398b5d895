"""Known parts: elements of the solver variable that are given and must not be denoised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phyai.errors import PluginContractError
from phyai.types import Denoiser, Prediction, Step

if TYPE_CHECKING:
    from phyai.cache import Cache
    from phyai.types import Tensors


def mask_name(leaf: str) -> str:
    return f"known.{leaf}.mask"


def value_name(leaf: str) -> str:
    return f"known.{leaf}.value"


def known_part(cache: Cache, leaf: str) -> tuple[Tensor, Tensor] | None:
    """Return (mask bool, value) of a leaf, both of its shape; None when nothing is known.

    Raises: PluginContractError when only one of the two was prepared.
    """
    mask = cache.inputs.get(mask_name(leaf))
    value = cache.inputs.get(value_name(leaf))
    if mask is None and value is None:
        return None
    if mask is None or value is None:
        absent = mask_name(leaf) if mask is None else value_name(leaf)
        raise PluginContractError(
            f"known part of leaf {leaf!r} must have mask and value; got no {absent!r}. "
            "Put both into Prepared.tensors."
        )
    return mask, value


def impose(x: Tensors, cache: Cache) -> Tensors:
    """Return x with its known elements set to their values."""
    out = dict(x)
    for leaf, tensor in x.items():
        part = known_part(cache, leaf)
        if part is not None:
            out[leaf] = torch.where(part[0], part[1].to(tensor.dtype), tensor)
    return out


class Hold:
    """Wraps a denoiser so that known elements do not move.

    velocity: 0; clean: the value; noise: x itself (noise = data = x gives velocity 0).

    >>> from types import SimpleNamespace
    >>> from phyai.cache import CacheInputs
    >>> class One:
    ...     prediction = "velocity"
    ...     def __call__(self, x, step, cache):
    ...         return {leaf: torch.ones_like(tensor) for leaf, tensor in x.items()}
    >>> known = {"known.action.mask": torch.tensor([[True, False]])}
    >>> known["known.action.value"] = torch.zeros(1, 2)
    >>> cache = SimpleNamespace(inputs=CacheInputs(known))
    >>> Hold(One())({"action": torch.zeros(1, 2)}, None, cache)
    {'action': tensor([[0., 1.]])}
    """

    def __init__(self, inner: Denoiser) -> None:
        self.inner = inner
        self.prediction: Prediction = inner.prediction

    def __call__(self, x: Tensors, step: Step, cache: Cache) -> Tensors:
        prediction = self.inner(x, step, cache)
        out = dict(prediction)
        for leaf, tensor in prediction.items():
            part = known_part(cache, leaf)
            if part is None:
                continue
            mask, value = part
            held = {"velocity": torch.zeros_like(tensor), "clean": value, "noise": x[leaf]}
            out[leaf] = torch.where(mask, held[self.prediction].to(tensor.dtype), tensor)
        return out
