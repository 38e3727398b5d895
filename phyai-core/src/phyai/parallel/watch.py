"""Tells which ranks a collective waits for: each rank says where it is when another one asks."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from phyai.errors import CommTimeoutError

TICK_S = 0.25
"""How often a rank looks whether another one asks."""
GRACE_S = 8 * TICK_S
"""How long one waits for the answers."""
_NOWHERE, _LEFT = "-", "left"


class Meeting(Protocol):
    """Where ranks leave word for each other: a ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


class Watch:
    """The whereabouts of one rank.

    Nothing is sent while all goes well: a thread looks into the store every TICK_S. A rank whose
    collective failed asks once; whoever gives no answer has ended, or holds its interpreter.

    name: of this start of the replica, the same on all its ranks; prefix of what they write.
    """

    def __init__(self, store: Meeting, name: str, rank: int, world: int) -> None:
        self._store, self._name, self._rank, self._world = store, name, rank, world
        self._where = _NOWHERE
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._answer_when_asked, name=f"phyai-rank{rank}-watch", daemon=True
        )

    def begin(self) -> None:
        """Answer from now on; the groups must be complete, they use the store too."""
        self._thread.start()

    def enter(self, what: str) -> None:
        """Note that this rank begins a collective."""
        self._where = what

    def leave(self) -> None:
        """Note that it is through; one that failed stays noted."""
        self._where = _NOWHERE

    def close(self) -> None:
        """Say that this rank left, and stop answering."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        try:
            if not self._store.check([self._answer_key(self._rank)]):
                self._tell(_LEFT)
        except RuntimeError:  # the store is gone: nobody is left to ask
            return

    def problem(self, what: str, timeout_s: float, error: BaseException) -> CommTimeoutError:
        """Return the error of a collective that failed; names the ranks it lacked."""
        answers = self._ask()
        if answers is None:
            ranks: tuple[int, ...] = ()
            told = f"{_plain(error)}; the ranks cannot be asked"
        else:
            told, ranks = _culprits(what, answers, self._rank, self._world)
            told = told or _plain(error)
        return CommTimeoutError(
            f"every rank must arrive at {what} within {timeout_s:g} s; got {told} (seen by rank "
            f"{self._rank}). The replica must be started again; see the log of these ranks.",
            ranks=ranks,
        )

    def _ask(self) -> dict[int, str] | None:
        """What each rank answers; a rank that does not is left out. None: no store any more."""
        try:
            self._tell(self._where)
            self._store.set(f"{self._name}/asked", "1")
            deadline = time.monotonic() + GRACE_S
            missing = set(range(self._world))
            while missing and time.monotonic() < deadline:
                missing = {r for r in missing if not self._store.check([self._answer_key(r)])}
                time.sleep(TICK_S / 8 if missing else 0)
            there = set(range(self._world)) - missing
            return {r: self._store.get(self._answer_key(r)).decode() for r in sorted(there)}
        except RuntimeError:
            return None

    def _answer_when_asked(self) -> None:
        while not self._stopped.wait(TICK_S):
            try:
                if self._store.check([f"{self._name}/asked"]):
                    if not self._store.check([self._answer_key(self._rank)]):
                        self._tell(self._where)
                    return
            except RuntimeError:
                return

    def _tell(self, where: str) -> None:
        self._store.set(self._answer_key(self._rank), where)

    def _answer_key(self, rank: int) -> str:
        return f"{self._name}/answer/{rank}"


def _culprits(
    what: str, answers: dict[int, str], own: int, world: int
) -> tuple[str, tuple[int, ...]]:
    """Words on the ranks that keep the others waiting, and their numbers.

    First who is gone or busy: the others may wait for them, each in a collective of its own.
    """
    silent = [rank for rank in range(world) if rank not in answers]
    left = [rank for rank, where in answers.items() if where == _LEFT]
    busy = [rank for rank, where in answers.items() if where == _NOWHERE]
    groups = [
        (silent, "no answer (ended, or stopped)"),
        (left, "closed"),
        (busy, "not in a collective"),
    ]
    if not silent + left + busy:
        other = [rank for rank, where in answers.items() if where != what and rank != own]
        groups = [([rank], f"at {answers[rank]} instead") for rank in other]
    said = [f"{_ranks(ranks)}: {state}" for ranks, state in groups if ranks]
    return ", ".join(said), tuple(sorted(rank for ranks, _ in groups for rank in ranks))


def _ranks(ranks: list[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"


def _plain(error: BaseException) -> str:
    """The first sentence of a library's message."""
    return str(error).split("\n")[0].split(". ")[0][:200]
