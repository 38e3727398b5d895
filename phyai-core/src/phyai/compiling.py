"""torch.compile as this runtime uses it: fixed shapes, whole functions, results kept on disk."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from phyai import env

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
DEFAULTS: Mapping[str, Any] = {"pattern_matcher": False}
"""Options of the compiler. Its search for attention patterns fails on grouped heads with a mask
(torch 2.13), and attention is a kernel of the table anyway."""
_numbers = itertools.count()


def use_disk_cache() -> Path:
    """Let the compiler keep its results below PhyAI's cache folder; return that folder.

    A folder the user set for the compiler stays. What is found there is loaded instead of being
    compiled, also by later processes; torch checks that source, options and machine are the same.
    """
    os.environ.setdefault(CACHE_VARIABLE, str(env.cache_dir() / "inductor"))
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def compiled(
    fn: Callable[..., Any], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return fn compiled by inductor at its first call, whole or not at all, for fixed shapes."""
    use_disk_cache()
    found: Callable[..., Any] = torch.compile(
        own_code(fn),
        backend="inductor",
        dynamic=False,
        fullgraph=True,
        options={**DEFAULTS, **(options or {})},
    )
    return found


def own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls fn and shares its code object with nobody.

    torch counts recompilations per code object, and many regions share one.
    """

    def region(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    region.__code__ = region.__code__.replace(co_name=f"region_{next(_numbers)}")
    return region


def disk_cache_counts() -> tuple[int, int]:
    """Return how many compiled graphs this process has loaded from disk, and how many it made."""
    if "torch._dynamo" not in sys.modules:  # seconds to import, and nothing was compiled yet
        return 0, 0
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]
