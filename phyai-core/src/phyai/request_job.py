"""One request on its way through an EngineCore: its turn, what was prepared, its timing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phyai.errors import PluginError
from phyai.joining import deadline_s, without_deadline
from phyai.request_watch import Watch
from phyai.session_turn import OnWait
from phyai.types import ActionChunk, Media, Observation, Prepared

if TYPE_CHECKING:
    from phyai.engine_core import EngineCore


@dataclass(frozen=True)
class RequestInfo:
    """What observers are told about a request; never its content."""

    plugin: str
    rows: int | None = None
    milliseconds: float | None = None
    error: str | None = None


class Job:
    """Takes one request from ``prepare`` to its result; whoever makes one ends it.

    ``prepare``, then the core's ``run`` when ``prepared`` is not None, then ``done``; or ``failed``
    with whatever any of them raised. Observers see it begin here.

    queued_ms: since it was submitted.  on_wait: see ``Turn``.  watch: None = nobody listens.
    timing: milliseconds per stage.  batch_rows: of the batch it ran in.
    ticket: see ``EngineCore.step``; told: the other ranks know of it.
    """

    def __init__(
        self,
        core: EngineCore,
        request: Any,
        queued_ms: float = 0.0,
        on_wait: OnWait | None = None,
        watch: Watch | None = None,
        ticket: int | None = None,
    ) -> None:
        self.core, self.request = core, request
        self.watch = watch if watch is not None else Watch()
        self.prepared: Prepared | None = None
        self.timing: dict[str, float] = {}
        self.started = self.ready_at = time.perf_counter()
        self.batch_rows = 0
        self.lone = isinstance(request, Observation)
        if ticket is None:
            ticket = 0 if core.ranks is None else core.ranks.ticket()
        self.ticket, self.told = ticket, False
        self._queued_ms = queued_ms
        self._decoded: bool | None = None  # None: nothing was prepared
        self._turn = core.sessions.turn(request)
        self._turn.on_wait = on_wait
        core.notify("phyai_request_started", RequestInfo(core.plugin))

    def prepare(self) -> None:
        """Take the request's turn and prepare what is left to run of it.

        Rows that a session has seen before get their stored result; when no row is left,
        ``prepared`` stays None.
        """
        turn, timers, spec = self._turn, self.core.services.profile.timers, self.core.runner.spec
        timers.reset()
        deadline_s(self.request)
        turn.request = without_deadline(self.request)
        turn.__enter__()
        self.timing["queue"] = self._queued_ms + _ms_since(self.started)
        if turn.runs:
            began = time.perf_counter()
            prepared = self.core.prepare(turn.request)
            if not turn.adopt(prepared, spec):
                prepared = self.core.prepare(turn.request)
                turn.adopt(prepared, spec)
            self.timing["prepare"] = _ms_since(began)
            self._decoded = prepared.meta is not None
            if turn.runs:
                self.prepared = prepared
                self.timing.update(timers.collect())
        self.ready_at = time.perf_counter()

    def done(self, result: Any) -> Any:
        """Return the request's result; ``result`` is that of the rows that ran."""
        merged = self._turn.merged(result)
        self.timing["total"] = self._queued_ms + _ms_since(self.started)
        if isinstance(merged, list) if self._decoded is None else self._decoded:
            merged = self._dressed(merged)
        self._release()  # nothing fails from here on: observers hear of one end
        self.core.last_timing = self.timing
        self._finished(None)
        return merged

    def failed(self, error: BaseException) -> BaseException:
        """End the request without a result; return what its caller is to get."""
        self._release()
        self._finished(error)
        if isinstance(error, SystemExit):
            failure = exits(self.core.plugin, error, "a request ran")
            failure.__cause__ = error
            error = failure
        if self.core.ranks is not None and not self.told:
            self.told = True
            self.core.ranks.refuse(self.ticket, error)
        return error

    def _release(self) -> None:
        self._turn.__exit__()

    def _finished(self, error: BaseException | None) -> None:
        ms = _ms_since(self.started) if error is not None else self.timing["total"]
        shown = None if error is None else repr(error)
        info = RequestInfo(self.core.plugin, self._turn.rows, ms, shown)
        self.core.notify("phyai_request_finished", info)

    def _dressed(self, result: Any) -> Any:
        """Put the timing into decoded results; a lone Observation gets a lone result."""
        more: Mapping[str, Any] = {}
        if self.core.config.runtime.batch_wait_ms and self.batch_rows:
            more = {"batch_rows": self.batch_rows}
        return dressed(result, self.timing, more, lone=self.lone)


def dressed(
    rows: Iterable[Any], timing: Mapping[str, float], more: Mapping[str, Any], *, lone: bool
) -> Any:
    """Return decoded rows with their timing and more info; of a lone Observation the row."""
    found = [
        replace(row, timing=dict(timing), info={**row.info, **more} if more else row.info)
        if isinstance(row, ActionChunk | Media)
        else row
        for row in rows
    ]
    return found[0] if lone else found


def exits(plugin: str, error: SystemExit, when: str) -> PluginError:
    """Return what to raise instead: a plugin must not end the process of the robot."""
    return PluginError(
        f"code of plugin {plugin!r} or of its hooks must not end the process; it raised "
        f"SystemExit({error.code!r}) while {when}. Raise another error there."
    )


def _ms_since(then: float) -> float:
    return 1e3 * (time.perf_counter() - then)
