"""KServe over gRPC: raw and typed tensors, what is refused, metadata, sequences, frozen numbers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault, InferReply, TensorData
from phyai_gateway.proto import kserve_v2_pb2 as pb
from phyai_gateway.protocols.base import Limits, ListenerOptions
from phyai_gateway.protocols.kserve import grpc_decode as codec
from phyai_gateway.protocols.kserve.grpc_listener import KserveGrpcListener
from phyai_gateway.tokens import TokenStore
from tests.gateway.stub_world import PI05, StubBackend, World, run, until, world

NAME = "pi05"
PIXELS = bytes(range(48))

FROZEN = {
    "ServerLiveResponse": {"live": 1},
    "ServerReadyResponse": {"ready": 1},
    "ModelReadyRequest": {"name": 1, "version": 2},
    "ModelReadyResponse": {"ready": 1},
    "ServerMetadataResponse": {"name": 1, "version": 2, "extensions": 3},
    "ModelMetadataRequest": {"name": 1, "version": 2},
    "ModelMetadataResponse": {
        "name": 1,
        "versions": 2,
        "platform": 3,
        "inputs": 4,
        "outputs": 5,
        "properties": 6,
    },
    "ModelMetadataResponse.TensorMetadata": {"name": 1, "datatype": 2, "shape": 3},
    "InferParameter": {
        "bool_param": 1,
        "int64_param": 2,
        "string_param": 3,
        "double_param": 4,
        "uint64_param": 5,
    },
    "InferTensorContents": {
        "bool_contents": 1,
        "int_contents": 2,
        "int64_contents": 3,
        "uint_contents": 4,
        "uint64_contents": 5,
        "fp32_contents": 6,
        "fp64_contents": 7,
        "bytes_contents": 8,
    },
    "ModelInferRequest": {
        "model_name": 1,
        "model_version": 2,
        "id": 3,
        "parameters": 4,
        "inputs": 5,
        "outputs": 6,
        "raw_input_contents": 7,
    },
    "ModelInferRequest.InferInputTensor": {
        "name": 1,
        "datatype": 2,
        "shape": 3,
        "parameters": 4,
        "contents": 5,
    },
    "ModelInferRequest.InferRequestedOutputTensor": {"name": 1, "parameters": 2},
    "ModelInferResponse": {
        "model_name": 1,
        "model_version": 2,
        "id": 3,
        "parameters": 4,
        "outputs": 5,
        "raw_output_contents": 6,
    },
    "ModelInferResponse.InferOutputTensor": {
        "name": 1,
        "datatype": 2,
        "shape": 3,
        "parameters": 4,
        "contents": 5,
    },
}


def test_field_numbers_are_the_protocols() -> None:
    assert pb.DESCRIPTOR.package == "inference"
    for path, numbers in FROZEN.items():
        head, *inner = path.split(".")
        found = pb.DESCRIPTOR.message_types_by_name[head]
        for name in inner:
            found = found.nested_types_by_name[name]
        assert {field.name: field.number for field in found.fields} == numbers, path
    methods = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert " ".join(methods) == (
        "ServerLive ServerReady ModelReady ServerMetadata ModelMetadata ModelInfer"
    )


class Client:
    """A plain gRPC client of one listener."""

    def __init__(self, channel: Any, metadata: Any = None) -> None:
        self._channel, self._metadata = channel, metadata

    async def ask(self, method: str, request: Any, **more: Any) -> Any:
        kind = getattr(pb, f"{method}Response")
        call = self._channel.unary_unary(
            f"/inference.GRPCInferenceService/{method}",
            lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            kind.FromString,
        )
        return await call(request, timeout=10, metadata=self._metadata, **more)

    async def refused(self, method: str, request: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.ask(method, request)
        return caught.value.code(), caught.value.details() or ""


@asynccontextmanager
async def served(w: World, **options: Any) -> AsyncIterator[Client]:
    options.setdefault("observer", w.gateway.metrics)
    listener = KserveGrpcListener(w.gateway.router, ListenerOptions(**options))
    port = await listener.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Client(channel)
    finally:
        await listener.stop()


def tensor(name: str, datatype: str, *shape: int, **contents: Any) -> Any:
    row = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    if contents:
        row.contents.CopyFrom(pb.InferTensorContents(**contents))
    return row


def typed(**changes: Any) -> Any:
    rows = [
        tensor("state", "FP32", 1, 8, fp32_contents=[0.5] * 8),
        tensor("prompt", "BYTES", 1, bytes_contents=[b"pick"]),
        tensor("main_images", "UINT8", 1, 4, 4, 3, uint_contents=list(PIXELS)),
    ]
    return pb.ModelInferRequest(**{"model_name": NAME, "id": "k1", "inputs": rows, **changes})


def raw(**changes: Any) -> Any:
    rows = [
        tensor("state", "FP32", 1, 8),
        tensor("prompt", "BYTES", 1),
        tensor("main_images", "UINT8", 1, 4, 4, 3),
    ]
    data = [struct.pack("<8f", *[0.5] * 8), b"\4\0\0\0pick", PIXELS]
    values = {"model_name": NAME, "id": "k1", "inputs": rows, "raw_input_contents": data}
    return pb.ModelInferRequest(**{**values, **changes})


def test_raw_and_typed_contents_mean_the_same() -> None:
    async def work() -> None:
        async with world() as w:
            stub = await w.add(StubBackend(1.5))
            async with served(w) as client:
                plain = await client.ask("ModelInfer", typed())
                assert (plain.model_name, plain.model_version, plain.id) == (NAME, "1", "k1")
                (output,) = plain.outputs
                assert (output.name, output.datatype) == ("actions", "FP32")
                assert list(output.shape) == [1, 1, 1]
                assert list(output.contents.fp32_contents) == [1.5]
                assert not plain.raw_output_contents
                binary = await client.ask("ModelInfer", raw(model_version="1"))
                assert not binary.outputs[0].HasField("contents")
                assert list(binary.raw_output_contents) == [struct.pack("<f", 1.5)]
                first, second = stub.seen
                assert first.state is not None
                assert second.state is not None
                assert bytes(first.state.data) == bytes(second.state.data)
                assert first.instruction == second.instruction == "pick"
                assert bytes(first.images[0].data) == bytes(second.images[0].data) == PIXELS
                assert first.request_id != second.request_id
            text = w.gateway.metrics.text().decode()
            assert (
                'phyai_requests_total{model="pi05",outcome="ok",protocol="kserve-grpc"} 2' in text
            )

    run(work)


def _row(**changes: Any) -> Any:
    row = tensor("state", "FP32", 1, 8, fp32_contents=[0.5] * 8)
    for key, value in changes.items():
        if key == "shape":
            del row.shape[:]
            row.shape.extend(value)
        elif key == "contents":
            row.contents.CopyFrom(pb.InferTensorContents(**value))
        else:
            setattr(row, key, value)
    return pb.ModelInferRequest(model_name=NAME, inputs=[row])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (b"\xff", "ModelInferRequest"),
        (b"\x0a\x01\xff", "ModelInferRequest"),
        (typed(inputs=[]), "1 to 256"),
        (raw(raw_input_contents=[b""]), "one per input"),
        (raw(inputs=typed().inputs), "not both"),
        (typed(inputs=[*typed().inputs, *typed().inputs]), "different names"),
        (typed(id="i" * 300), "id must"),
        (typed(outputs=[{"name": "other"}]), "outputs must be of actions"),
        (_row(name=""), "name of an input"),
        (_row(name="other"), "inputs must be of"),
        (_row(datatype="FP8"), "datatype"),
        (_row(datatype="FP16"), "raw_input_contents"),
        (_row(datatype="FP64"), "fp64_contents"),
        (_row(shape=(1, -8)), "shape"),
        (_row(shape=(1,) * 9), "shape"),
        (_row(shape=(1 << 40, 1)), "shape"),
        (_row(contents={"fp32_contents": [0.5] * 7}), "8 values"),
        (_row(contents={"fp32_contents": [float("nan")] * 8}), "finite"),
        (_row(name="main_images", datatype="UINT8", contents={"uint_contents": [256] * 8}), "fit"),
        (_row(name="prompt", datatype="BYTES", shape=(1,), contents={"bytes_contents": [b"\xff"]}),
         "UTF-8"),
        (raw(raw_input_contents=[b"", b"", b""]), "32 bytes"),
        (typed(parameters={"x": {}}), "must have a value"),
        (typed(parameters={"x": {"double_param": float("inf")}}), "finite"),
        (typed(parameters={"sequence_id": {"bool_param": True}}), "sequence_id"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused_in_words(request_: Any, words: str) -> None:
    payload = request_ if isinstance(request_, bytes) else request_.SerializeToString()
    reply = InferReply("r", TensorData(bytes(4), (1, 1), "float32"))
    with pytest.raises(Fault) as caught:
        codec.encode(reply, codec.decode(codec.parse(payload), PI05))
    assert caught.value.status == "invalid_argument"
    assert words in caught.value.message


def test_statuses_on_the_wire() -> None:
    async def work() -> None:
        async with world(1) as w, served(w, limits=Limits(max_message_bytes=4096)) as client:
            for request, code in (
                (typed(inputs=[]), grpc.StatusCode.INVALID_ARGUMENT),
                (typed(model_name="other"), grpc.StatusCode.NOT_FOUND),
                (typed(model_version="2"), grpc.StatusCode.NOT_FOUND),
                (typed(id="i" * 5000), grpc.StatusCode.RESOURCE_EXHAUSTED),
            ):
                found, _ = await client.refused("ModelInfer", request)
                assert found is code
            assert (await client.ask("ModelInfer", typed())).outputs

    run(work)


def test_small_messages_cannot_become_large_ones() -> None:
    many_texts = _field(5, _field(5, b"\x42\x00" * 12_000))
    varints = _field(5, _field(5, _field(3, b"\x01" * (5 << 20))))
    for hostile, words in (
        (b"\x2a\x00" * 20_000, "fields"),
        (many_texts, "fields"),
        (varints, "raw_input_contents"),
        (_field(5, _field(3, b"\x01" * 997)), "shape"),
    ):
        with pytest.raises(Fault, match=words) as caught:
            codec.parse(hostile)  # refused here: protobuf's objects would take many times more
        assert caught.value.status == "invalid_argument"


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def test_it_says_what_it_serves_and_whether_it_is_ready() -> None:
    async def work() -> None:
        async with world(1) as w:
            (stub,) = w.stubs.values()
            async with served(w) as client:
                assert (await client.ask("ServerLive", pb.ServerLiveRequest())).live
                assert (await client.ask("ServerReady", pb.ServerReadyRequest())).ready
                named = pb.ModelReadyRequest(name=NAME)
                assert (await client.ask("ModelReady", named)).ready
                found = await client.ask("ModelMetadata", pb.ModelMetadataRequest(name=NAME))
                shapes = {row.name: (row.datatype, list(row.shape)) for row in found.inputs}
                assert shapes["main_images"] == ("UINT8", [-1, -1, -1, 3])
                assert shapes["state"] == ("FP32", [-1, 8])
                assert shapes["prompt"] == ("BYTES", [-1])
                assert list(found.outputs[0].shape) == [-1, 50, 7]
                server = await client.ask("ServerMetadata", pb.ServerMetadataRequest())
                assert server.name == "phyai"
                other = pb.ModelReadyRequest(name="other")
                assert (await client.refused("ModelReady", other))[0] is grpc.StatusCode.NOT_FOUND
                stub.down = True
                for _ in range(3):
                    await w.probe(w.member(stub))
                assert not (await client.ask("ModelReady", named)).ready
                assert not (await client.ask("ServerReady", pb.ServerReadyRequest())).ready
                check = client._channel.unary_unary(
                    "/grpc.health.v1.Health/Check",
                    health_pb2.HealthCheckRequest.SerializeToString,
                    health_pb2.HealthCheckResponse.FromString,
                )
                status = (await check(health_pb2.HealthCheckRequest(service=NAME))).status
                assert status == health_pb2.HealthCheckResponse.NOT_SERVING

    run(work)


def test_sequences_are_numbered_for_the_model() -> None:
    async def work() -> None:
        stateful = replace(PI05, stateful=True)
        async with world() as w:
            stub = await w.add(StubBackend(0.0, stateful))
            async with served(w) as client:

                def at(**parameters: Any) -> Any:
                    sequence = {"sequence_id": {"uint64_param": 7}}
                    flags = {key: {"bool_param": value} for key, value in parameters.items()}
                    return typed(parameters={**sequence, **flags})

                code, _ = await client.refused("ModelInfer", at())
                assert code is grpc.StatusCode.FAILED_PRECONDITION
                await client.ask("ModelInfer", at(sequence_start=True))
                await client.ask("ModelInfer", at())
                await client.ask("ModelInfer", at(sequence_end=True))
                found = [(one.options["session_id"], one.options["seq"]) for one in stub.seen]
                assert found == [("7", 0), ("7", 1), ("7", 2)]
                code, _ = await client.refused("ModelInfer", at())
                assert code is grpc.StatusCode.FAILED_PRECONDITION

    run(work)


def test_tensor_models_and_half_precision() -> None:
    async def work() -> None:
        async with world() as w:
            stub = await w.add(StubBackend(2.0, ModelContract("raw")), "raw")
            async with served(w) as client:
                halves = tensor("x", "FP16", 2)
                request = pb.ModelInferRequest(
                    model_name="raw", inputs=[halves], raw_input_contents=[bytes(4)]
                )
                await client.ask("ModelInfer", request)
                assert stub.seen[0].inputs["x"] == TensorData(bytes(4), (2,), "float16")
                flags = tensor("x", "BOOL", 2, bool_contents=[True, False])
                request = pb.ModelInferRequest(model_name="raw", inputs=[flags])
                await client.ask("ModelInfer", request)
                assert stub.seen[1].inputs["x"] == TensorData(b"\1\0", (2,), "bool")

    run(work)
    decoded = codec.decode(codec.parse(typed().SerializeToString()), PI05)
    outputs = {
        "y": TensorData(bytes(4), (2,), "float16"),
        "z": TensorData(b"\1\0", (2,), "bool"),
    }
    found = pb.ModelInferResponse.FromString(codec.encode(InferReply("r", None, outputs), decoded))
    assert list(found.raw_output_contents) == [bytes(4), b"\1\0"]


def test_tokens_guard_what_health_does_not() -> None:
    token = "a-long-enough-secret"

    async def work() -> None:
        store = TokenStore.of({"arm": (token, ("infer",))})
        async with world(1) as w, served(w, tokens=store) as client:
            assert (await client.ask("ServerLive", pb.ServerLiveRequest())).live
            for method, request in (
                ("ModelInfer", typed()),
                ("ModelMetadata", pb.ModelMetadataRequest(name=NAME)),
            ):
                code, _ = await client.refused(method, request)
                assert code is grpc.StatusCode.UNAUTHENTICATED
            client._metadata = (("authorization", f"Bearer {token}"),)
            assert (await client.ask("ModelInfer", typed())).outputs

    run(work)


def test_a_drain_answers_what_was_accepted() -> None:
    async def work() -> None:
        async with world(1) as w:
            (stub,) = w.stubs.values()
            listener = KserveGrpcListener(w.gateway.router, ListenerOptions())
            port = await listener.start()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                client = Client(channel)
                stub.release.clear()
                asked = asyncio.create_task(client.ask("ModelInfer", typed()))
                await until(lambda: stub.running == 1)
                draining = asyncio.create_task(listener.drain())
                await asyncio.sleep(0)
                code, _ = await client.refused("ModelInfer", typed())
                assert code is grpc.StatusCode.UNAVAILABLE
                assert not draining.done()
                stub.release.set()
                assert (await asked).outputs
                await draining
            await listener.stop()

    run(work)
