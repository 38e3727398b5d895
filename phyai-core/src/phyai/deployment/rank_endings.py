"""Whose fault it was that the ranks of a replica ended, of all that is known of their ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phyai.errors import CommTimeoutError


@dataclass(frozen=True)
class Ending:
    """How one rank ended.

    text: the end of a sentence, ``a worker that ...``.  error: what it said it failed with.
    swept: it was ended because another rank had.
    """

    rank: int
    text: str
    error: BaseException | None = None
    swept: bool = False


def whose_fault(endings: Iterable[Ending], *, ready: bool) -> tuple[str, BaseException | None]:
    """Return why a replica of several ranks is gone, and what kept it from starting.

    Ranks that ended on their own account come before those that gave up because of them, and
    nobody asks about those that were swept away after that.  ready: it had started.

    >>> from phyai.deployment.rank_endings import Ending, whose_fault
    >>> gone = Ending(1, "a worker that was killed by SIGKILL.")
    >>> whose_fault([Ending(0, "a worker that ended.", swept=True), gone], ready=True)
    ('rank 1, a worker that was killed by SIGKILL.', None)
    """
    ends = sorted(endings, key=lambda end: end.rank)
    first = [end for end in ends if not end.swept and end.error is None]
    errors = [(end.rank, end.error) for end in ends if end.error is not None]
    if first:
        return "; ".join(f"rank {end.rank}, {end.text}" for end in first), None
    if not errors:  # all at once
        return f"rank {ends[0].rank}, {ends[0].text}", None
    own = [error for _, error in errors if not isinstance(error, CommTimeoutError)]
    told = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors)
    cause = (own or [error for _, error in errors])[0]
    return f"ranks that cannot go on together. {told}", None if ready else cause
