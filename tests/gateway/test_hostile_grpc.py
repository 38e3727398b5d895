"""Broken gRPC clients: small messages that are none, too large or never whole; typed tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from phyai_gateway.proto import kserve_v2_pb2 as kserve
from phyai_gateway.protocols import grpc_listener
from phyai_gateway.protocols.base import Limits, ListenerOptions
from phyai_gateway.protocols.grpc_listener import GrpcListener
from phyai_gateway.protocols.kserve.grpc_listener import KserveGrpcListener
from phyai_gateway.protocols.native import NativeListener
from tests.gateway.stub_world import run, world

KSERVE = "/inference.GRPCInferenceService/"
HEALTH = "/grpc.health.v1.Health/"
REGISTRY = "/robot.inference.v1.ModelRegistry/"
CODE = grpc.StatusCode
SMALL: tuple[tuple[type[GrpcListener], str], ...] = (
    (NativeListener, "/robot.inference.v1.ModelInference/CheckHealth"),
    (NativeListener, "/phyai.serving.v1.ModelContracts/GetContract"),
    (NativeListener, REGISTRY + "Register"),
    (NativeListener, REGISTRY + "Heartbeat"),
    (NativeListener, HEALTH + "Check"),
    (NativeListener, HEALTH + "Watch"),
    (KserveGrpcListener, KSERVE + "ServerLive"),
    (KserveGrpcListener, KSERVE + "ModelReady"),
    (KserveGrpcListener, KSERVE + "ModelMetadata"),
)
IDS = [method.rpartition("/")[2] for _, method in SMALL]


@asynccontextmanager
async def listening(kind: type[GrpcListener], **limits: Any) -> AsyncIterator[Any]:
    async with world(1) as w:
        listener = kind(w.gateway.router, ListenerOptions(limits=Limits(**limits)))
        port = await listener.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield channel
        finally:
            await listener.stop()


async def refusal(channel: Any, method: str, sent: Any) -> tuple[grpc.StatusCode, str]:
    """Return how a call ends. sent: one message, or what gives some."""
    messages = sent if hasattr(sent, "__aiter__") else iter([sent])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.stream_unary(method)(messages, timeout=20)
    return caught.value.code(), caught.value.details() or ""


@pytest.mark.parametrize(("kind", "method"), SMALL, ids=IDS)
def test_a_small_message_that_is_none_is_refused_in_words(
    kind: type[GrpcListener], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with listening(kind) as channel:
            for sent in (b"\xff\xff", b"\x0a\x80\x80\x08" + b"x" * (1 << 17)):
                code, text = await refusal(channel, method, sent)
                assert code is CODE.INVALID_ARGUMENT
                assert text.startswith("message must be a ")
            assert await channel.unary_unary(HEALTH + "Check")(b"", timeout=20) == b"\x08\x01"
        assert not caplog.records

    run(work)


@pytest.mark.parametrize(("kind", "method"), SMALL, ids=IDS)
def test_a_small_message_that_does_not_come_is_not_waited_for(
    kind: type[GrpcListener], method: str
) -> None:
    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    async def work() -> None:
        async with listening(kind, receive_timeout_s=0.1) as channel:
            code, text = await refusal(channel, method, never())
            assert code is CODE.DEADLINE_EXCEEDED
            assert "must arrive within" in text

    run(work)


def test_typed_values_count_as_what_they_become(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte of them takes eight when read; the budget of bytes must know that."""
    monkeypatch.setattr(grpc_listener, "BUDGET_MESSAGES", 1)

    def message(count: int) -> bytes:
        whole = kserve.ModelInferRequest(model_name="pi05")
        row = whole.inputs.add(name="state", datatype="INT64", shape=[1, count])
        row.contents.int64_contents.extend([1] * count)
        return bytes(whole.SerializeToString())

    async def work() -> None:
        async with listening(KserveGrpcListener, max_message_bytes=40_000) as channel:
            code, _ = await refusal(channel, KSERVE + "ModelInfer", message(5_000))
            assert code is CODE.RESOURCE_EXHAUSTED
            code, _ = await refusal(channel, KSERVE + "ModelInfer", message(100))
            assert code is CODE.INVALID_ARGUMENT  # read, and not what the model takes

    run(work)
