"""What the engine's errors mean to a client.

A refused action is ``failed_precondition``, not ``internal``: the server is well, the same
observation would be refused again, and one robot in a bad pose must not make a gateway eject the
server that all the others use.
"""

from __future__ import annotations

import logging
import re

from phyai.errors import (
    ActionRejected,
    CapacityError,
    EngineUnavailableError,
    RequestError,
    SessionLost,
)
from phyai_gateway.messages import Fault

log = logging.getLogger("phyai.server")

BUSY_RETRY_S = 1.0
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


def fault_of(error: BaseException, request_id: str) -> Fault:
    """Return the fault to answer with; what a client must not read goes to the log."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, SessionLost):
        return Fault("failed_precondition", str(error), reason=_reason(error))
    if isinstance(error, RequestError):
        return Fault("invalid_argument", str(error))
    if isinstance(error, ActionRejected):
        log.warning("request %r: actions refused: %s", request_id, error)
        return Fault(
            "failed_precondition",
            "computed actions must pass the server's action guards; they did not, and none was "
            f"sent: {error}",
            started=True,
            reason="action_rejected",
        )
    if isinstance(error, EngineUnavailableError):
        log.error("request %r: engine unavailable (%s): %s", request_id, error.reason, error)
        return Fault(
            "unavailable",
            f"model cannot take requests now ({error.reason}). Ask another server.",
            started=error.reason == "worker_died",
            reason=error.reason,
        )
    if isinstance(error, CapacityError | MemoryError):
        log.error("request %r: out of memory: %s", request_id, error)
        return Fault(
            "resource_exhausted",
            "request must fit the server's memory; it does not now. Send fewer rows or try later.",
            retry_after=BUSY_RETRY_S,
            started=True,
        )
    log.error("request %r failed", request_id, exc_info=error)
    return Fault(
        "internal",
        f"model failed on request {request_id!r}; the server's log says why.",
        started=True,
    )


def _reason(error: SessionLost) -> str:
    """Return ``session_evicted`` for a SessionEvicted."""
    return _WORD.sub("_", type(error).__name__).lower()
