"""The gateway's HTTP port: status page, backends, health, metrics, RLinf and KServe."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from html import escape
from importlib.resources import files
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from phyai_gateway import metrics
from phyai_gateway.gateway import Gateway
from phyai_gateway.listeners import is_loopback
from phyai_gateway.messages import Fault
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.protocols.http_body import BadLength, TooLarge, principal_of, read_body
from phyai_gateway.protocols.http_server import HttpListener
from phyai_gateway.protocols.kserve.listener import KserveRoutes
from phyai_gateway.protocols.rlinf.listener import RlinfRoutes, error, error_of

log = logging.getLogger(__name__)
MAX_ADMIN_BYTES = 64 * 1024
MAX_STREAMS = 32
EVENT_PERIOD_S = 1.0
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
}

NO_FIGURES = '<meta name="first-figures" content="">'
"""In the page, where its first figures go."""

Handler = Callable[[Request], Awaitable[Response]]


class HttpApi(HttpListener):
    """All of the gateway's HTTP. admin: whether management is served here too."""

    name: ClassVar[str] = "http"
    default_port: ClassVar[int] = 30000

    def __init__(
        self, gateway: Gateway, options: ListenerOptions, *, admin: bool = True, infer: bool = True
    ) -> None:
        super().__init__(gateway.router, options)
        self.gateway, self._admin, self._infer = gateway, admin, infer
        self._streams = 0
        # The address alone protects a port without tokens: then its name must be a local one, or
        # a web page could reach it through a name of its own that points here.
        self._local_only = options.tokens is None and is_loopback(options.host)
        plain = ListenerOptions(
            tokens=options.tokens,
            limits=options.limits,
            default_model=options.default_model,
            observer=options.observer,
            options=options.options,
        )
        self._rlinf = RlinfRoutes(gateway.router, plain)
        self._kserve = KserveRoutes(
            gateway.router,
            ListenerOptions(
                tokens=options.tokens, limits=options.limits, observer=options.observer
            ),
        )

    def routes(self) -> Sequence[BaseRoute]:
        found: list[BaseRoute] = [
            Route("/health", self._health),
            Route("/health/ready", self._ready),
            Route("/health/model/{model:path}", self._model_ready),
            Route("/healthz", self._healthz),
            Route("/metrics", self._guard(self._metrics, "infer")),
            Route("/v1/models", self._guard(self._models, "infer")),
            Route("/v1/models/{model:path}", self._guard(self._model, "infer")),
        ]
        if self._infer:
            found += [*self._rlinf.routes(), *self._kserve.routes()]
        if self._admin:
            found += [Route(path, self._page) for path in PAGE_FILES]
            one = "/v1/backends/{server_id}"
            found += [
                Route("/v1/events", self._guard(self._events, "admin")),
                Route("/v1/backends", self._guard(self._list, "admin")),
                Route("/v1/backends", self._guard(self._register, "admin"), methods=["POST"]),
                Route(one, self._guard(self._remove, "admin"), methods=["DELETE"]),
                Route(one, self._guard(self._patch, "admin"), methods=["PATCH"]),
            ]
        return found

    async def drain(self) -> None:
        self.draining = True
        await super().drain()

    # ------------------------------------------------------------ health

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _healthz(self, request: Request) -> Response:
        return Response("OK\n", media_type="text/plain")

    async def _ready(self, request: Request) -> Response:
        reasons = self.gateway.not_ready()
        body = {"status": "not ready" if reasons else "ready", "reasons": reasons}
        return JSONResponse(body, 503 if reasons else 200)

    async def _model_ready(self, request: Request) -> Response:
        model = request.path_params["model"]
        if model not in self.router.models():
            return error(404, "model_not_found", f"no backend of model {model!r:.80} is known.")
        ready = self.gateway.router.ready(model)
        return JSONResponse({"model": model, "ready": ready}, 200 if ready else 503)

    # ------------------------------------------------------------ what runs

    async def _metrics(self, request: Request) -> Response:
        text = self.gateway.metrics.text()
        return Response(text, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _models(self, request: Request) -> Response:
        rows = []
        for model in self.router.models():
            try:
                contract = self.router.contract(model).to_json()
            except Fault:
                contract = None
            ready = self.gateway.router.ready(model)
            rows.append({"model_name": model, "ready": ready, "contract": contract})
        return JSONResponse({"models": rows})

    async def _model(self, request: Request) -> Response:
        """Answer with the contract, as a model server does at this path."""
        contract = self.router.contract(request.path_params["model"])
        return JSONResponse({**contract.to_json(), "fingerprint": contract.fingerprint})

    async def _list(self, request: Request) -> Response:
        return JSONResponse(self.gateway.snapshot())

    async def _events(self, request: Request) -> Response:
        if self._streams >= MAX_STREAMS:
            return error(503, "overloaded", f"at most {MAX_STREAMS} watch at once. Close one.")
        self._streams += 1
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return _Stream(self._stream(), self._closed, headers)

    async def _stream(self) -> AsyncIterator[str]:
        while not (self.draining or self.gateway.draining):
            yield f"event: status\ndata: {json.dumps(self.gateway.snapshot())}\n\n"
            ends = asyncio.get_running_loop().time() + EVENT_PERIOD_S
            while not self.draining and (left := ends - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(min(left, 0.1))
        yield f"event: status\ndata: {json.dumps(self.gateway.snapshot())}\n\n"

    def _closed(self) -> None:
        self._streams -= 1

    # ------------------------------------------------------------ management

    async def _register(self, request: Request) -> Response:
        self.gateway.check_alone()
        body = await self._json(request, {"model_name", "endpoint", "weight"})
        member = self.gateway.add(
            body.get("model_name", ""), body.get("endpoint", ""), weight=body.get("weight", 1.0)
        )
        await self.gateway.persist()
        return JSONResponse(member.snapshot(), 202)

    async def _remove(self, request: Request) -> Response:
        self.gateway.check_alone()
        member = self.gateway.remove(request.path_params["server_id"])
        await self.gateway.persist()
        return JSONResponse(member.snapshot(), 202)

    async def _patch(self, request: Request) -> Response:
        self.gateway.check_alone()
        body = await self._json(request, {"state", "weight"})
        member = self.gateway.patch(
            request.path_params["server_id"], state=body.get("state"), weight=body.get("weight")
        )
        await self.gateway.persist()
        return JSONResponse(member.snapshot())

    async def _json(self, request: Request, keys: set[str]) -> dict[str, Any]:
        # Also what keeps web pages out: a browser asks first before it sends this type elsewhere.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise _Refused(error(415, "unsupported_media_type", "send application/json."))
        try:
            found = json.loads(await read_body(request, self.options, MAX_ADMIN_BYTES))
        except (ValueError, RecursionError):
            raise _Refused(error(400, "invalid_json", "body must be a JSON object.")) from None
        if not isinstance(found, dict) or set(found) - keys:
            allowed = ", ".join(sorted(keys))
            raise _Refused(error(422, "invalid_payload", f"body must be a map of {allowed}."))
        return found

    # ------------------------------------------------------------ around

    async def _page(self, request: Request) -> Response:
        name, media_type = PAGE_FILES[request.url.path]
        data = (files("phyai_gateway") / "status_page" / name).read_text("utf-8")
        headers = {**PAGE_HEADERS, "Content-Type": media_type}
        if name == "index.html" and (first := self._first_figures(request)) is not None:
            data = data.replace(NO_FIGURES, f'{NO_FIGURES[:-2]}{first}">', 1)
            headers["Cache-Control"] = "no-store"
        return Response(data, headers=headers)

    def _first_figures(self, request: Request) -> str | None:
        """Return the snapshot as text for an attribute; None for who may not ask for it.

        A page that has it shows something at once: a stream takes a moment. A browser that asks
        for a page sends no token, so with tokens nobody gets it here.
        """
        if self.options.tokens is not None:
            return None
        try:
            self._check_origin(request, "admin")
        except _Refused:
            return None
        text = json.dumps(self.gateway.snapshot())
        for sign in "<>&'":  # inside JSON they occur in texts only; quotes are left to escape()
            text = text.replace(sign, f"\\u{ord(sign):04x}")
        return escape(text)

    def _guard(self, handler: Handler, scope: Any) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                self._check_origin(request, scope)
                if scope == "infer" and self.options.tokens is not None:
                    self._any_token(request)
                else:
                    principal_of(request, self.options, scope)
                return await handler(request)
            except _Refused as refused:
                return refused.response
            except TooLarge as large:
                return error(413, "payload_too_large", str(large))
            except BadLength as bad:
                return error(400, "invalid_content_length", str(bad))
            except Fault as fault:
                response = error_of(fault)
                if fault.status == "not_found":
                    return error(404, "not_found", fault.message)
                if fault.status == "invalid_argument":
                    return error(422, "invalid_payload", fault.message)
                return response
            except Exception:
                log.exception("%s %s failed", request.method, request.url.path)
                return error(500, "internal_error", "the gateway failed; its log has the reason.")

        return guarded

    def _any_token(self, request: Request) -> None:
        try:
            principal_of(request, self.options, "infer")
        except Fault as fault:
            if fault.status != "permission_denied":
                raise
            principal_of(request, self.options, "admin")

    def _check_origin(self, request: Request, scope: str) -> None:
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise _Refused(error(403, "cross_origin", "pages of other sites may not ask here."))
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self._local_only and scope == "admin" and name.lower() not in LOCAL_NAMES:
            raise _Refused(
                error(403, "unknown_host", "ask by localhost or 127.0.0.1, or use tokens.")
            )


class _Refused(Exception):
    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


class _Stream(StreamingResponse):
    """A stream of events that says when it ends, however it ends."""

    def __init__(
        self, content: AsyncIterator[str], closed: Callable[[], None], headers: dict[str, str]
    ) -> None:
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self._closed = closed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._closed()
