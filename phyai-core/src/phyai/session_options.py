"""The words of a request about its session: session_id and seq, checked and one per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from phyai.adapter import is_integer
from phyai.errors import PluginContractError, RequestError
from phyai.types import Observation, Prepared

MAX_ID = 256
"""Characters of a session's id, at most."""

Ids: TypeAlias = tuple[str | None, ...]
Seqs: TypeAlias = tuple[int | None, ...]


def session_rows(rows: Sequence[Observation]) -> tuple[Ids, Seqs]:
    """Return session_id and seq of every row, None for rows without a session.

    ``prepare`` passes both on: ``Prepared(..., session_ids=ids, seqs=seqs)``.
    Raises: RequestError unless session_id is a text of 1 to 256 characters and seq an integer
        >= 0, sent together, and no session twice.

    >>> from phyai.sessions import session_rows
    >>> from phyai.types import Observation
    >>> session_rows([Observation(options={"session_id": "a", "seq": 3}), Observation()])
    (('a', None), (3, None))
    """
    return checked([row.session_id for row in rows], [row.seq for row in rows])


def check_id(session_id: Any) -> str:
    """Return a session's id; RequestError unless it is a text of 1 to 256 characters."""
    if not isinstance(session_id, str) or not 1 <= len(session_id) <= MAX_ID:
        shown = repr(session_id)
        raise RequestError(
            f"session_id must be a text of 1 to {MAX_ID} characters; got "
            f"{shown if len(shown) < 80 else shown[:77] + '...'}. Send another one."
        )
    return session_id


def checked(ids: Sequence[Any], seqs: Sequence[Any]) -> tuple[Ids, Seqs]:
    """Return ids and numbers of some rows; RequestError as in ``session_rows``."""
    numbers: list[int | None] = []
    for name, seq in zip(ids, seqs, strict=True):
        if (name is None) != (seq is None):
            raise RequestError(
                f"session_id and seq must be sent together; got {name!r} and {seq!r}. Send both, "
                "or none for a request without a session."
            )
        if name is not None:
            check_id(name)
            if not is_integer(seq) or seq < 0:
                raise RequestError(
                    f"seq must be an integer >= 0; got {seq!r}. Count the requests of the session "
                    "from 0."
                )
        numbers.append(None if seq is None else int(seq))
    names = [name for name in ids if name is not None]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(
                f"a session must have at most one row in a request; got {name!r} more than once. "
                "Send its frames one after the other."
            )
    return tuple(ids), tuple(numbers)


def of_batch(batch: Prepared) -> tuple[Ids, Seqs]:
    """Return session_ids and seqs of a batch, one per row; PluginContractError when not."""
    nothing = (None,) * batch.rows
    ids = nothing if batch.session_ids is None else tuple(batch.session_ids)
    seqs = nothing if batch.seqs is None else tuple(batch.seqs)
    if len(ids) != batch.rows or len(seqs) != batch.rows:
        raise PluginContractError(
            f"Prepared.session_ids and seqs must have one entry per row ({batch.rows}); got "
            f"{len(ids)} and {len(seqs)}. Give Prepared what phyai.sessions.session_rows returns."
        )
    return ids, seqs


def observations_of(request: Any) -> Sequence[Observation]:
    """Return the rows of an Observation request; none for what ``prepare`` has to judge."""
    rows = [request] if isinstance(request, Observation) else request
    if not isinstance(rows, list | tuple):
        return ()
    fine = all(isinstance(row, Observation) and isinstance(row.options, Mapping) for row in rows)
    return rows if fine else ()


def declares_sessions(capabilities: Mapping[str, Any]) -> bool | None:
    """Return whether a manifest's capabilities offer sessions; None when they do not say.

    >>> from phyai.session_options import declares_sessions
    >>> declares_sessions({"sessions": True}), declares_sessions({"options": ["seed"]})
    (True, False)
    """
    declared, options = capabilities.get("sessions"), capabilities.get("options")
    if declared is None and options is not None and "session_id" not in options:
        return False
    return None if declared is None else bool(declared)
