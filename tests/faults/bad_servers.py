"""Model servers that misbehave, each in its own way, and a wire that a test cuts or silences."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from phyai_gateway.proto import contracts_v1_pb2 as contracts_pb
from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from tests.faults.model_process import ACTION_DIM, CONTRACT, HORIZON

BAD = 99  # the number of a bad server's answers
Answer = Callable[[bytes, Any], Awaitable[bytes]]


def reply(request_id: str, number: float = BAD) -> bytes:
    actions = pb.Tensor(
        data=_floats(number), shape=(HORIZON, ACTION_DIM), dtype=pb.DATA_TYPE_FLOAT32
    )
    data: bytes = pb.InferenceResponse(request_id=request_id, actions=actions).SerializeToString()
    return data


def _floats(number: float) -> bytes:
    import struct

    return struct.pack("<f", number) * (HORIZON * ACTION_DIM)


async def hangs(raw: bytes, context: Any) -> bytes:
    await asyncio.sleep(600)
    return b""


async def garbage(raw: bytes, context: Any) -> bytes:
    return b"\xff\xff\xff\xff\x07not a message" * 8


async def wrong_id(raw: bytes, context: Any) -> bytes:
    return reply("somebody else's")


async def late(raw: bytes, context: Any) -> bytes:
    """Answer after the deadline, whatever it is, though nobody listens any more."""
    work = asyncio.ensure_future(asyncio.sleep(5.0))
    with suppress(asyncio.CancelledError):
        await asyncio.shield(work)
    await work
    return reply(pb.InferenceRequest.FromString(raw).request_id)


async def fails(raw: bytes, context: Any) -> bytes:
    raise RuntimeError("a bug of this server")


async def huge(raw: bytes, context: Any) -> bytes:
    return bytes(120 << 20)


@asynccontextmanager
async def grpc_server(answer: Answer) -> AsyncIterator[str]:
    """A server that is healthy by its probes, and answers requests as told; gives HOST:PORT."""

    async def health(request: bytes, context: Any) -> bytes:
        found: bytes = health_pb2.HealthCheckResponse(status=1).SerializeToString()
        return found

    async def contract(request: bytes, context: Any) -> bytes:
        text = json.dumps(CONTRACT.to_json())
        found: bytes = contracts_pb.ContractResponse(contract_json=text).SerializeToString()
        return found

    unary = grpc.unary_unary_rpc_method_handler
    server = grpc.aio.server(options=(("grpc.max_send_message_length", -1),))
    for service, methods in {
        "robot.inference.v1.ModelInference": {"Infer": unary(answer)},
        "grpc.health.v1.Health": {"Check": unary(health)},
        "phyai.serving.v1.ModelContracts": {"GetContract": unary(contract)},
    }.items():
        handler = grpc.method_handlers_generic_handler(service, methods)
        server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def tcp_server(talk: Callable[[Any, Any], Awaitable[None]]) -> AsyncIterator[str]:
    """A plain TCP server; gives HOST:PORT."""
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: Any, writer: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await talk(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def says_nothing(reader: Any, writer: Any) -> None:
    while await reader.read(65536):
        pass


async def says_garbage(reader: Any, writer: Any) -> None:
    while await reader.read(65536):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"\x00\xff" * 500)
        await writer.drain()


class Wire:
    """A TCP relay in front of a server.

    mute: nothing passes any more, and nobody is told: half-open connections.  deaf: the same for
    ever, what comes is thrown away.  cut_after: bytes that pass towards the client until the
    connection is reset; None = all.  ended: connections that the server closed.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.mute = self.deaf = False
        self.ended = 0
        self.cut_after: int | None = None

    async def talk(self, reader: Any, writer: Any) -> None:
        back, forth = await asyncio.open_connection(*self._target)
        try:
            await asyncio.gather(self._pass(reader, forth, False), self._pass(back, writer, True))
        finally:
            forth.close()

    async def _pass(self, reader: Any, writer: Any, towards_client: bool) -> None:
        passed = 0
        while data := await reader.read(65536):
            while self.mute:
                await asyncio.sleep(0.05)
            if self.deaf:
                continue
            if towards_client and self.cut_after is not None:
                data = data[: max(self.cut_after - passed, 0)]
                writer.write(data)
                passed += len(data)
                if passed >= self.cut_after:
                    writer.transport.abort()
                    raise ConnectionResetError
                continue
            writer.write(data)
            await writer.drain()
        self.ended += towards_client
        writer.close()
