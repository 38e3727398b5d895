"""Faults that the gateway itself has, so that protocols can tell them from a backend's."""

from __future__ import annotations

from phyai_gateway.messages import Fault


class QueueFull(Fault):
    """The model's queue is full; ``retry_after`` estimates when it is not."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__("resource_exhausted", message, retry_after=retry_after)


class GatewayBug(Fault):
    """Something failed inside the gateway; the log has the traceback, the client does not."""

    def __init__(self) -> None:
        super().__init__("internal", "the gateway failed; its log has the reason.", started=True)
