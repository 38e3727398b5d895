"""Faults as gRPC errors and back: codes, retry hints and what else the trailing metadata says."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import grpc

from phyai_gateway.messages import Fault, Status

PUSHBACK = "grpc-retry-pushback-ms"  # understood by gRPC's own retry policies
STARTED = "x-phyai-started"
REASON = "x-phyai-reason"
MAX_DETAILS = 2000  # bytes in a header, which clients refuse from 8 KiB on

CODES: dict[Status, grpc.StatusCode] = {
    "invalid_argument": grpc.StatusCode.INVALID_ARGUMENT,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "permission_denied": grpc.StatusCode.PERMISSION_DENIED,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "failed_precondition": grpc.StatusCode.FAILED_PRECONDITION,
    "unimplemented": grpc.StatusCode.UNIMPLEMENTED,
    "resource_exhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "deadline_exceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
    "cancelled": grpc.StatusCode.CANCELLED,
    "data_loss": grpc.StatusCode.DATA_LOSS,
    "internal": grpc.StatusCode.INTERNAL,
}
_STATUSES: dict[Any, Status] = {
    **{code: status for status, code in CODES.items()},
    grpc.StatusCode.OUT_OF_RANGE: "invalid_argument",
    grpc.StatusCode.ALREADY_EXISTS: "failed_precondition",
    grpc.StatusCode.ABORTED: "failed_precondition",
}
# What a model server that does not say it decides before a model runs.
_BEFORE_START = frozenset(
    ("invalid_argument", "unauthenticated", "permission_denied", "not_found", "unimplemented")
)


def metadata_of(fault: Fault) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata that carries a fault's hints."""
    found = [(STARTED, "1" if fault.started else "0")]
    if fault.retry_after is not None:
        found.append((PUSHBACK, str(max(math.ceil(1000 * fault.retry_after), 0))))
    if fault.reason is not None:
        found.append((REASON, fault.reason))
    return tuple(found)


def details_of(fault: Fault) -> str:
    """Return the text of a fault, cut to what fits into a header."""
    text, left = fault.message, MAX_DETAILS
    for at, char in enumerate(text):
        # Headers are ASCII: each other byte takes three there.
        plain = " " <= char <= "~" and char != "%"
        left -= 1 if plain else 3 * len(char.encode("utf-8", "replace"))
        if left < 0:
            return text[: max(at - 3, 0)] + "..."
    return text


def fault_of(code: Any, details: str | None, trailing: Iterable[Any] | None) -> Fault:
    """Return what a gRPC error says.

    A server that does not tell is taken to have started, unless its code comes before a start or
    gRPC itself never reached it: a request sent twice is worse than one refused.
    """
    hints = {str(key): value for key, value in trailing or ()}
    status = _STATUSES.get(code, "internal")
    text = details or "no details"
    started = hints.get(STARTED)
    if status == "cancelled" and started is None:
        # Nobody here cancelled it: a server that stops resets calls it has not looked at so.
        status, text = "unavailable", f"server dropped the call ({text})"
    elif status == "unavailable" and started is None and _may_have_started(status, text):
        text = f"server must answer what it took; its connection broke ({text}). Ask again."
    return Fault(
        status,
        text[:MAX_DETAILS],
        retry_after=_seconds(hints.get(PUSHBACK)),
        started=started == "1" if started is not None else _may_have_started(status, text),
        reason=hints.get(REASON),
    )


def _may_have_started(status: Status, details: str) -> bool:
    if status == "unavailable":
        return "failed to connect" not in details.lower()
    if status == "resource_exhausted":
        return "message larger than max" not in details.lower()
    return status not in _BEFORE_START


def _seconds(text: object) -> float | None:
    """Return a pushback in seconds; a negative one says "never" and gives no hint."""
    if not isinstance(text, str) or not text.isascii() or not text.isdecimal() or len(text) > 9:
        return None
    return int(text) / 1000
