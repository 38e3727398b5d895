"""Which start ranks meet for: after starts that failed on some of them, and new processes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from phyai.errors import CommTimeoutError
from phyai.parallel.meeting import gather
from tests.core.thread_ranks import on_all

LONG_S, SHORT_S = 30.0, 0.15


class Store:
    """What ranks write, in this process; ranks are threads."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self.lock:
            self.held[key] = value

    def get(self, key: str) -> bytes:
        with self.lock:
            return self.held[key].encode()

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            total = int(self.held.get(key, 0)) + amount
            self.held[key] = str(total)
            return total

    def check(self, keys: list[str]) -> bool:
        with self.lock:
            return all(key in self.held for key in keys)


def meet(store: Any, world: int, *, without: int | None = None, **limits: float) -> list[Any]:
    """Have all ranks but one come to a start; return what each got.  limits: ``rank0=seconds``."""

    def come(rank: int) -> Any:
        if rank == without:
            return None
        return gather(store, rank, world, limits.get(f"rank{rank}", LONG_S))

    return on_all(world, come)


def missing(errors: list[Any]) -> list[tuple[int, ...]]:
    for error in errors:
        assert isinstance(error, CommTimeoutError), repr(error)
    return [error.ranks for error in errors]


def test_all_ranks_get_the_number_of_their_start() -> None:
    store = Store()
    assert [meet(store, 3) for _ in range(3)] == [[1] * 3, [2] * 3, [3] * 3]


def test_a_start_that_lacks_a_rank_names_it_and_the_next_one_goes_well() -> None:
    store = Store()
    errors = meet(store, 3, without=2, rank0=SHORT_S, rank1=2 * SHORT_S)
    assert missing(errors[:2]) == [(2,), (2,)]
    assert meet(store, 3) == [2] * 3


def test_a_rank_that_came_in_vain_is_not_behind_or_ahead_the_next_time() -> None:
    store: Any = Store()
    for _ in range(3):
        with pytest.raises(CommTimeoutError, match="no rank 0") as caught:
            gather(store, 1, 2, SHORT_S)
        assert caught.value.ranks == (0,)
    assert meet(store, 2) == [1, 1]
    with pytest.raises(CommTimeoutError, match="no rank 1"):
        gather(store, 0, 2, SHORT_S)
    with pytest.raises(CommTimeoutError, match="no rank 0"):
        gather(store, 1, 2, SHORT_S)  # rank 0 has given up: nobody waits in its start any more
    assert meet(store, 2) == [3, 3]


def test_a_rank_goes_over_to_the_start_of_a_rank_0_that_was_replaced() -> None:
    store: Any = Store()
    store.add("phyai/starts", 1)  # rank 0 opened a start and was killed
    store.add("phyai/1/here/0", 1)
    store.set("phyai/newest", "1")
    entered, found = threading.Event(), []

    def survivor() -> None:
        entered.set()
        found.append(gather(store, 1, 3, LONG_S))

    one = threading.Thread(target=survivor)
    one.start()
    while not store.check(["phyai/1/here/1"]):
        entered.wait(0.001)
    ahead = on_all(3, lambda rank: None if rank == 1 else gather(store, rank, 3, LONG_S))
    one.join(LONG_S)
    assert [ahead[0], *found, ahead[2]] == [2, 2, 2]
