"""The route of RLinf's clients, and a listener of its own for it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from typing import ClassVar, cast, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from phyai_gateway.faults import GatewayBug, QueueFull
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
from phyai_gateway.protocols.rlinf import decode as codec

log = logging.getLogger(__name__)
PATH = "/v1/actions/generations"
MEDIA_TYPE = "application/msgpack"
STATUS = {
    "invalid_argument": (422, "backend_rejected_request"),
    "unauthenticated": (401, "unauthenticated"),
    "permission_denied": (403, "permission_denied"),
    "not_found": (404, "model_not_found"),
    "failed_precondition": (409, "failed_precondition"),
    "unimplemented": (501, "unimplemented"),
    "resource_exhausted": (503, "backend_unavailable"),
    "unavailable": (503, "backend_unavailable"),
    "cancelled": (503, "backend_unavailable"),
    "deadline_exceeded": (504, "backend_timeout"),
    "data_loss": (502, "invalid_backend_response"),
    "internal": (502, "backend_error"),
}
OFF_LOOP_BYTES = 1 << 20  # bodies from this size are read beside the event loop


class RlinfRoutes:
    """Serves RLinf's path for a router. Option ``rlinf_envelope``: batched or per_env."""

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        unknown = set(options.options) - {"rlinf_envelope"}
        form = options.options.get("rlinf_envelope", "batched")
        if unknown or form not in get_args(codec.Envelope):
            raise Fault(
                "invalid_argument",
                "rlinf takes the option rlinf_envelope=batched or per_env; got "
                f"{', '.join(sorted(unknown)) or form}.",
            )
        self._router, self._options = router, options
        self._form = cast(codec.Envelope, form)

    def routes(self) -> list[BaseRoute]:
        return [Route(PATH, self.answer, methods=["POST"])]

    async def answer(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except Fault as fault:
            return error_of(fault)
        except Exception:
            log.exception("rlinf request failed")
            return error(500, "internal_error", "the gateway failed; its log has the reason.")

    async def _answer(self, request: Request) -> Response:
        principal = principal_of(request, self._options, "infer")
        if request.headers.get("content-type", "").partition(";")[0].strip() != MEDIA_TYPE:
            return error(415, "unsupported_media_type", f"Content-Type must be {MEDIA_TYPE}.")
        try:
            body = await read_body(request, self._options)
        except TooLarge as large:
            self._options.observer.decode_error("rlinf", "too_large")
            return error(413, "payload_too_large", str(large))
        except BadLength as bad:
            return error(400, "invalid_content_length", str(bad))
        try:
            value = await self._unpack(body)
        except Fault as fault:
            self._options.observer.decode_error("rlinf", "wire")
            return error(400, "invalid_msgpack", fault.message)
        del body  # its arrays were copied out of it: one copy is enough to wait with
        try:
            decoded = self._decode(value)
        except Fault as fault:
            if fault.status != "invalid_argument":
                raise
            self._options.observer.decode_error("rlinf", "content")
            return error(422, "invalid_payload", fault.message)
        del value
        call = call_of(request, "rlinf", principal)
        reply = await while_connected(request, lambda: self._router.infer(decoded.request, call))
        try:
            answer = codec.encode(reply, decoded, self._form)
        except (ValueError, Fault) as wrong:
            text = wrong.message if isinstance(wrong, Fault) else str(wrong)
            return error(502, "invalid_backend_response", text)
        self._options.observer.transferred("out", len(answer))
        return Response(answer, media_type=MEDIA_TYPE)

    async def _unpack(self, body: bytes) -> object:
        limit = self._options.limits.max_message_bytes
        if len(body) < OFF_LOOP_BYTES:
            return codec.unpack_body(body, limit)
        return await asyncio.to_thread(codec.unpack_body, body, limit)

    def _decode(self, value: object) -> codec.Decoded:
        models = self._router.models()
        only = models[0] if len(models) == 1 else None
        decoded = codec.decode(value, self._options.default_model, only)
        codec.check(decoded.request, self._router.contract(decoded.request.model))
        return decoded


def error_of(fault: Fault) -> Response:
    """Return the HTTP form of a fault, with Retry-After where another try makes sense."""
    status, code = STATUS[fault.status]
    if isinstance(fault, QueueFull):
        status, code = 429, "overloaded"
    elif isinstance(fault, GatewayBug):
        status, code = 500, "internal_error"
    response = error(status, code, fault.message)
    if fault.retry_after is not None:
        response.headers["Retry-After"] = str(max(math.ceil(fault.retry_after), 1))
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def error(status: int, code: str, message: str) -> Response:
    """Return ``{"error": {"code", "message"}}``."""
    body = json.dumps({"error": {"code": code, "message": message}})
    return Response(body, status, media_type="application/json")


class RlinfListener(HttpListener):
    """RLinf's path on a port of its own, with ``/healthz``."""

    name: ClassVar[str] = "rlinf"
    default_port: ClassVar[int] = 30001
    shares_port: ClassVar[bool] = True

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        super().__init__(router, options)
        self._routes = RlinfRoutes(router, options)

    def routes(self) -> Sequence[BaseRoute]:
        return [*self._routes.routes(), Route("/healthz", _healthz)]


async def _healthz(request: Request) -> Response:
    return Response("OK\n", media_type="text/plain")
