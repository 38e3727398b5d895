"""How the ranks of a replica start: process group, groups per axis, a first collective on each."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from phyai.errors import CommTimeoutError, ConfigError, NoBackendError
from phyai.parallel.groups import Group
from phyai.parallel.meeting import gather, launcher_store
from phyai.parallel.mesh import Mesh
from phyai.parallel.process_groups import ProcessGroup
from phyai.parallel.watch import Meeting, Watch

Groups = tuple[Group, Group, Group, Group]
"""Groups along tp and cfg, of all ranks, and of all ranks on the host."""


class Limits(NamedTuple):
    """Seconds for a collective, for one of the control group, and until all ranks have come."""

    collective_s: float
    control_s: float
    meet_s: float


def start_groups(
    mesh: Mesh,
    rank: int,
    device: torch.device,
    store: Meeting | None,
    limits: Limits,
) -> tuple[Groups, Callable[[], None]]:
    """Return a rank's groups and what leaves them; see ``ParallelService.start``."""
    mesh.coordinates(rank)  # refuses a rank that is not in the mesh
    _check_backends(device)
    if dist.is_initialized():
        _check_match(mesh, rank)
    ending, timeout_s, limit_s = _Ending(), limits.collective_s, limits.meet_s
    try:
        root = _meeting(mesh, rank, limit_s) if store is None else store
        number = gather(root, rank, mesh.world, limit_s)
        limit_s = timeout_s
        ending.default = _default_group(mesh, rank, device, root, number, timeout_s)
        ending.watch = Watch(root, f"phyai/{number}", rank, mesh.world)
        make = _Maker(mesh, rank, device, ending.watch, ending.groups)
        groups = (
            make.along("tp", timeout_s),
            make.along("cfg", timeout_s),
            make.whole("world", timeout_s, host=False),
            make.whole("control", limits.control_s, host=True),
        )
        ending.watch.begin()
        _warm_up(groups, device)
    except ConfigError:
        ending()
        raise
    except (RuntimeError, ValueError, CommTimeoutError) as error:
        ending()
        late = error.ranks if isinstance(error, CommTimeoutError) else ()
        traceback.clear_frames(error.__traceback__)  # what they hold of a group keeps it connected
        raise CommTimeoutError(
            f"all {mesh.world} ranks ({mesh}) must meet within {limit_s:g} s; got "
            f"{str(error).splitlines()[0]}. Look into the log of these ranks, or raise "
            "parallel.timeout_s.",
            ranks=late,
        ) from error
    except BaseException:  # an interrupt; else a next start would find this one's groups
        ending()
        raise
    return groups, ending


class _DefaultGroup:
    """The process group of all ranks that torch wants first, made here; ends with its last user.

    root: where its ranks met.
    """

    def __init__(self, root: Meeting) -> None:
        self.root, self.users = root, 0

    def leave(self) -> None:
        global _ours
        with _changing:
            self.users -= 1
            if self.users or _ours is not self:
                return
            _ours = None
            if dist.is_initialized():
                dist.destroy_process_group()


_ours: _DefaultGroup | None = None
_changing = threading.Lock()


def _meeting(mesh: Mesh, rank: int, timeout_s: float) -> Meeting:
    """Return where ranks meet that were given no store."""
    if not dist.is_initialized():
        return launcher_store(rank, mesh.world, timeout_s)
    return _default_store() if (ours := _ours) is None else ours.root


def _default_group(
    mesh: Mesh, rank: int, device: torch.device, root: Any, number: int, timeout_s: float
) -> _DefaultGroup | None:
    """Make the default process group, or use it; None for one that somebody else has made."""
    global _ours
    with _changing:
        if not dist.is_initialized():
            try:
                # Prefixed: torch would find the addresses of an earlier start in the same place.
                own = dist.PrefixStore(  # type: ignore[attr-defined]
                    f"phyai/{number}/group", root
                )
                _init(mesh, rank, device, own, timeout_s)
            except BaseException:
                if dist.is_initialized():
                    dist.destroy_process_group()
                raise
            _ours = _DefaultGroup(root)
        if _ours is not None:
            _ours.users += 1
        return _ours


class _Ending:
    """Leaves the groups of a rank, once; also those of a start that failed half-way."""

    def __init__(self) -> None:
        self.default: _DefaultGroup | None = None
        self.watch: Watch | None = None
        self.groups: list[ProcessGroup] = []

    def __call__(self) -> None:
        if self.watch is not None:
            self.watch.close()
        while self.groups:
            self.groups.pop().close()
        default, self.default = self.default, None
        if default is not None:
            default.leave()


class _Maker:
    """Makes groups, on every rank all of them and in one order."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        device: torch.device,
        watch: Watch,
        groups: list[ProcessGroup],
    ) -> None:
        self.mesh, self.rank, self.device = mesh, rank, device
        self.watch, self.groups = watch, groups

    def along(self, axis: str, timeout_s: float) -> Group:
        groups = self.mesh.groups(axis)
        if len(groups[0]) == 1:
            return Group(axis, (self.rank,))
        mine: Group | None = None
        for ranks in groups:
            found = self._make(axis, ranks, timeout_s, host=False)
            mine = found or mine
        assert mine is not None
        return mine

    def whole(self, axis: str, timeout_s: float, *, host: bool) -> Group:
        found = self._make(axis, tuple(range(self.mesh.world)), timeout_s, host=host)
        assert found is not None
        return found

    def _make(
        self, axis: str, ranks: tuple[int, ...], timeout_s: float, *, host: bool
    ) -> Group | None:
        gloo = host or self.device.type != "cuda"
        handle = dist.new_group(
            list(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo" if gloo else "nccl"
        )
        if self.rank not in ranks:
            return None
        place = ranks.index(self.rank)
        found = ProcessGroup(
            axis, ranks, place, handle, self.watch, ordered=gloo, timeout_s=timeout_s
        )
        self.groups.append(found)
        return found


def _warm_up(groups: Groups, device: torch.device) -> None:
    """Connect every group, before anything is captured; what it moved does not count."""
    for group in groups:
        where = torch.device("cpu") if group.axis == "control" else device
        total = group.all_reduce(torch.ones(1, device=where))
        if int(total) != group.size:
            raise CommTimeoutError(
                f"a first sum over {group!r} must be {group.size}; got {float(total)}. "
                "Check the collectives of this torch build."
            )
        group.traffic.reset()


def _check_backends(device: torch.device) -> None:
    if not dist.is_available() or not dist.is_gloo_available():
        raise NoBackendError(
            "several ranks need torch.distributed with gloo; this torch build has none. "
            "Install another build, or set the parallel sizes to 1."
        )
    if device.type == "cuda" and not dist.is_nccl_available():
        raise NoBackendError(
            "several ranks on CUDA devices need NCCL; this torch build has none. "
            "Install a CUDA build of torch."
        )


def _init(mesh: Mesh, rank: int, device: torch.device, store: Any, timeout_s: float) -> None:
    cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=mesh.world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if cuda and device.index is not None else None,
    )


def _check_match(mesh: Mesh, rank: int) -> None:
    world, given = dist.get_world_size(), dist.get_rank()
    if (world, given) != (mesh.world, rank):
        raise ConfigError(
            f"the initialised process group must be that of the replica, {mesh.world} ranks "
            f"({mesh}) and this one rank {rank}; got {world} ranks and rank {given}. "
            "Change the parallel sizes, or start another number of processes."
        )


def _default_store() -> Meeting:
    """The store of an initialised process group; torch has no public name for it."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
