"""The native gRPC listener: ``robot.inference.v1``, grpc.health.v1, contracts and the registry.

Requests stay as the bytes they came in: of one, only request id and model name are read here.
Metadata: ``authorization`` (Bearer TOKEN), ``x-robot-id`` (key of the latest-wins mailbox),
``x-session-id`` (session of a stateful model, where the message does not say it), ``traceparent``
(sent on to the backend).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from phyai_gateway.messages import Fault
from phyai_gateway.proto import contracts_v1_pb2 as contracts_pb
from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from phyai_gateway.proto.encoded import EncodedRequest, reply_payload
from phyai_gateway.proto.status import details_of
from phyai_gateway.protocols.base import ListenerOptions, Router
from phyai_gateway.protocols.grpc_listener import Context, GrpcListener, Services

INFERENCE = "robot.inference.v1.ModelInference"
REGISTRY = "robot.inference.v1.ModelRegistry"
CONTRACTS = "phyai.serving.v1.ModelContracts"


@dataclass(frozen=True, slots=True)
class Registration:
    """interval_s: seconds between heartbeats."""

    server_id: str
    interval_s: int


@runtime_checkable
class Registry(Protocol):
    """What a router also has when model servers may announce themselves to it."""

    async def register(self, endpoint: str, model: str) -> Registration:
        """Take a server in; raises Fault."""

    async def heartbeat(self, server_id: str) -> bool:
        """Return whether the server is still listed; if not, it registers again."""


class NativeListener(GrpcListener):
    """Serves a router over gRPC, a gateway's or a model server's."""

    name: ClassVar[str] = "native"
    default_port: ClassVar[int] = 50063
    shares_port: ClassVar[bool] = True

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        if options.options:
            raise Fault(
                "invalid_argument",
                "protocol native must have no options of its own; got "
                f"{', '.join(sorted(options.options))}. Leave them out.",
            )
        super().__init__(router, options)

    def services(self) -> Services:
        found: dict[str, dict[str, Any]] = {
            INFERENCE: {
                "Infer": self.unary(self._infer),  # raw bytes both ways
                "CheckHealth": self.small(pb.HealthRequest, self._check_health),
            },
            CONTRACTS: {
                "GetContract": self.small(contracts_pb.ContractRequest, self._contract, "infer")
            },
        }
        if isinstance(self.router, Registry):
            found[REGISTRY] = {
                "Register": self.small(pb.RegisterRequest, self._register, "admin"),
                "Heartbeat": self.small(pb.HeartbeatRequest, self._heartbeat, "admin"),
            }
        return found

    # ------------------------------------------------------------ calls

    async def _infer(self, context: Context) -> bytes:
        headers = self.headers(context)
        principal = self.principal(headers)
        payload = await self.receive(context)
        with self.counted(len(payload)):
            request = self._request(payload, headers)
            call = self.call_of(context, headers, principal)
            reply = await self.router.infer(request, call)
            if reply.request_id != request.request_id:
                raise Fault(
                    "data_loss",
                    "reply must answer the request it is for; got another request_id.",
                    started=True,
                )
            answer = reply_payload(reply)
        self.options.observer.transferred("out", len(answer))
        return answer

    def _request(self, payload: bytes, headers: dict[str, str]) -> EncodedRequest:
        session = headers.get("x-session-id")
        options = {"session_id": session} if session else {}
        try:
            request = EncodedRequest.scan(payload, self.options.default_model or "", options)
        except Fault:
            self.options.observer.decode_error(self.name, "malformed")
            raise
        if not request.request_id.strip():
            raise Fault(
                "invalid_argument", "request_id must be given; got none. Send a new one each time."
            )
        if not request.model:
            raise Fault(
                "invalid_argument",
                "model_name must be given; got none. Send one of "
                f"{', '.join(self.router.models()) or 'none, as no model is served yet'}.",
            )
        if not session and self.router.contract(request.model).stateful:
            request = request.with_fields()  # the session id is inside
        return request

    def _check_health(self, request: Any) -> Any:
        return pb.HealthResponse(healthy=self.health.serving(request.model_name))

    def _contract(self, request: Any) -> Any:
        model = request.model_name or self.options.default_model or ""
        found = self.router.contract(model).to_json()
        return contracts_pb.ContractResponse(contract_json=json.dumps(found))

    async def _register(self, request: Any) -> Any:
        assert isinstance(self.router, Registry)
        try:
            found = await self.router.register(request.endpoint, request.model_name)
        except Fault as fault:
            return pb.RegisterResponse(accepted=False, message=details_of(fault))
        return pb.RegisterResponse(
            accepted=True,
            server_id=found.server_id,
            heartbeat_interval_seconds=found.interval_s,
        )

    async def _heartbeat(self, request: Any) -> Any:
        assert isinstance(self.router, Registry)
        listed = await self.router.heartbeat(request.server_id)
        text = "" if listed else "server_id must be a listed one. Register again."
        return pb.HeartbeatResponse(registered=listed, message=text)
