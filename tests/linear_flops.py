"""What the linear layers of an engine multiply, to hold a cost model against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from phyai import Engine
from phyai.layers import Linear


@contextmanager
def linear_flops(engine: Engine) -> Iterator[Counter[str]]:
    """Count operations of the linear layers by the part they are in, below the network's root."""
    done: Counter[str] = Counter()
    adapter: Any = engine.adapter
    linears = {
        name: module
        for name, module in adapter.modules.named_modules()
        if isinstance(module, Linear)
    }
    parts = {id(module): name.split(".")[1] for name, module in linears.items()}

    def hook(module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> None:
        rows = args[0].numel() // args[0].shape[-1]
        weight: Any = module.weight
        done[parts[id(module)]] += 2 * rows * weight.numel()

    hooks = [module.register_forward_hook(hook) for module in linears.values()]
    try:
        yield done
    finally:
        for handle in hooks:
            handle.remove()
