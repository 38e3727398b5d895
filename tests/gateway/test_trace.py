"""The W3C trace context of a request reaches the backend, whatever protocol it came in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgpack
import pytest

from phyai_gateway import trace
from phyai_gateway.gateway import Gateway, GatewaySettings
from phyai_gateway.health import ProbeSettings
from phyai_gateway.http_api import HttpApi
from phyai_gateway.native_client import NativeBackend
from phyai_gateway.proto import robot_inference_v1_pb2 as native_pb
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.protocols.kserve.grpc_listener import KserveGrpcListener
from phyai_gateway.protocols.native import NativeListener
from tests.gateway.http_bodies import MSGPACK, PATH, flat, kserve_body
from tests.gateway.http_client import fetch
from tests.gateway.stub_world import StubBackend, run, until, world
from tests.gateway.test_kserve_grpc import typed

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Heard(NativeListener):
    """A model server that keeps the trace context of each request."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: list[dict[str, Any]] = []

    async def _infer(self, context: Any) -> bytes:
        keys = (trace.TRACEPARENT, trace.TRACESTATE)
        self.found.append({k: v for k, v in context.invocation_metadata() if k in keys})
        return await super()._infer(context)


@asynccontextmanager
async def chain() -> AsyncIterator[tuple[Gateway, Heard]]:
    """A gateway in front of a real gRPC server over a stub engine."""
    async with world() as w:
        stub = await w.add(StubBackend(1.0))
        stub.rows = 2
        server = Heard(w.gateway.router, ListenerOptions())
        port = await server.start()
        probe = ProbeSettings(period_s=3600, first_period_s=0.05)
        front = Gateway(NativeBackend, GatewaySettings(probe=probe))
        await front.start()
        try:
            front.add("pi05", f"127.0.0.1:{port}")
            await until(lambda: bool(front.router.ready("pi05")))
            yield front, server
        finally:
            await front.stop()
            await server.stop()


def test_trace_context_passes_through_every_hop() -> None:
    async def work() -> None:
        async with chain() as (front, server):
            native = NativeListener(front.router, ListenerOptions())
            kserve = KserveGrpcListener(front.router, ListenerOptions())
            http = HttpApi(front, ListenerOptions())
            ports = [await listener.start() for listener in (native, kserve, http)]
            given = (("traceparent", PARENT), ("tracestate", "vendor=1"))
            request = native_pb.InferenceRequest(request_id="r", model_name="pi05")
            await ask(ports[0], "robot.inference.v1.ModelInference/Infer", request, given)
            method = "inference.GRPCInferenceService/ModelInfer"
            await ask(ports[1], method, typed(), given)
            body = msgpack.packb(flat())
            await fetch(ports[2], "POST", PATH, body, {**MSGPACK, **dict(given)})
            await fetch(ports[2], "POST", "/v2/models/pi05/infer", kserve_body(), dict(given))
            assert server.found == [dict(given)] * 4
            server.found.clear()
            # None of a request is left for the next one, also on the same connection.
            await ask(ports[0], "robot.inference.v1.ModelInference/Infer", request, ())
            bad = (("traceparent", "00-junk"), ("tracestate", "vendor=1"))
            await ask(ports[1], method, typed(), bad)
            await fetch(ports[2], "POST", PATH, body, MSGPACK)
            assert server.found == [{}] * 3
            await asyncio.gather(*(listener.stop() for listener in (native, kserve, http)))

    run(work)


async def ask(port: int, method: str, request: Any, metadata: Any) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(f"/{method}", lambda message: message.SerializeToString())
        assert await call(request, metadata=metadata, timeout=10)


@pytest.mark.parametrize(
    ("parent", "state", "kept"),
    [
        (PARENT, None, 1),
        (PARENT, "a=b", 2),
        (PARENT, "x" * 513, 1),
        (PARENT, "a\nb", 1),
        (PARENT.upper(), "a=b", 0),
        (PARENT + "-00", None, 0),
        ("ff" + PARENT[2:], None, 0),
        ("00-" + "0" * 32 + PARENT[35:], None, 0),
        (None, "a=b", 0),
    ],
)
def test_only_well_formed_context_is_kept(parent: str | None, state: str | None, kept: int) -> None:
    trace.note({"traceparent": parent, "tracestate": state}.get)
    assert len(trace.metadata()) == kept
    trace.note(lambda name: None)
    assert trace.metadata() == ()
