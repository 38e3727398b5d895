"""One rank's place in its replica, and its groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phyai.parallel.groups import Group, Traffic
from phyai.parallel.mesh import Mesh

if TYPE_CHECKING:
    import torch

    from phyai.parallel.watch import Meeting


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class ParallelService:
    """The groups of one rank.

    tp: ranks that share each layer.  cfg: ranks that share the guidance branches.  world: all
    ranks of the replica.  control: all of them, on the host (gloo), for commands and batches.
    leave: ends the groups; may be called twice.

    >>> from phyai.parallel import ParallelService
    >>> alone = ParallelService.single()
    >>> alone.rank, alone.tp.size, alone.cfg.size, alone.is_lead
    (0, 1, 1, True)
    """

    mesh: Mesh
    rank: int
    tp: Group
    cfg: Group
    world: Group
    control: Group
    leave: Callable[[], None] = _nothing

    @classmethod
    def single(cls) -> ParallelService:
        """Return the service of a replica of one rank; it has no process group."""
        return cls(Mesh(), 0, Group("tp"), Group("cfg"), Group("world"), Group("control"))

    @classmethod
    def start(
        cls,
        mesh: Mesh,
        rank: int,
        device: torch.device,
        *,
        store: Meeting | None = None,
        timeout_s: float = 60.0,
        control_timeout_s: float | None = None,
        meet_timeout_s: float | None = None,
    ) -> ParallelService:
        """Join the other ranks; returns when every group has made its first collective.

        store: where the ranks meet; None = an initialised process group, which must match, else
            the variables MASTER_ADDR and MASTER_PORT of a launcher.
        timeout_s: for a collective.  control_timeout_s: for one of the control group, on which
            ranks may wait for work.  meet_timeout_s: until all have come; None = ``timeout_s``.

        Raises: ConfigError when the ranks cannot meet or do not match the mesh; CommTimeoutError
            for ranks that do not come; NoBackendError when torch lacks the back end.
        """
        if mesh.world == 1:
            return cls.single()
        from phyai.parallel.starting import Limits, start_groups

        limits = Limits(timeout_s, control_timeout_s or timeout_s, meet_timeout_s or timeout_s)
        groups, leave = start_groups(mesh, rank, device, store, limits)
        return cls(mesh, rank, *groups, leave)

    @property
    def is_lead(self) -> bool:
        """Return whether this rank prepares the requests of the replica."""
        return self.rank == 0

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.tp, self.cfg, self.world, self.control

    @property
    def counters(self) -> Mapping[str, Traffic]:
        """Return the traffic of this rank by axis."""
        return {group.axis: group.traffic for group in self.groups}

    def close(self) -> None:
        """Leave the groups; may be called twice, and while other ranks are gone."""
        self.leave()
