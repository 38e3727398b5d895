"""How loading a batch went on all ranks: they go on together, or fail alike.

Two ``cfg`` ranks load different prompts into different caches, so one may have no room, or refuse
its prompt, where the other may not. What follows is full of collectives: they must know before.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from phyai.deployment.values import decode, encode
from phyai.errors import CapacityError
from phyai.ranks.messages import Message, receive

if TYPE_CHECKING:
    from phyai.ranks.together import Ranks
    from phyai.runner import Agree

LOADING = -1
"""The place of this agreement, see ``Ranks.meet``."""
_DONE, _NO_ROOM, _FAILED = range(3)
_ERROR = 1  # the kind of the message


def loading_of(ranks: Ranks) -> Agree | None:
    """Return how the ranks agree after they loaded; None where all load the same."""
    return None if ranks.parallel.cfg.size == 1 else partial(agree_on_loading, ranks)


def agree_on_loading(ranks: Ranks, error: BaseException | None) -> None:
    """Return when every rank has loaded its part; ``error`` is what this one failed with.

    Raises: else, one error on all ranks: that of the first rank that failed. A CapacityError comes
        last: then the others would have gone on, and all may make room and try again.
    """
    states = ranks.meet(LOADING, _state(error))
    worst = max(states)
    if worst == _DONE:
        return
    source = states.index(worst)
    with ranks.in_step():
        found = _shared(ranks, source, error)
    try:
        raise found
    finally:
        del found, error  # or its traceback, which holds this frame, would keep the batch's memory


def _shared(ranks: Ranks, source: int, error: BaseException | None) -> BaseException:
    """Return the error of rank ``source``, of the same class on all ranks."""
    control, limit_s = ranks.parallel.control, ranks.timeout_s
    if ranks.parallel.rank == source and error is not None:
        error.add_note(f"Rank {source} of {control.size} raised it.")
        Message(_ERROR, error).send(control, source, timeout_s=limit_s)
        arrives = decode(*encode(error))
        if type(arrives) is not type(error):
            arrives.__cause__ = error  # a class that the others cannot find
            error = arrives
        return error
    _, arrived = receive(control, source, idle_s=limit_s, timeout_s=limit_s)
    found: BaseException = arrived
    return found


def _state(error: BaseException | None) -> int:
    if error is None:
        return _DONE
    return _NO_ROOM if isinstance(error, CapacityError) else _FAILED
