"""The HTTP port of a model server: alive, ready and why not, contracts, metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Call, Fault, InferReply, InferRequest
from phyai_gateway.metrics import CONTENT_TYPE, Metrics
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.protocols.http_body import principal_of
from phyai_gateway.protocols.http_server import HttpListener
from phyai_gateway.server.local import LocalRouter

HTTP_STATUS = {"unauthenticated": 401, "permission_denied": 403, "not_found": 404}


class OperationsListener(HttpListener):
    """Up before the model is loaded, so that "loading" and "dead" look different.

    state: returns why the server is not ready, None when it is.
    Health needs no token; contracts and metrics do where tokens are used.
    """

    def __init__(
        self, options: ListenerOptions, metrics: Metrics, state: Callable[[], str | None]
    ) -> None:
        self.local: LocalRouter | None = None
        self._metrics, self._state = metrics, state
        super().__init__(_NoModels(), options)

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/health", self._alive),
            Route("/healthz", self._alive_text),
            Route("/health/ready", self._ready),
            Route("/health/model/{model}", self._model_ready),
            Route("/v1/models", self._models),
            Route("/v1/models/{model}", self._model),
            Route("/metrics", self._text),
        ]

    async def _alive(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _alive_text(self, request: Request) -> Response:
        return PlainTextResponse("OK\n")

    async def _ready(self, request: Request) -> Response:
        reason = self._state()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reasons": [reason]}, 503)

    async def _model_ready(self, request: Request) -> Response:
        if self.local is not None and request.path_params["model"] not in self.local.models():
            asked, known = request.path_params["model"], self.local.models()[0]
            return _error(Fault("not_found", f"model must be {known!r}; got {asked!r:.80}."))
        return await self._ready(request)

    async def _models(self, request: Request) -> Response:
        try:
            principal_of(request, self.options, "infer")
        except Fault as fault:
            return _error(fault)
        names = () if self.local is None else self.local.models()
        return JSONResponse({"models": list(names)})

    async def _model(self, request: Request) -> Response:
        try:
            principal_of(request, self.options, "infer")
            if self.local is None:
                raise Fault("unavailable", "server is loading its model. Wait.", retry_after=1.0)
            contract = self.local.contract(request.path_params["model"])
        except Fault as fault:
            return _error(fault)
        return JSONResponse({**contract.to_json(), "fingerprint": contract.fingerprint})

    async def _text(self, request: Request) -> Response:
        try:
            principal_of(request, self.options, "infer")
        except Fault as fault:
            return _error(fault)
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)


class _NoModels:
    """The router of a port that takes no requests for models."""

    def models(self) -> tuple[str, ...]:
        return ()

    def contract(self, model: str) -> ModelContract:
        raise Fault("not_found", "this port serves no model.")

    async def infer(self, request: InferRequest, call: Call) -> InferReply:
        raise Fault("not_found", "this port serves no model.")


def _error(fault: Fault) -> Response:
    body = {"error": {"code": fault.status, "message": fault.message}}
    return JSONResponse(body, HTTP_STATUS.get(fault.status, 503))
