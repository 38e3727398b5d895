"""The gateway's connection to one model server: bytes through, faults as they are meant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from phyai_gateway import trace
from phyai_gateway.backends import NOT_SERVING, Backend
from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault, InferReply, InferRequest
from phyai_gateway.proto import contracts_v1_pb2 as contracts_pb
from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from phyai_gateway.proto.codec import decode_reply
from phyai_gateway.proto.contracts import contract_of
from phyai_gateway.proto.encoded import EncodedReply, EncodedRequest, payload_of
from phyai_gateway.proto.status import fault_of

T = TypeVar("T")

MAX_MESSAGE_BYTES = 104_857_600
CONNECT_TIMEOUT_S = 2.0
PROBE_TIMEOUT_S = 2.0

_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # one connection per backend, also to equal addresses
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also what a connection attempt may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class NativeBackend(Backend):
    """One model of one server at ``HOST:PORT``.

    credentials: gRPC channel credentials; None = plain text.  token: sent as Bearer.
    """

    keeps_time: ClassVar[bool] = True  # by gRPC's deadline

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.endpoint, self.model = endpoint.removeprefix("grpc://"), model
        self._credentials, self._limit = credentials, max_message_bytes
        self._metadata: tuple[tuple[str, str], ...] = ()
        if token:
            self._metadata = (("authorization", f"Bearer {token}"),)
        self._channel: Any = None
        self._methods: dict[str, Any] = {}
        self._plain_health = True  # until a server says that it lacks grpc.health.v1

    # ------------------------------------------------------------ the interface

    async def infer(self, request: InferRequest, timeout: float) -> InferReply:
        """Return the server's answer to the request.

        An encoded request is sent as it is and answered with an ``EncodedReply``, whose fields
        nobody read. Raises: Fault; data_loss when the reply is for another request.
        """
        deadline = time.monotonic() + timeout
        await self._connected(min(CONNECT_TIMEOUT_S, timeout))
        raw = await self._call(
            "/robot.inference.v1.ModelInference/Infer",
            payload_of(request),
            deadline - time.monotonic(),
        )
        encoded = isinstance(request, EncodedRequest)
        reply: InferReply = EncodedReply.scan(raw) if encoded else decode_reply(raw)
        if reply.request_id != request.request_id:
            raise Fault(
                "data_loss",
                "server must answer the request it was sent; got another request_id.",
                started=True,
            )
        return reply

    async def probe(self) -> None:
        """Ask grpc.health.v1, or ``CheckHealth`` of a server that lacks it; raises Fault."""
        await self._connected(PROBE_TIMEOUT_S)
        if self._plain_health:
            try:
                raw = await self._call(
                    "/grpc.health.v1.Health/Check",
                    health_pb2.HealthCheckRequest(service=self.model).SerializeToString(),
                    PROBE_TIMEOUT_S,
                )
            except Fault as fault:
                if fault.status != "unimplemented":
                    raise
                self._plain_health = False
            else:
                found = _parsed(health_pb2.HealthCheckResponse.FromString, raw)
                self._check(found.status == health_pb2.HealthCheckResponse.SERVING)
                return
        raw = await self._call(
            "/robot.inference.v1.ModelInference/CheckHealth",
            pb.HealthRequest(model_name=self.model).SerializeToString(),
            PROBE_TIMEOUT_S,
        )
        self._check(_parsed(pb.HealthResponse.FromString, raw).healthy)

    async def contract(self) -> ModelContract:
        """Return what the server publishes; of one that publishes nothing, only the name."""
        await self._connected(PROBE_TIMEOUT_S)
        try:
            raw = await self._call(
                "/phyai.serving.v1.ModelContracts/GetContract",
                contracts_pb.ContractRequest(model_name=self.model).SerializeToString(),
                PROBE_TIMEOUT_S,
            )
        except Fault as fault:
            if fault.status != "unimplemented":
                raise
            return ModelContract(self.model)
        return contract_of(_parsed(contracts_pb.ContractResponse.FromString, raw).contract_json)

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        self._methods.clear()
        if channel is not None:
            await channel.close()

    # ------------------------------------------------------------ parts

    def _check(self, serving: bool) -> None:
        if not serving:
            raise Fault(
                "unavailable",
                f"server must serve model {self.model!r}; it is not ready.",
                reason=NOT_SERVING,
            )

    def _open(self) -> Any:
        """Return the channel, made on first use: it belongs to the running loop."""
        if self._channel is None:
            options = (
                *_OPTIONS,
                ("grpc.max_receive_message_length", self._limit),
                ("grpc.max_send_message_length", self._limit),
            )
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.endpoint, options)
            else:
                self._channel = grpc.aio.secure_channel(self.endpoint, self._credentials, options)
        return self._channel

    async def _connected(self, timeout: float) -> None:
        """Wait for the connection, so that what fails here has certainly not started."""
        channel = self._open()
        ready = grpc.ChannelConnectivity.READY
        if channel.get_state(try_to_connect=True) == ready:
            return
        try:
            async with asyncio.timeout(max(timeout, 0.0)):
                while (state := channel.get_state(try_to_connect=True)) != ready:
                    if state == grpc.ChannelConnectivity.SHUTDOWN:
                        break
                    if state == grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        break
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            state = channel.get_state()
        if state != ready:
            raise Fault(
                "unavailable", "server must accept a connection; it does not. Is it running?"
            )

    async def _call(self, method: str, payload: bytes, timeout: float) -> bytes:
        if timeout <= 0:
            raise Fault("deadline_exceeded", "request's deadline passed before it was sent.")
        if (ask := self._methods.get(method)) is None:
            ask = self._methods[method] = self._open().unary_unary(method)
        try:
            metadata = self._metadata + trace.metadata()
            answer: bytes = await ask(payload, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise fault_of(error.code(), error.details(), error.trailing_metadata()) from None
        return answer


def _parsed(parse: Callable[[bytes], T], raw: bytes) -> T:
    try:
        return parse(raw)
    except Exception:
        raise Fault("data_loss", "server's answer must be a known message; it is not.") from None
