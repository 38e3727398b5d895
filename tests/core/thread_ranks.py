"""Ranks that are threads: groups whose collectives meet in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phyai.errors import CommTimeoutError
from phyai.parallel import Group, Mesh, ParallelService


class Meeting:
    """Where the members of one group meet; who left never comes."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.changed = threading.Condition()
        self.brought: dict[tuple[int, int], Any] = {}  # (round, place) -> what was brought
        self.gone: set[int] = set()

    def meet(self, number: int, place: int, thing: Any, timeout_s: float) -> list[Any]:
        """Return what every member brought to one round."""
        wanted = [(number, other) for other in range(len(self.ranks))]
        with self.changed:
            self.brought[number, place] = thing
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: all(k in self.brought or k[1] in self.gone for k in wanted), timeout_s
            )
            late = tuple(self.ranks[k[1]] for k in wanted if k not in self.brought)
            if late:
                raise CommTimeoutError(
                    f"ranks must arrive; missing {', '.join(map(str, late))}.", ranks=late
                )
            return [self.brought[k] for k in wanted]

    def leave(self, place: int) -> None:
        with self.changed:
            self.gone.add(place)
            self.changed.notify_all()


class ThreadGroup(Group):
    """A member of a Meeting."""

    def __init__(self, axis: str, meeting: Meeting, place: int, timeout_s: float) -> None:
        super().__init__(axis, meeting.ranks, place)
        self.meeting, self.timeout_s, self.rounds = meeting, timeout_s, 0

    def _meet(self, x: Any, timeout_s: float | None = None) -> list[Any]:
        self.rounds += 1
        patience = self.timeout_s if timeout_s is None else timeout_s
        return self.meeting.meet(self.rounds, self.rank, x, patience)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.traffic.count(x.nbytes)
        return x.copy_(torch.stack(self._meet(x.clone())).sum(0))

    def all_gather(self, x: Tensor, *, timeout_s: float | None = None) -> Tensor:
        self.traffic.count(x.nbytes)
        return torch.stack(self._meet(x.clone(), timeout_s))

    def broadcast(self, x: Tensor, src: int = 0, *, timeout_s: float | None = None) -> Tensor:
        self.traffic.count(x.nbytes)
        return x.copy_(self._meet(x.clone(), timeout_s)[src])

    def barrier(self, *, timeout_s: float | None = None) -> None:
        self._meet(None, timeout_s)


class ThreadParallel(ParallelService):
    """One thread's place; others hear when it leaves."""

    def close(self) -> None:
        for group in self.groups:
            if isinstance(group, ThreadGroup):
                group.meeting.leave(group.rank)


def services(mesh: Mesh, timeout_s: float = 5.0) -> list[ParallelService]:
    """Return the service of every rank."""
    meetings = {
        (axis, ranks): Meeting(ranks)
        for axis, groups in {
            "tp": mesh.groups("tp"),
            "cfg": mesh.groups("cfg"),
            "world": (tuple(range(mesh.world)),),
            "control": (tuple(range(mesh.world)),),
        }.items()
        for ranks in groups
    }

    def group(axis: str, rank: int) -> Group:
        for (name, ranks), meeting in meetings.items():
            if name == axis and rank in ranks:
                return ThreadGroup(axis, meeting, ranks.index(rank), timeout_s)
        raise AssertionError(axis)

    return [
        ThreadParallel(
            mesh,
            rank,
            group("tp", rank),
            group("cfg", rank),
            group("world", rank),
            group("control", rank),
        )
        for rank in range(mesh.world)
    ]


def on_all(count: int, run: Callable[[int], Any], seconds: float = 60.0) -> list[Any]:
    """Run on a thread per rank; return what each returned or raised."""
    found: list[Any] = [None] * count

    def one(rank: int) -> None:
        try:
            found[rank] = run(rank)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a rank does not return"
    return found
