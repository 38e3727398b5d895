"""What goes wrong, by what a robot's program should do about it.

ServingError
├── InvalidRequest (ValueError)   the request is wrong; sending it again changes nothing
├── ModelNotFound                 the server serves no such model
├── NotAllowed                    a token is missing, unknown or may not do this
├── RequestRefused                a lost session, or actions the guards refused; see ``reason``
├── ServerBusy                    try again after ``retry_after`` seconds
├── ServerUnavailable             not running, loading or stopping
├── DeadlineExceeded (TimeoutError)  no answer in time; a late one is dropped
└── ServerFailed                  something broke there; its log says what
"""

from __future__ import annotations

from phyai_gateway.messages import Fault, Status


class ServingError(Exception):
    """A request that was not answered with actions.

    status: the outcome by name.  reason: a word for programs, such as ``session_evicted``.
    retry_after: seconds, None = no hint.  started: whether the model may have run, so that a
    stateful model may have counted the request.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.status, self.reason = fault.status, fault.reason
        self.retry_after, self.started = fault.retry_after, fault.started


class InvalidRequest(ServingError, ValueError):
    """The request is wrong; the message says what the server expects."""


class ModelNotFound(ServingError):
    """The server serves no model of this name."""


class NotAllowed(ServingError):
    """The token is missing, unknown, or lacks the scope."""


class RequestRefused(ServingError):
    """The request does not fit the state of things; ``reason`` says which."""


class ServerBusy(ServingError):
    """The server's queue is full, or its memory."""


class ServerUnavailable(ServingError):
    """No server takes the request now."""


class DeadlineExceeded(ServingError, TimeoutError):
    """There was no answer in time."""


class ServerFailed(ServingError):
    """The server or the network broke; the request may have been run."""


_CLASSES: dict[Status, type[ServingError]] = {
    "invalid_argument": InvalidRequest,
    "not_found": ModelNotFound,
    "unauthenticated": NotAllowed,
    "permission_denied": NotAllowed,
    "failed_precondition": RequestRefused,
    "resource_exhausted": ServerBusy,
    "unavailable": ServerUnavailable,
    "deadline_exceeded": DeadlineExceeded,
}


def error_of(fault: Fault) -> ServingError:
    """Return the exception of a fault."""
    return _CLASSES.get(fault.status, ServerFailed)(fault)
