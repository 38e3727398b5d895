"""torch.compile as this runtime uses it: fixed shapes, whole functions, results kept on disk."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phyai import env

log = logging.getLogger("phyai.graph")

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
DEFAULTS: Mapping[str, Any] = {"pattern_matcher": False}
"""Options of the compiler. Its search for attention patterns fails on grouped heads with a mask
(torch 2.13), and attention is a kernel of the table anyway."""
MAX_SHAPES = 32
"""Compiled variants of one element-wise function; further shapes run eagerly."""


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

    region.__code__ = region.__code__.replace(co_name=f"region_{id(region):x}")
    return region


def disk_cache_counts() -> tuple[int, int]:
    """Return how many compiled graphs this process has loaded from disk, and how many it made."""
    if "torch._dynamo" not in sys.modules:  # seconds to import, and nothing was compiled yet
        return 0, 0
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


class Elementwise:
    """A function of tensors whose element-wise operators run as one compiled loop.

    Compiled once per shapes and dtypes of its arguments, at the first call with them; not inside a
    region that is itself compiled. Where that fails, or there are more than ``MAX_SHAPES``, the
    function runs as it is. Worth it for chains of operators on large tensors: finding the compiled
    variant costs some microseconds per call.

    >>> import torch
    >>> from phyai.compiling import Elementwise
    >>> scale = Elementwise(lambda x, y: torch.tanh(x) * y + 1, enabled=False)
    >>> scale(torch.zeros(2), torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, fn: Callable[..., Any], *, enabled: bool = True) -> None:
        self.fn, self.enabled = fn, enabled
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.__doc__ = fn.__doc__
        self._variants: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.enabled or torch.compiler.is_compiling():
            return self.fn(*args, **kwargs)
        key = (_kinds(args), _kinds(tuple(sorted(kwargs.items()))))
        variant = self._variants.get(key)
        if variant is not None:
            return variant(*args, **kwargs)
        if len(self._variants) >= MAX_SHAPES:
            return self.fn(*args, **kwargs)
        return self._first_call(key, args, kwargs)

    @property
    def variants(self) -> int:
        """How many shapes there are compiled variants for."""
        return len(self._variants)

    def _first_call(self, key: Any, args: Any, kwargs: Any) -> Any:
        variant = compiled(self.fn)
        try:
            out = variant(*args, **kwargs)
        except Exception as error:
            out = self.fn(*args, **kwargs)  # an error of the function itself is raised here
            self.enabled = False
            what = str(error).strip().partition("\n")[0]
            log.warning("%s runs as it is: inductor failed: %s", self.name, what)
            return out
        self._variants[key] = variant
        return out


def elementwise(fn: Callable[..., Any]) -> Elementwise:
    """Mark a function of tensors as one to compile into a single loop; a decorator."""
    return Elementwise(fn)


def _kinds(values: Any) -> Any:
    """Return what a compiled variant is specialised to: shapes, strides and dtypes, or values."""
    if isinstance(values, Tensor):
        return (values.shape, values.stride(), values.dtype, values.device)
    if isinstance(values, tuple | list):
        return tuple(_kinds(value) for value in values)
    return values
