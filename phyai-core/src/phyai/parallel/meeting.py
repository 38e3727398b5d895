"""Where the ranks of a replica find each other, and which of their starts it is they meet for."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from torch.distributed.rendezvous import rendezvous

from phyai.errors import CommTimeoutError, ConfigError
from phyai.parallel.watch import Meeting

POLL_S = 0.02
"""How often a rank looks whether the others have come."""
_COUNT, _NEWEST, _CLOSED = "phyai/starts", "phyai/newest", 0

_launchers: dict[tuple[str | None, str | None], Any] = {}
"""Stores by address, kept: rank 0 may host one, in which the next engine meets again."""


def gather(store: Meeting, rank: int, world: int, timeout_s: float) -> int:
    """Return the number of this start, the same on all ranks, once every one of them has come.

    Rank 0 opens a start; the others enter the newest one, each of them once. The store alone knows
    what was before: one rank may have failed more often than another, and a launcher may have
    replaced all processes.

    Raises: CommTimeoutError, naming the ranks that did not come.
    """
    deadline = time.monotonic() + timeout_s
    entered = seen = _opened_by_us(store) if rank == 0 else _CLOSED
    while True:
        if rank and (newest := _newest(store)) not in (seen, _CLOSED):
            seen = newest
            if store.add(_here(newest, rank), 1) == 1:
                entered = newest
        if entered and store.check([_here(entered, other) for other in range(world)]):
            return entered
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    late = [other for other in range(world) if not store.check([_here(entered, other)])]
    if rank == 0:
        store.set(_NEWEST, str(_CLOSED))
    if not entered or not late:
        late = [0]  # it opened none, or gave this one up
    raise CommTimeoutError(f"no rank {', '.join(map(str, late))}", ranks=tuple(late))


def launcher_store(rank: int, world: int, timeout_s: float) -> Meeting:
    """Return the store that a launcher's variables name, the same one each time.

    Raises: ConfigError when a variable is missing.
    """
    address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    limit = timedelta(seconds=timeout_s)
    if address not in _launchers:
        try:
            found = rendezvous("env://", rank=rank, world_size=world, timeout=limit)
            _launchers[address] = next(iter(found))[0]
        except ValueError as error:  # a variable is missing
            raise ConfigError(
                f"ranks meet where MASTER_ADDR and MASTER_PORT say; got {error}. Start them with "
                "torchrun."
            ) from error
    store: Any = _launchers[address]
    store.set_timeout(limit)
    meeting: Meeting = store
    return meeting


def _opened_by_us(store: Meeting) -> int:
    number = store.add(_COUNT, 1)
    store.add(_here(number, 0), 1)
    store.set(_NEWEST, str(number))
    return number


def _newest(store: Meeting) -> int:
    return int(store.get(_NEWEST)) if store.check([_NEWEST]) else _CLOSED


def _here(number: int, rank: int) -> str:
    return f"phyai/{number}/here/{rank}"
