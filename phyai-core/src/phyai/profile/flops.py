"""Operations counted while a request runs, by stage: the check of what shapes predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from phyai.timers import Timers


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of matrix products, convolutions and attention, by open stage timer.

    flops: timer path -> operations ("" = outside every stage).
    opaque: names of other libraries' operators that ran and have no formula here.
    Graph replays run no operator: count on an engine with graph_backend "eager".

    >>> import torch
    >>> from phyai.profile.flops import FlopCounter
    >>> from phyai.timers import Timers
    >>> timers = Timers()
    >>> with FlopCounter(timers) as counter, timers.stage("encode"):
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 5)
    >>> dict(counter.flops)
    {'encode': 60}
    """

    def __init__(self, timers: Timers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timers = timers
        self.flops: Counter[str] = Counter()
        self.opaque: set[str] = set()

    @property
    def total(self) -> int:
        return sum(self.flops.values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        out = func(*args, **given)
        name = str(func._overloadpacket)
        if name in _EXTRA:
            self.flops[self.timers.current] += _EXTRA[name](args, out)
        elif func._overloadpacket in flop_registry:
            count = flop_registry[func._overloadpacket]
            self.flops[self.timers.current] += int(count(*args, **given, out_val=out))
        elif not name.startswith(("aten.", "prim.")):
            self.opaque.add(name)
        return out


def _cpu_attention(args: tuple[Any, ...], out: Any) -> int:
    """Scores and weighted values; keys may have fewer heads than queries."""
    q, k, v = (tensor.shape for tensor in args[:3])
    return 2 * int(prod(q[:-1])) * int(k[-2]) * (int(q[-1]) + int(v[-1]))


def _linear(args: tuple[Any, ...], out: Any) -> int:
    return 2 * int(out.numel()) * int(args[0].shape[-1])


def _native_linear(args: tuple[Any, ...], out: Any) -> int:
    x, _, _, (outputs, _) = args[:4]
    return 2 * int(x.numel()) * int(outputs)


# Operators that torch's own table leaves out.
_EXTRA: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "aten._scaled_dot_product_fused_attention_overrideable": _cpu_attention,
    "mkldnn._linear_pointwise": _linear,
    "onednn.qlinear_pointwise": _linear,
    "phyai.native_linear": _native_linear,
}


def count_flops(timers: Timers, run: Callable[[], Any]) -> FlopCounter:
    """Return what one call of ``run`` computes, by the stage timers it opens."""
    counter = FlopCounter(timers)
    with torch.no_grad(), counter:
        run()
    return counter
