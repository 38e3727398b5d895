"""Which rank of a replica has which place on the axes cfg and tp."""

from __future__ import annotations

from dataclasses import dataclass

from phyai.errors import ConfigError

AXES = ("cfg", "tp")
"""Axes of a replica, outer to inner: rank = cfg_rank * tp + tp_rank."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of one replica: ``cfg`` groups of ``tp`` neighbouring ranks.

    cfg: ranks that share the guidance branches.  tp: ranks that share each layer.
    Raises: ConfigError for a size below 1.

    >>> from phyai.parallel import Mesh
    >>> mesh = Mesh(cfg=2, tp=4)
    >>> mesh.world, mesh.coordinates(5), mesh.ranks("tp", 5), mesh.ranks("cfg", 5)
    (8, (1, 1), (4, 5, 6, 7), (1, 5))
    """

    cfg: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"mesh axis {axis} must be an int of at least 1; got {size!r}.")

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.cfg * self.tp

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (cfg_rank, tp_rank) of a rank; ConfigError when there is no such rank."""
        if not 0 <= rank < self.world:
            raise ConfigError(f"rank must be in [0, {self.world}) of {self}; got {rank}.")
        return divmod(rank, self.tp)

    def ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that share the group of ``rank`` along ``axis``, in order."""
        cfg_rank, tp_rank = self.coordinates(rank)
        if axis == "tp":
            return tuple(range(cfg_rank * self.tp, (cfg_rank + 1) * self.tp))
        if axis == "cfg":
            return tuple(range(tp_rank, self.world, self.tp))
        raise ConfigError(f"mesh axis must be one of {', '.join(AXES)}; got {axis!r}.")

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return every group along ``axis``, in the same order on all ranks."""
        first = range(0, self.world, self.tp) if axis == "tp" else range(self.tp)
        return tuple(self.ranks(axis, rank) for rank in first)

    def __str__(self) -> str:
        return f"cfg {self.cfg} x tp {self.tp}"
