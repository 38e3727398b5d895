"""One request's turn: which of its rows run, and which get the result they had before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from phyai.errors import PluginContractError, RequestError
from phyai.session_options import Ids, Seqs, checked, observations_of, of_batch, session_rows
from phyai.session_results import Frozen, joined, split
from phyai.types import CacheSpec, Observation, Prepared

if TYPE_CHECKING:
    from phyai.sessions import SessionStore

OnWait: TypeAlias = Callable[[Callable[[], bool]], None]


class Turn:
    """The sessions of one request, held from before ``prepare`` until it is done.

    request: what is left to run of it.  rows: of the whole request; None until that is known.
    void: sessions that were reset or closed meanwhile; nothing is kept of them.
    on_wait: called when a session is in use, before waiting, with what tells whether it is free.

    >>> from phyai.memory import Arena
    >>> from phyai.sessions import SessionStore
    >>> from phyai.types import Observation
    >>> with SessionStore(Arena("cpu")).turn(Observation(prompt="go")) as turn:
    ...     turn.runs, turn.request.prompt
    (True, 'go')
    """

    def __init__(self, store: SessionStore, request: Any) -> None:
        self._store, self.request = store, request
        self.rows: int | None = None
        self.void: set[str] = set()
        self.on_wait: OnWait | None = None
        self._ids: Ids = ()  # of the rows that run
        self._seqs: Seqs = ()
        self._answers: dict[int, Frozen] = {}
        self._begun = False

    @property
    def runs(self) -> bool:
        """Whether anything is left to run."""
        return self.rows is None or len(self._answers) < self.rows

    def __enter__(self) -> Turn:
        rows = observations_of(self.request)
        if any(row.session_id is not None or row.seq is not None for row in rows):
            self._store.check_offered()
            self._begin(*session_rows(rows))
            if self._answers:
                self._leave(rows)
        return self

    def __exit__(self, *exc: object) -> None:
        self._store.release(self)

    def adopt(self, prepared: Prepared, spec: CacheSpec) -> bool:
        """Take over what ``prepare`` made; of a model request it tells the sessions.

        It also tells those of Observations that name them in the adapter's own words. When some of
        these were sent again, False is returned: what is left in ``request`` is to be prepared.
        Raises: RequestError as for an Observation, when rows of a model request were sent again,
            others not, and when only some rows name their session in core's words;
            PluginContractError when ``prepare`` lost the sessions of its rows.
        """
        ids, seqs = of_batch(prepared)
        if not self._begun:
            self.rows = prepared.rows
        if not self._begun and all(name is None for name in ids):
            return True
        self._store.learn(prepared.key, spec)
        self._store.check_offered()
        if not self._begun:
            self._begin(*checked(ids, seqs))
            if not (self._answers and self.runs):
                return True
            rows = observations_of(self.request)
            if len(rows) != len(ids):
                raise RequestError(
                    f"rows of a model request must be all new or all sent again; got session_ids "
                    f"{ids!r} and seqs {seqs!r}. Send them as two requests."
                )
            self._leave(rows)
            return False
        if (ids, seqs) != (self._ids, self._seqs):
            self._refuse_other_names(ids)
            raise PluginContractError(
                f"prepare() must pass the sessions of its rows on; got session_ids {ids!r} and "
                f"seqs {seqs!r} for {self._ids!r} and {self._seqs!r}. Give Prepared what "
                "phyai.sessions.session_rows returns."
            )
        return True

    def _leave(self, rows: Sequence[Observation]) -> None:
        """Leave the rows in the request that run."""
        self.request = [row for i, row in enumerate(rows) if i not in self._answers]

    def _refuse_other_names(self, ids: Ids) -> None:
        """Raise RequestError when ``prepare`` found a session where core saw none.

        An adapter may know other names of the two options. Rows that use them are not held.
        """
        if len(ids) != len(self._ids):
            return
        found = list(zip(ids, self._ids, strict=True))
        if all(mine in (None, theirs) for theirs, mine in found):
            other = [theirs for theirs, mine in found if mine is None and theirs is not None]
            raise RequestError(
                "rows of a request must name their sessions by the same options; got session_id "
                f"in some, and another name of it for {other!r}. Use session_id and seq in all."
            )

    def merged(self, result: Any) -> Any:
        """Return the whole request's result: that of the rows that ran, and the stored ones."""
        if not self._answers:
            return result
        assert self.rows is not None
        ran = iter(split(result, len(self._ids)) if self.runs else ())
        rows = range(self.rows)
        return joined([self._answers[i]() if i in self._answers else next(ran) for i in rows])

    def _begin(self, ids: Ids, seqs: Seqs) -> None:
        self._answers = self._store.begin(self, ids, seqs)
        self.rows, self._begun = len(ids), True
        left = [i for i in range(len(ids)) if i not in self._answers]
        self._ids, self._seqs = tuple(ids[i] for i in left), tuple(seqs[i] for i in left)
