"""Stopping a request between two steps where several ranks run it: all leave after the same one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import torch

from phyai.request_watch import Stops, Watch

if TYPE_CHECKING:
    from phyai.ranks.together import Ranks

SEALED, FIRST_STEP = -2, -3
"""Places where the ranks meet, see ``Ranks.meet``; the one after step n is ``FIRST_STEP - n``."""


class SharedStops(Stops):
    """The stops of a batch on one of its ranks; rank 0's watches count.

    Before the first step, after each, and before results are kept all ranks meet: one small gather,
    in which rank 0 says how many of the batch's requests were stopped so far. When there are new
    ones, it says which.

    count: requests of the batch.  watches: on rank 0 one per request, elsewhere none.
    """

    def __init__(self, ranks: Ranks, count: int, watches: Sequence[Watch] = ()) -> None:
        super().__init__(watches)
        self._ranks = ranks
        self._flags = torch.zeros(count, dtype=torch.uint8)  # who was stopped, alike on all ranks

    @property
    def idle(self) -> bool:
        return False

    def told(self, done: int, total: int) -> None:
        for watch in self.watches:
            watch.tell(done, total)
        self._share(FIRST_STEP - done, [watch.stop_asked for watch in self.watches])
        if bool(self._flags.all()):
            raise CancelledError()

    def sealed(self) -> frozenset[int]:
        self._share(SEALED, [watch.seal() for watch in self.watches])
        return frozenset(self._flags.nonzero().flatten().tolist())

    def _share(self, place: int, asked: Sequence[bool]) -> None:
        """Take over which requests rank 0 was asked to stop; they only become more."""
        ranks = self._ranks
        stopped = ranks.meet(place, sum(asked))[0]
        if stopped == int(self._flags.sum()):
            return
        if ranks.leads:
            self._flags.copy_(torch.tensor(asked))
        with ranks.in_step():
            ranks.parallel.control.broadcast(self._flags, timeout_s=ranks.timeout_s)


class NoStops(Stops):
    """Hears of the steps on rank 0, and lets nobody leave: the other ranks would not know."""

    def told(self, done: int, total: int) -> None:
        for watch in self.watches:
            watch.tell(done, total)

    def sealed(self) -> frozenset[int]:
        return frozenset()
