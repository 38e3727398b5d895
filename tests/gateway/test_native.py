"""The native listener around a router, over live sockets, and the gateway's side of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import (
    Call,
    Fault,
    InferReply,
    InferRequest,
    TensorData,
)
from phyai_gateway.native_client import NativeBackend
from phyai_gateway.proto import codec
from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from phyai_gateway.proto.encoded import EncodedReply, EncodedRequest, decoded
from phyai_gateway.protocols.base import Limits, ListenerOptions
from phyai_gateway.protocols.native import NativeListener, Registration
from phyai_gateway.tokens import TokenStore
from tests.gateway.serving import LIMIT_S, run


class StubRouter:
    """Answers with the request's own id; words of the prompt choose what goes wrong."""

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []
        self.calls: list[Call] = []
        self.cancelled = asyncio.Event()
        self.registered: list[tuple[str, str]] = []
        self.up = True
        self.stateful = False

    def models(self) -> tuple[str, ...]:
        return ("m",)

    def ready(self, model: str) -> bool:
        return self.up

    def contract(self, model: str) -> ModelContract:
        if model != "m":
            raise Fault("not_found", "model must be 'm'.")
        return ModelContract("m", stateful=self.stateful)

    async def infer(self, request: InferRequest, call: Call) -> InferReply:
        self.requests.append(request)
        self.calls.append(call)
        what = decoded(request).instruction
        if what == "wait":
            try:
                await asyncio.sleep(LIMIT_S)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if what == "busy":
            raise Fault("resource_exhausted", "full.", retry_after=0.5)
        if what == "crash":
            raise RuntimeError("/secret/path")
        if what == "wrong id":
            return InferReply("another")
        return InferReply(request.request_id, TensorData(bytes(8), (1, 2), "float32"))

    async def register(self, endpoint: str, model: str) -> Registration:
        if model != "m":
            raise Fault("not_found", "model must be 'm'.")
        self.registered.append((endpoint, model))
        return Registration("s1", 5)

    async def heartbeat(self, server_id: str) -> bool:
        return server_id == "s1"


@asynccontextmanager
async def listening(router: Any, **options: Any) -> AsyncIterator[tuple[NativeListener, str]]:
    listener = NativeListener(router, ListenerOptions(**options))
    port = await listener.start()
    try:
        yield listener, f"127.0.0.1:{port}"
    finally:
        await listener.stop()
        await listener.stop()


def request(prompt: str = "go", model: str = "m", name: str = "r") -> InferRequest:
    return InferRequest(name, model, instruction=prompt)


async def failing(backend: NativeBackend, what: InferRequest, timeout: float = 20) -> Fault:
    with pytest.raises(Fault) as caught:
        await backend.infer(what, timeout)
    return caught.value


def test_bytes_pass_through_unread() -> None:
    async def test() -> None:
        router = StubRouter()
        async with listening(router) as (_, where):
            backend = NativeBackend(where, "m")
            payload = codec.encode_request(request()) + b"\xfa\x3f\x03new"  # a field of tomorrow
            reply = await backend.infer(EncodedRequest.scan(payload, ""), 20)
            assert isinstance(reply, EncodedReply)
            seen = router.requests[0]
            assert isinstance(seen, EncodedRequest)
            assert seen.payload == payload
            assert codec.decode_reply(reply.payload).actions is not None
            plain = await backend.infer(request(), 20)
            assert plain.actions == TensorData(bytes(8), (1, 2), "float32")
            await backend.close()

    run(test)


def test_faults_reach_the_gateway_as_they_are_meant() -> None:
    async def test() -> None:
        router = StubRouter()
        async with listening(router) as (listener, where):
            backend = NativeBackend(where, "m")
            busy = await failing(backend, request("busy"))
            assert (busy.status, busy.retry_after, busy.started) == (
                "resource_exhausted",
                0.5,
                False,
            )
            crash = await failing(backend, request("crash"))
            assert (crash.status, crash.started) == ("internal", True)
            assert "secret" not in crash.message
            assert (await failing(backend, request("wrong id"))).status == "data_loss"
            assert (await failing(backend, request(model="x"))).status == "not_found"
            assert (await failing(backend, request(name=" "))).status == "invalid_argument"
            late = await failing(backend, request("wait"), 0.2)
            assert (late.status, late.started) == ("deadline_exceeded", True)
            await asyncio.wait_for(router.cancelled.wait(), LIMIT_S)
            assert router.calls[-1].deadline is not None
            await listener.stop()
            gone = await failing(backend, request(), 5)
            assert (gone.status, gone.started) == ("unavailable", False)
            await backend.close()

    run(test)


def test_cancelling_reaches_the_router() -> None:
    async def test() -> None:
        router = StubRouter()
        async with listening(router) as (_, where):
            backend = NativeBackend(where, "m")
            task = asyncio.create_task(backend.infer(request("wait"), 20))
            while not router.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait_for(router.cancelled.wait(), LIMIT_S)
            await backend.close()

    run(test)


def test_health_contract_and_registry() -> None:
    async def test() -> None:
        router = StubRouter()
        async with listening(router) as (listener, where):
            backend = NativeBackend(where, "m")
            await backend.probe()
            assert (await backend.contract()).name == "m"
            async with grpc.aio.insecure_channel(where) as channel:
                check = channel.unary_unary(
                    "/grpc.health.v1.Health/Check",
                    health_pb2.HealthCheckRequest.SerializeToString,
                    health_pb2.HealthCheckResponse.FromString,
                )
                assert (await check(health_pb2.HealthCheckRequest())).status == 1
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await check(health_pb2.HealthCheckRequest(service="x"))
                assert caught.value.code() == grpc.StatusCode.NOT_FOUND
                watch = channel.unary_stream(
                    "/grpc.health.v1.Health/Watch",
                    health_pb2.HealthCheckRequest.SerializeToString,
                    health_pb2.HealthCheckResponse.FromString,
                )(health_pb2.HealthCheckRequest(service="m"))
                assert (await watch.read()).status == 1
                router.up = False
                assert (await watch.read()).status == 2
                with pytest.raises(Fault) as fault:
                    await backend.probe()
                assert fault.value.status == "unavailable"
                backend._plain_health = False  # as with a server that has only CheckHealth
                with pytest.raises(Fault):
                    await backend.probe()
                router.up = True
                await backend.probe()
                register = channel.unary_unary(
                    "/robot.inference.v1.ModelRegistry/Register",
                    pb.RegisterRequest.SerializeToString,
                    pb.RegisterResponse.FromString,
                )
                found = await register(pb.RegisterRequest(endpoint="h:1", model_name="m"))
                assert (found.accepted, found.server_id) == (True, "s1")
                assert found.heartbeat_interval_seconds == 5
                refused = await register(pb.RegisterRequest(endpoint="h:1", model_name="x"))
                assert not refused.accepted
                beat = channel.unary_unary(
                    "/robot.inference.v1.ModelRegistry/Heartbeat",
                    pb.HeartbeatRequest.SerializeToString,
                    pb.HeartbeatResponse.FromString,
                )
                assert (await beat(pb.HeartbeatRequest(server_id="s1"))).registered
                assert not (await beat(pb.HeartbeatRequest(server_id="s2"))).registered
                await listener.drain()
                assert (await check(health_pb2.HealthCheckRequest())).status == 2
            await backend.close()

    run(test)


def test_tokens_and_scopes() -> None:
    async def test() -> None:
        store = TokenStore.of({"arm": ("arm-secret-0123456789", ("infer",))})
        async with listening(StubRouter(), tokens=store) as (_, where):
            known = NativeBackend(where, "m", token="arm-secret-0123456789")
            await known.infer(request(), 20)
            unknown = NativeBackend(where, "m", token="arm-secret-012345678X")
            fault = await failing(unknown, request())
            assert fault.status == "unauthenticated"
            assert "arm-secret" not in fault.message
            await unknown.probe()  # health needs none
            async with grpc.aio.insecure_channel(where) as channel:
                register = channel.unary_unary(
                    "/robot.inference.v1.ModelRegistry/Register",
                    pb.RegisterRequest.SerializeToString,
                )
                headers = [("authorization", "Bearer arm-secret-0123456789")]
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await register(pb.RegisterRequest(), metadata=headers)
                assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
            await known.close()
            await unknown.close()

    run(test)


def test_a_message_that_never_ends_is_dropped() -> None:
    async def test() -> None:
        limits = Limits(receive_timeout_s=0.2)
        async with (
            listening(StubRouter(), limits=limits) as (_, where),
            grpc.aio.insecure_channel(where) as channel,
        ):
            call = channel.stream_unary("/robot.inference.v1.ModelInference/Infer")()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    run(test)


def test_sessions_and_robots_travel_beside_the_message() -> None:
    async def test() -> None:
        router = StubRouter()
        async with (
            listening(router) as (_, where),
            grpc.aio.insecure_channel(where) as channel,
        ):
            infer = channel.unary_unary("/robot.inference.v1.ModelInference/Infer")
            inside = InferRequest("r", "m", options={"session_id": "in", "seq": 1})
            payload = codec.encode_request(inside)
            await infer(payload, metadata=[("x-session-id", "out"), ("x-robot-id", "arm7")])
            assert router.requests[-1].options == {"session_id": "out"}
            assert router.calls[-1].robot == "arm7"
            await infer(payload)
            assert router.requests[-1].options == {}
            router.stateful = True
            await infer(payload)
            assert router.requests[-1].options == {"session_id": "in", "seq": 1}
            seen = router.requests[-1]
            assert isinstance(seen, EncodedRequest)
            assert seen.payload == payload

    run(test)


def test_a_taken_port_is_an_oserror() -> None:
    async def test() -> None:
        async with listening(StubRouter()) as (_, where):
            port = int(where.rpartition(":")[2])
            with pytest.raises(OSError, match="cannot be bound"):
                await NativeListener(StubRouter(), ListenerOptions(port=port)).start()

    run(test)


def test_whoever_asks_while_it_stops_is_told_so() -> None:
    """Also those that ask between the end of the drain and the end of the listener."""

    async def test() -> None:
        for _ in range(5):
            async with listening(StubRouter()) as (listener, where):
                backends = [NativeBackend(where, "m") for _ in range(8)]

                async def robot(backend: NativeBackend) -> Fault:
                    while True:
                        try:
                            await backend.infer(request(), 20)
                        except Fault as fault:
                            return fault

                robots = [asyncio.create_task(robot(backend)) for backend in backends]
                await asyncio.sleep(0.05)
                await listener.drain()
                await listener.stop()
                faults = await asyncio.gather(*robots)
                assert {(f.status, f.started) for f in faults} == {("unavailable", False)}
                for backend in backends:
                    await backend.close()

    run(test)
