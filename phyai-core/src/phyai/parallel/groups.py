"""A group of ranks and its collectives; the base class is a group of one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Traffic:
    """What one rank did on one axis.

    collectives: all_reduce, all_gather and broadcast calls; barriers and gathers of nothing carry
    nothing and are left out.
    payload_bytes: of the tensors this rank handed in (or, for a broadcast, got).
    A captured region counts when it is recorded, not when it is replayed.

    >>> from phyai.parallel import Traffic
    >>> traffic = Traffic()
    >>> traffic.count(1024)
    >>> traffic.collectives, traffic.payload_bytes
    (1, 1024)
    """

    collectives: int = 0
    payload_bytes: int = 0

    def count(self, nbytes: int) -> None:
        self.collectives += 1
        self.payload_bytes += nbytes

    def reset(self) -> None:
        self.collectives = self.payload_bytes = 0


class Group:
    """Ranks that compute together; this class: one rank alone, whose collectives do nothing.

    axis: what it is a group along: tp, cfg, world or control.  rank: place in the group.
    ranks: the members, numbered as in the replica.

    Every member must make the same calls in the same order with tensors of one shape and dtype.
    ``timeout_s`` of a call: how long it may take; None = the group's own limit.
    Raises (groups of several ranks): CommTimeoutError, naming ranks that did not come, are gone, or
        are elsewhere; the replica must be started again.

    >>> import torch
    >>> from phyai.parallel import Group
    >>> group, x = Group("tp"), torch.ones(2)
    >>> group.all_reduce(x) is x, group.all_gather(x).shape, group.traffic.collectives
    (True, torch.Size([1, 2]), 0)
    """

    def __init__(self, axis: str, ranks: tuple[int, ...] = (0,), rank: int = 0) -> None:
        self.axis, self.ranks, self.rank, self.size = axis, ranks, rank, len(ranks)
        self.traffic = Traffic()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace ``x`` by the sum over the members, alike on all of them; returns x.

        Rounding: a sum of low-precision tensors is formed in float32 and rounded once (gloo).
        """
        return x

    def all_gather(self, x: Tensor, *, timeout_s: float | None = None) -> Tensor:
        """Return every member's ``x``, in order of rank.

        Shapes: x [...] -> [size, ...].  timeout_s: for this call; None = the group's own.
        """
        return x[None]

    def broadcast(self, x: Tensor, src: int = 0, *, timeout_s: float | None = None) -> Tensor:
        """Replace ``x`` by that of member ``src`` (its place in the group); returns x.

        timeout_s: for this call; None = the group's own.
        """
        return x

    def barrier(self) -> None:
        """Wait for all members."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.axis!r}, rank {self.rank} of {self.size})"


SOLE = Group("tp")
"""The tensor-parallel group of a model on one rank."""
