"""Groups of ranks that are processes: collectives of torch.distributed, over gloo or NCCL."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    BarrierOptions,
    BroadcastOptions,
)

from phyai.errors import CommTimeoutError
from phyai.parallel.groups import Group
from phyai.parallel.watch import Watch

_numbers = itertools.count()
_members: WeakValueDictionary[int, ProcessGroup] = WeakValueDictionary()
"""Living groups by number: how a compiled graph, which holds no objects, calls one."""
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_Call: TypeAlias = Callable[[Any, timedelta | None], Any]
"""Makes a collective of a group; its limit, None = the group's."""
# Its name since torch 2.13; the older one warns there.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class ProcessGroup(Group):
    """A member of a group of processes.

    handle: what torch calls the group.  ordered: sums are formed from rank 0 on, on every rank, so
    that no element's rounding depends on its place in the tensor (gloo); else as the library does.
    timeout_s: of a collective without a limit of its own.
    """

    def __init__(
        self,
        axis: str,
        ranks: tuple[int, ...],
        rank: int,
        handle: dist.ProcessGroup,
        watch: Watch,
        *,
        ordered: bool,
        timeout_s: float,
    ) -> None:
        super().__init__(axis, ranks, rank)
        self._handle: dist.ProcessGroup | None = handle
        self._watch, self._ordered = watch, ordered
        self._timeout_s, self._calls = timeout_s, 0
        self._number = next(_numbers)
        _members[self._number] = self

    def all_reduce(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x.copy_(torch.ops.phyai.group_all_reduce(x, self._number))
        if self._ordered:
            return x.copy_(_sum(self._gathered(x, None, "all_reduce")))
        self.traffic.count(x.nbytes)
        self._do("all_reduce", None, lambda group, _: dist.all_reduce(x, group=group))
        return x

    def all_gather(self, x: Tensor, *, timeout_s: float | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            found: Tensor = torch.ops.phyai.group_all_gather(x, self._number, self.size)
            return found
        return self._gathered(x, timeout_s, "all_gather")

    def broadcast(self, x: Tensor, src: int = 0, *, timeout_s: float | None = None) -> Tensor:
        self.traffic.count(x.nbytes)
        whole = x.contiguous()

        def call(group: Any, limit: timedelta | None) -> None:
            if limit is None:
                dist.broadcast(whole, src=self.ranks[src], group=group)
                return
            how: Any = BroadcastOptions()
            how.rootRank, how.timeout = src, limit
            group.broadcast([whole], how).wait()

        self._do("broadcast", timeout_s, call)
        return x if whole is x else x.copy_(whole)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        def call(group: Any, limit: timedelta | None) -> None:
            if limit is None:
                dist.barrier(group=group)
                return
            how: Any = BarrierOptions()
            how.timeout = limit
            group.barrier(opts=how).wait()

        self._do("barrier", timeout_s, call)

    def close(self) -> None:
        """Leave the group: the others' next call fails, and so does one of this member."""
        handle, self._handle = self._handle, None
        if handle is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # it ended with the default group
                dist.destroy_process_group(handle)

    def _gathered(self, x: Tensor, timeout_s: float | None, what: str) -> Tensor:
        out = x.new_empty((self.size * x.numel(),))
        part = x.contiguous().view(-1)
        if part.numel() == 0:
            return out.view(self.size, *x.shape)
        self.traffic.count(x.nbytes)

        def call(group: Any, limit: timedelta | None) -> None:
            if limit is None:
                _gather_into(out, part, group=group)
                return
            how: Any = AllgatherOptions()
            how.timeout = limit
            group.allgather([list(out.view(self.size, -1))], [part], how).wait()

        self._do(what, timeout_s, call)
        return out.view(self.size, *x.shape)

    def _do(self, what: str, timeout_s: float | None, call: _Call) -> None:
        """Make a collective call; raise CommTimeoutError when it fails.

        A limit of its own is one of the operation. Waiting less long for one that may take longer
        would leave it there, and whoever closes the group would wait for it.
        """
        handle = self._handle
        if handle is None:
            raise CommTimeoutError(
                f"every {what} along {self.axis} must come before this rank leaves; got one after "
                "that. Create a new Engine."
            )
        self._calls += 1
        place = f"{self.axis} collective {self._calls} ({what})"
        self._watch.enter(place)
        try:
            call(handle, None if timeout_s is None else timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:  # ValueError: the group is gone
            del handle
            traceback.clear_frames(error.__traceback__)  # they would keep the group connected
            limit = self._timeout_s if timeout_s is None else timeout_s
            raise self._watch.problem(place, limit, error) from error
        self._watch.leave()


def _sum(parts: Tensor) -> Tensor:
    """Add parts [size, ...] in order; low precision in float32."""
    total = parts[0].float() if parts.dtype in _LOW_PRECISION else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _register() -> Any:
    """Register the collectives as a compiled region calls them: opaque, on whatever device."""
    untyped: Any = torch.library.Library
    operators = untyped("phyai", "FRAGMENT")
    operators.define("group_all_reduce(Tensor x, int group) -> Tensor")
    operators.define("group_all_gather(Tensor x, int group, int size) -> Tensor")

    def all_reduce(x: Tensor, group: int) -> Tensor:
        return _members[group].all_reduce(x.clone())

    def all_gather(x: Tensor, group: int, size: int) -> Tensor:
        return _members[group].all_gather(x)

    def fake_all_reduce(x: Tensor, group: int) -> Tensor:
        return torch.empty_like(x)

    def fake_all_gather(x: Tensor, group: int, size: int) -> Tensor:
        return x.new_empty((size, *x.shape))

    for device in ("CPU", "CUDA"):
        operators.impl("group_all_reduce", all_reduce, device)
        operators.impl("group_all_gather", all_gather, device)
    torch.library.register_fake("phyai::group_all_reduce", fake_all_reduce, lib=operators)
    torch.library.register_fake("phyai::group_all_gather", fake_all_gather, lib=operators)
    return operators


_operators = _register()
