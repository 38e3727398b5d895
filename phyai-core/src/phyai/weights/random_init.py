"""Random weights of a realistic scale, for benchmarks and tests without a checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from phyai.weights.loading import Progress, run_post_load
from phyai.weights.packing import Packer

Scheme: TypeAlias = Callable[[str, Tensor], "tuple[float, float] | None"]
"""(name, parameter) -> (mean, standard deviation); None = the default."""

_CHUNK = 2**20  # 4 MB of float32 per thread, the only full-precision copy there is


def randomize(
    model: nn.Module,
    seed: int,
    *,
    scheme: Scheme | None = None,
    stored: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Draw every parameter anew, in its own dtype, and pack it; then run ``post_load``.

    stored: dtype of the checkpoint the weights stand for: wider parameters get values it can hold.

    Default: normals of standard deviation 1/sqrt(fan_in) for two and more dims, 0.02 for vectors
    (fan_in = entries per row). A parameter's values depend on ``seed`` and its name alone, not on
    device, thread count or other parameters; of one that ranks share, each has its part of what a
    single rank has. Integer parameters become 0.

    Source: LeCun et al., Efficient BackProp (1998), section 4.6.
    """
    named = list(model.named_parameters())
    packer = Packer(model, (param for _, param in named))
    total, done = sum(p.numel() * p.element_size() for _, p in named), 0
    # Drawing is serial per generator, so chunks have generators of their own.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, param in named:
            packer.writing(param)
            shapes = _shared_shapes(param)
            whole = param.data if shapes is None else _joined(shapes, param)
            mean, std = _moments(name, whole, scheme)
            flat = whole.view(-1) if whole.is_contiguous() else None
            target = torch.empty(whole.numel(), dtype=param.dtype) if flat is None else flat
            starts = range(0, whole.numel(), _CHUNK)
            if param.dtype.is_floating_point:
                draw = partial(_draw, target, seed, name, mean, std, stored)
                list(pool.map(draw, starts))
            else:
                target.zero_()
            if flat is None:
                param.data.copy_(target.view(param.shape))
            if shapes is not None:
                _take_part(param, whole, shapes)
            done += param.numel() * param.element_size()
            packer.filled(param)
            if progress is not None:
                progress(done, total, name)
    run_post_load(model)


def _shared_shapes(param: Tensor) -> list[tuple[int, ...]] | None:
    """The whole shape of each leg of a parameter that ranks share; None when this rank has all."""
    loader, keys = getattr(param, "weight_loader", None), getattr(param, "hf_keys", ())
    if loader is None or all(loader.region(param, shard) is None for _, shard in keys):
        return None
    return [loader.shape(param, shard) for _, shard in keys]


def _joined(shapes: list[tuple[int, ...]], param: Tensor) -> Tensor:
    """Room for the legs of one rank alone, one below the other; gone after this parameter."""
    rows = sum(shape[0] for shape in shapes)
    return torch.empty((rows, *shapes[0][1:]), dtype=param.dtype, device=param.device)


def _take_part(param: nn.Parameter, whole: Tensor, shapes: list[tuple[int, ...]]) -> None:
    """Copy this rank's part of each leg; fused legs lie along dim 0, as every layer has them."""
    loader: Any = vars(param)["weight_loader"]
    keys = vars(param)["hf_keys"]
    legs = torch.split(whole, [shape[0] for shape in shapes])
    with torch.no_grad():
        for leg, (_, shard) in zip(legs, keys, strict=True):
            region = loader.region(param, shard)
            loader.copy(param, leg if region is None else leg.narrow(*region), shard)


def _draw(
    target: Tensor,
    seed: int,
    name: str,
    mean: float,
    std: float,
    stored: torch.dtype | None,
    start: int,
) -> None:
    digest = hashlib.sha256(f"{seed}/{start}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    part = target[start : start + _CHUNK]
    values = torch.empty(part.numel(), dtype=torch.float32)
    values.normal_(mean, std, generator=generator)
    part.copy_(values if stored is None else values.to(stored))


def _moments(name: str, param: Tensor, scheme: Scheme | None) -> tuple[float, float]:
    chosen = scheme(name, param) if scheme is not None else None
    if chosen is not None:
        return chosen
    if param.dim() < 2 or param.numel() == 0:
        return 0.0, 0.02
    return 0.0, float((param.numel() / param.shape[0]) ** -0.5)
