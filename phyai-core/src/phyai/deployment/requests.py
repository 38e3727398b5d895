"""What the dispatching side reads of a request: its sessions; and what it tells of a plugin."""

from __future__ import annotations

from typing import Any

from phyai.session_options import checked, observations_of, session_rows


def sessions_of(request: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the sessions a request names, and those it opens (seq 0).

    Of a model request, its attributes ``session_ids`` and ``seqs`` tell, one entry per row.
    Raises: RequestError for words that are wrong in every plugin, as a core would.

    >>> from phyai.types import Observation
    >>> sessions_of(Observation(options={"session_id": "arm", "seq": 0}))
    (('arm',), frozenset({'arm'}))
    """
    rows = observations_of(request)
    if rows:
        if all(row.session_id is None and row.seq is None for row in rows):
            return (), frozenset()
        ids, seqs = session_rows(rows)
    else:
        given: Any = (getattr(request, "session_ids", None), getattr(request, "seqs", None))
        if not all(isinstance(words, tuple) for words in given) or len({*map(len, given)}) > 1:
            return (), frozenset()
        ids, seqs = checked(*given)
    names = tuple(name for name in ids if name is not None)
    opens = frozenset(n for n, seq in zip(ids, seqs, strict=True) if n is not None and seq == 0)
    return names, opens
