"""Health of gRPC listeners: grpc.health.v1 and ``CheckHealth``, answered while models run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from grpc_health.v1 import health_pb2

from phyai_gateway.messages import Fault
from phyai_gateway.protocols.base import Router

WATCH_EVERY_S = 0.5
SERVICE = "grpc.health.v1.Health"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def is_ready(router: Router, model: str) -> bool:
    """Return whether a known model takes requests now; a router without ``ready`` always does."""
    ready: Callable[[str], bool] | None = getattr(router, "ready", None)
    return True if ready is None else ready(model)


class Health:
    """The standard health service: "" is the whole server, other names are models."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.draining = self.closing = False

    def status(self, service: str) -> Any:
        """Return the status of a service; SERVICE_UNKNOWN for a name nobody serves."""
        known = not service or service in self._router.models()
        if not known:
            return _UNKNOWN
        if self.draining or (service and not is_ready(self._router, service)):
            return _NOT_SERVING
        return _SERVING

    def serving(self, model: str) -> bool:
        """Return the answer of ``CheckHealth``; "" asks for every model."""
        models = (model,) if model else self._router.models()
        return bool(models) and all(self.status(name) == _SERVING for name in models)

    def check(self, request: Any) -> Any:
        """Return the answer of ``Check``; raises Fault."""
        status = self.status(request.service)
        if status == _UNKNOWN:
            raise Fault("not_found", "service must be a served model or ''.")
        return health_pb2.HealthCheckResponse(status=status)

    async def watch(self, request: Any, context: Any) -> None:
        """Send the status now and whenever it changes, until the client goes."""
        last = None
        while not self.closing:
            status = self.status(request.service)
            if status != last:
                found = health_pb2.HealthCheckResponse(status=status)
                await context.write(found.SerializeToString())
                last = status
            await asyncio.sleep(WATCH_EVERY_S)
