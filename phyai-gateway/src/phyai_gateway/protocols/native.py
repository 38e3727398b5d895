"""The native gRPC listener: ``robot.inference.v1``, grpc.health.v1, contracts and the registry.

Requests stay as the bytes they came in: of one, only request id and model name are read here.
Metadata: ``authorization`` (Bearer TOKEN), ``x-robot-id`` (key of the latest-wins mailbox),
``x-session-id`` (session of a stateful model, where the message does not say it).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import grpc

from phyai_gateway.messages import Call, Fault
from phyai_gateway.proto import contracts_v1_pb2 as contracts_pb
from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from phyai_gateway.proto.encoded import EncodedRequest, reply_payload
from phyai_gateway.proto.status import CODES, details_of, metadata_of
from phyai_gateway.protocols.base import ListenerOptions, Router
from phyai_gateway.protocols.native_health import Health
from phyai_gateway.tokens import Scope

log = logging.getLogger("phyai.gateway")

INFERENCE = "robot.inference.v1.ModelInference"
REGISTRY = "robot.inference.v1.ModelRegistry"
CONTRACTS = "phyai.serving.v1.ModelContracts"
MAX_METADATA_BYTES = 16 * 1024
MAX_STREAMS = 1024  # of one connection: a gateway sends all its robots over one
BUDGET_MESSAGES = 16  # of the largest size, in flight at once
BUSY_RETRY_S = 0.1
FLUSH_S = 2.0
QUIET_S, MOST_QUIET_S = 0.2, 1.0


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


class NativeListener:
    """Serves a router over gRPC, a gateway's or a model server's."""

    name: ClassVar[str] = "native"
    default_port: ClassVar[int] = 50063
    takes_tokens: ClassVar[bool] = True
    takes_tls: ClassVar[bool] = True

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        if options.options:
            raise Fault(
                "invalid_argument",
                "protocol native must have no options of its own; got "
                f"{', '.join(sorted(options.options))}. Leave them out.",
            )
        self._router, self._options = router, options
        self._health = Health(router)
        self._server: Any = None
        self._in_flight = 0
        self._bytes = 0
        self._refused = -1e9  # when a request was last refused because of a drain
        self._empty = asyncio.Event()
        self._empty.set()

    # ------------------------------------------------------------ life cycle

    async def start(self) -> int:
        options, limit = self._options, self._options.limits.max_message_bytes
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ]
        )
        server.add_generic_rpc_handlers(self._handlers())
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"{host}:{options.port}"
        try:
            if options.tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, options.tls.grpc_credentials())
        except RuntimeError as error:
            raise OSError(f"address {address} cannot be bound") from error
        if not port:
            raise OSError(f"address {address} cannot be bound")
        await server.start()
        self._server = server
        return int(port)

    async def drain(self) -> None:
        """Say NOT_SERVING, refuse new requests, return when those accepted are answered."""
        self._health.draining = True
        self._refused = time.monotonic()
        await self._empty.wait()

    async def stop(self) -> None:
        drained = self._health.draining and self._empty.is_set()
        self._health.draining = self._health.closing = True
        server, self._server = self._server, None
        if server is None:
            return
        if drained:
            await self._quiet()
        # The last answers may still be on their way.
        await server.stop(FLUSH_S if drained else None)

    async def _quiet(self) -> None:
        """Go on refusing until nobody asks: gRPC resets what reaches a server that shuts down."""
        until = time.monotonic() + MOST_QUIET_S
        while (now := time.monotonic()) < min(self._refused + QUIET_S, until):
            await asyncio.sleep(min(self._refused + QUIET_S, until) - now)

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        unary = grpc.unary_unary_rpc_method_handler
        inference = {
            # Raw bytes both ways, and read here rather than by gRPC, so that a client that sends
            # a message for ever is dropped in time.
            "Infer": grpc.stream_unary_rpc_method_handler(self._guarded(self._infer)),
            "CheckHealth": unary(
                self._check_health,
                pb.HealthRequest.FromString,
                pb.HealthResponse.SerializeToString,
            ),
        }
        contracts = {
            "GetContract": unary(
                self._guarded(self._contract),
                contracts_pb.ContractRequest.FromString,
                contracts_pb.ContractResponse.SerializeToString,
            )
        }
        found = [
            grpc.method_handlers_generic_handler(INFERENCE, inference),
            grpc.method_handlers_generic_handler(CONTRACTS, contracts),
            self._health.handler(),
        ]
        if isinstance(self._router, Registry):
            found.append(grpc.method_handlers_generic_handler(REGISTRY, self._registry()))
        return tuple(found)

    def _registry(self) -> dict[str, Any]:
        unary = grpc.unary_unary_rpc_method_handler
        return {
            "Register": unary(
                self._guarded(self._register),
                pb.RegisterRequest.FromString,
                pb.RegisterResponse.SerializeToString,
            ),
            "Heartbeat": unary(
                self._guarded(self._heartbeat),
                pb.HeartbeatRequest.FromString,
                pb.HeartbeatResponse.SerializeToString,
            ),
        }

    # ------------------------------------------------------------ calls

    async def _infer(self, _: Any, context: Any) -> bytes:
        headers = _headers(context)
        principal = self._principal(headers, "infer")
        payload = await self._receive(context)
        with _Counted(self, len(payload)):
            request = self._request(payload, headers)
            call = Call(
                self.name,
                deadline=_deadline(context),
                robot=headers.get("x-robot-id") or None,
                principal=principal,
                peer=context.peer(),
            )
            reply = await self._router.infer(request, call)
            if reply.request_id != request.request_id:
                raise Fault(
                    "data_loss",
                    "reply must answer the request it is for; got another request_id.",
                    started=True,
                )
            answer = reply_payload(reply)
        self._options.observer.transferred("out", len(answer))
        return answer

    def _request(self, payload: bytes, headers: dict[str, str]) -> EncodedRequest:
        session = headers.get("x-session-id")
        options = {"session_id": session} if session else {}
        try:
            request = EncodedRequest.scan(payload, self._options.default_model or "", options)
        except Fault:
            self._options.observer.decode_error(self.name, "malformed")
            raise
        if not request.request_id.strip():
            raise Fault(
                "invalid_argument", "request_id must be given; got none. Send a new one each time."
            )
        if not request.model:
            raise Fault(
                "invalid_argument",
                "model_name must be given; got none. Send one of "
                f"{', '.join(self._router.models()) or 'none, as no model is served yet'}.",
            )
        if not session and self._router.contract(request.model).stateful:
            request = request.with_fields()  # the session id is inside
        return request

    async def _receive(self, context: Any) -> bytes:
        """Return the one message of a call.

        Raises: Fault when draining, when it does not arrive in time, and over the byte budget.
        """
        self._check_open()
        limits = self._options.limits
        try:
            async with asyncio.timeout(limits.receive_timeout_s):
                payload = await context.read()
        except TimeoutError:
            raise Fault(
                "deadline_exceeded",
                f"request must arrive within {limits.receive_timeout_s:g} s; it did not.",
            ) from None
        if payload is grpc.aio.EOF:
            raise Fault("invalid_argument", "call must send one message; got none.")
        self._check_open()
        if self._bytes + len(payload) > BUDGET_MESSAGES * limits.max_message_bytes:
            raise Fault(
                "resource_exhausted",
                "requests in flight must fit the server's byte budget; they do not. Try later.",
                retry_after=BUSY_RETRY_S,
            )
        self._options.observer.transferred("in", len(payload))
        found: bytes = payload
        return found

    def _check_open(self) -> None:
        if self._health.draining:
            self._refused = time.monotonic()
            raise Fault("unavailable", "server is stopping. Ask another one.", retry_after=1.0)

    async def _check_health(self, request: Any, context: Any) -> Any:
        return pb.HealthResponse(healthy=self._health.serving(request.model_name))

    async def _contract(self, request: Any, context: Any) -> Any:
        self._principal(_headers(context), "infer")
        model = request.model_name or self._options.default_model or ""
        found = self._router.contract(model).to_json()
        return contracts_pb.ContractResponse(contract_json=json.dumps(found))

    async def _register(self, request: Any, context: Any) -> Any:
        self._principal(_headers(context), "admin")
        assert isinstance(self._router, Registry)
        try:
            found = await self._router.register(request.endpoint, request.model_name)
        except Fault as fault:
            return pb.RegisterResponse(accepted=False, message=details_of(fault))
        return pb.RegisterResponse(
            accepted=True,
            server_id=found.server_id,
            heartbeat_interval_seconds=found.interval_s,
        )

    async def _heartbeat(self, request: Any, context: Any) -> Any:
        self._principal(_headers(context), "admin")
        assert isinstance(self._router, Registry)
        listed = await self._router.heartbeat(request.server_id)
        text = "" if listed else "server_id must be a listed one. Register again."
        return pb.HeartbeatResponse(registered=listed, message=text)

    # ------------------------------------------------------------ around every call

    def _principal(self, headers: dict[str, str], scope: Scope) -> str | None:
        tokens = self._options.tokens
        return None if tokens is None else tokens.check_header(headers.get("authorization"), scope)

    def _guarded(
        self, call: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def guarded(request: Any, context: Any) -> Any:
            try:
                return await call(request, context)
            except Fault as error:
                fault = error
            except Exception:
                log.exception("a call of the native listener failed")
                fault = Fault("internal", "server failed; its log says why.", started=True)
            return await context.abort(CODES[fault.status], details_of(fault), metadata_of(fault))

        return guarded


class _Counted:
    """One accepted request and its bytes, until it is answered."""

    def __init__(self, listener: NativeListener, nbytes: int) -> None:
        self._listener, self._nbytes = listener, nbytes

    def __enter__(self) -> None:
        self._listener._in_flight += 1
        self._listener._bytes += self._nbytes
        self._listener._empty.clear()

    def __exit__(self, *exc: object) -> None:
        self._listener._in_flight -= 1
        self._listener._bytes -= self._nbytes
        if not self._listener._in_flight:
            self._listener._empty.set()


def _headers(context: Any) -> dict[str, str]:
    """Return the text metadata of a call; of a repeated key the last one counts."""
    return {
        key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)
    }


def _deadline(context: Any) -> float | None:
    left = context.time_remaining()
    return None if left is None else time.monotonic() + left
