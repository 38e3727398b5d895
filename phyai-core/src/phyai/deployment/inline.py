"""Inline deployment: one replica in the calling process, behind the same methods as a pool."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from phyai.engine_core import EngineCore, max_rows
from phyai.errors import EngineUnavailableError
from phyai.request_loop import RequestLoop
from phyai.request_watch import OnProgress, RequestFuture
from phyai.services import Progress, no_progress

if TYPE_CHECKING:
    from torch import Tensor


class Inline:
    """One core and its queue."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.version = core, 0
        self._loop = RequestLoop(core)
        self._closing, self._updating = threading.Lock(), threading.Lock()
        self._closed = False

    def start(self, progress: Progress = no_progress) -> None:
        """Nothing to start."""

    def step(self, request: Any) -> Any:
        self._refuse_within("step()")
        return self._loop.step(request, self._ticket())

    def submit(
        self, request: Any, keep: object = None, on_progress: OnProgress | None = None
    ) -> Future[Any]:
        future, ranks = RequestFuture(self.core.watch(on_progress)), self.core.ranks
        if ranks is not None and not ranks.leads:
            future.set_running_or_notify_cancel()  # whether it is left out is rank 0's to say
        self._loop.submit(request, future, keep=keep, ticket=self._ticket())
        return future

    def session_call(self, kind: str, session_id: str) -> None:
        sessions = self.core.sessions
        (sessions.reset if kind == "reset_session" else sessions.end)(session_id)

    def update_weights(
        self, items: Iterable[tuple[str, Tensor]], version: int | None = None
    ) -> int:
        """Update in place, between two requests.

        Raises: WeightUpdateError; weights may be partly new then.
        """
        self._refuse_within("update_weights_all()")
        ticket = self._ticket()
        with self._updating:
            self.core.update_weights(items, ticket)
            self.version = self.version + 1 if version is None else version
            return self.version

    def _refuse_within(self, call: str) -> None:
        """Raise EngineUnavailableError for a call that would wait for the request that makes it."""
        if self.core.runs_here:
            raise EngineUnavailableError(
                f"{call} must not be called in on_progress, nor by anything else that a request "
                "runs, which it would wait for; got one. Use another thread, and submit() there.",
                reason="wrong_mode",
            )

    def _ticket(self) -> int | None:
        """Draw the number of a call, when it is made: requests may run in another order."""
        return None if self.core.ranks is None else self.core.ranks.ticket()

    def stats(self) -> list[dict[str, Any]]:
        core = self.core
        replica: dict[str, Any] = {
            "id": 0,
            "devices": [str(core.device)],
            "state": "closed" if self._closed else "ready",
            **self._loop.stats(),
            "restarts": 0,
            "busy_s": core.batches.busy_s,
        }
        replica["memory_bytes"] = core.services.memory.nbytes
        with contextlib.suppress(EngineUnavailableError):  # closed, maybe a moment ago
            replica["memory"] = core.memory_report()
        replica["memo"] = core.services.memo.stats()
        replica["sessions"] = core.sessions.stats()
        replica["observer_failures"] = core.observer_failures()
        replica["graphs"] = core.services.graphs.stats()
        return [replica]

    def describe(self) -> dict[str, Any]:
        return {
            "expects": dict(self.core.adapter.expects()),
            "max_rows": max_rows(self.core.args),
            "device": str(self.core.device),
        }

    def close(self) -> None:
        self._refuse_within("close()")
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._loop.close()
        self.core.close()
