"""The ``/v2`` paths for a router, and a listener of its own for them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from phyai_gateway.faults import QueueFull
from phyai_gateway.messages import Fault
from phyai_gateway.protocols.base import ListenerOptions, Router
from phyai_gateway.protocols.http_body import (
    BadLength,
    TooLarge,
    call_of,
    principal_of,
    read_body,
    while_connected,
)
from phyai_gateway.protocols.http_server import HttpListener
from phyai_gateway.protocols.kserve import decode as codec
from phyai_gateway.protocols.kserve.models import (
    Sequences,
    all_ready,
    check_version,
    describe,
    is_ready,
)

log = logging.getLogger(__name__)
LENGTH_HEADER = "inference-header-content-length"
STATUS = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "failed_precondition": 409,
    "unimplemented": 501,
    "resource_exhausted": 503,
    "unavailable": 503,
    "cancelled": 503,
    "deadline_exceeded": 504,
    "data_loss": 502,
    "internal": 500,
}
OFF_LOOP_BYTES = 1 << 20


class KserveRoutes:
    """Serves KServe v2 for a router; takes no options."""

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        if options.options:
            raise Fault("invalid_argument", "kserve takes no options of its own. Leave them out.")
        self._router, self._options = router, options
        self._sequences = Sequences(options.limits.max_sessions)

    def routes(self) -> list[BaseRoute]:
        model = "/v2/models/{model}"
        found: list[BaseRoute] = [
            Route("/v2", self.metadata),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
        ]
        for prefix in (model, model + "/versions/{version}"):
            found += [
                Route(prefix, self.model_metadata),
                Route(prefix + "/ready", self.model_ready),
                Route(prefix + "/infer", self.infer, methods=["POST"]),
            ]
        return found

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        ready = all_ready(self._router)
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def metadata(self, request: Request) -> Response:
        from phyai_gateway.version import VERSION

        extensions = ["binary_tensor_data"]
        return JSONResponse({"name": "phyai", "version": VERSION, "extensions": extensions})

    async def model_ready(self, request: Request) -> Response:
        try:
            model = self._model(request)
            self._router.contract(model)
        except Fault as fault:
            return error_of(fault)
        ready = is_ready(self._router, model)
        return JSONResponse({"name": model, "ready": ready}, 200 if ready else 503)

    async def model_metadata(self, request: Request) -> Response:
        try:
            principal_of(request, self._options, "infer")
            return JSONResponse(describe(self._router.contract(self._model(request))))
        except Fault as fault:
            return error_of(fault)

    async def infer(self, request: Request) -> Response:
        try:
            return await self._infer(request)
        except Fault as fault:
            return error_of(fault)
        except TooLarge as large:
            self._options.observer.decode_error("kserve", "too_large")
            return JSONResponse({"error": str(large)}, 413)
        except BadLength as bad:
            return JSONResponse({"error": str(bad)}, 400)
        except Exception:
            log.exception("kserve request failed")
            text = "the gateway failed; its log has the reason."
            return JSONResponse({"error": text}, 500)

    async def _infer(self, request: Request) -> Response:
        principal = principal_of(request, self._options, "infer")
        contract = self._router.contract(self._model(request))
        length = _header_length(request)
        body = await read_body(request, self._options)
        try:
            if len(body) < OFF_LOOP_BYTES:
                decoded = codec.decode(body, length, contract)
            else:
                decoded = await asyncio.to_thread(codec.decode, body, length, contract)
        except Fault:
            self._options.observer.decode_error("kserve", "content")
            raise
        call = call_of(request, "kserve", principal)
        asked = self._sequences.numbered(decoded.request)
        reply = await while_connected(request, lambda: self._router.infer(asked, call))
        self._sequences.answered(asked, decoded.ends)
        answer, head = codec.encode(reply, decoded)
        self._options.observer.transferred("out", len(answer))
        if head is None:
            return Response(answer, media_type="application/json")
        headers = {"Inference-Header-Content-Length": str(head)}
        return Response(answer, headers=headers, media_type="application/octet-stream")

    def _model(self, request: Request) -> str:
        check_version(request.path_params.get("version", ""))
        return str(request.path_params["model"])


def error_of(fault: Fault) -> Response:
    status = 429 if isinstance(fault, QueueFull) else STATUS[fault.status]
    response = Response(json.dumps({"error": fault.message}), status, media_type="application/json")
    if fault.retry_after is not None:
        response.headers["Retry-After"] = str(max(math.ceil(fault.retry_after), 1))
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _header_length(request: Request) -> int | None:
    text = request.headers.get(LENGTH_HEADER)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise Fault(
            "invalid_argument", "Inference-Header-Content-Length must be a number of bytes."
        )
    return int(text)


class KserveListener(HttpListener):
    """KServe v2 on a port of its own."""

    name: ClassVar[str] = "kserve"
    default_port: ClassVar[int] = 8081
    shares_port: ClassVar[bool] = True

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        super().__init__(router, options)
        self._routes = KserveRoutes(router, options)

    def routes(self) -> Sequence[BaseRoute]:
        return self._routes.routes()
