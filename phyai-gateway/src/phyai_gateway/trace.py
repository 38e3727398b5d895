"""W3C trace context: what a client sends beside its request is sent on to the backend.

Nothing is recorded here; the context only has to survive the hop.  It lives in a context variable,
so that neither messages nor routing know of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE = 512
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

_current: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("phyai_trace", default=())


def note(header: Callable[[str], str | None]) -> None:
    """Keep the trace context of the request that this task answers; a malformed one is dropped.

    header: returns a header's value by its lower-case name.
    """
    parent = header(TRACEPARENT)
    if parent is None or _PARENT.fullmatch(parent) is None:
        _current.set(())
        return
    state = header(TRACESTATE)
    good = state is not None and 0 < len(state) <= MAX_STATE and state.isascii()
    more = ((TRACESTATE, state),) if good and state is not None and state.isprintable() else ()
    _current.set(((TRACEPARENT, parent), *more))


def metadata() -> tuple[tuple[str, str], ...]:
    """Return what the request to a backend carries, as gRPC metadata.

    >>> metadata()
    ()
    """
    return _current.get()
