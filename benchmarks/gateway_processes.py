"""The two processes around the gateway: a model server that answers at once, and a bare proxy.

    python -m benchmarks.gateway_processes stub
    python -m benchmarks.gateway_processes bare HOST:PORT

Both take and give raw bytes, print their port, and end with their standard input.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import zlib
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import InferReply, TensorData
from phyai_gateway.proto import contracts_v1_pb2 as contracts_pb
from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from phyai_gateway.proto.codec import decode_request, encode_reply

MODEL, CHECK = "bench", "compare the answers"
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
SIDE, STATE_DIM, HORIZON, ACTION_DIM = 224, 7, 50, 7
JOINTS = tuple(f"joint_{index}.pos" for index in range(STATE_DIM))
CONTRACT = ModelContract(
    MODEL,
    cameras=dict.fromkeys(CAMERAS, (SIDE, SIDE, 3)),
    state_dim=STATE_DIM,
    state_names=JOINTS,
    action_dim=ACTION_DIM,
    horizon=HORIZON,
    control_hz=30.0,
    extra={
        "gr00t": {
            "cameras": CAMERAS,
            "state": {"state": STATE_DIM},
            "actions": {"action": ACTION_DIM},
        }
    },
)
INFER = "/robot.inference.v1.ModelInference/Infer"
OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),
)


def actions(seed: int) -> bytes:
    """Return float32 [50, 7] that nothing but the seed gives."""
    count = HORIZON * ACTION_DIM
    return struct.pack(f"<{count}f", *((seed + 7919 * at) % 65521 / 256 for at in range(count)))


def reply(name: str, seed: int) -> bytes:
    shape = (HORIZON, ACTION_DIM)
    return encode_reply(InferReply(name, TensorData(actions(seed), shape, "float32")))


def seed_of(payload: bytes) -> int:
    """Return a number that every pixel, the state and the task of a request change."""
    request = decode_request(payload)
    assert request.state is not None
    pictures = sorted((image.name, image.data) for image in request.images)
    found = zlib.crc32(repr(request.instruction).encode(), zlib.crc32(request.state.data))
    for name, data in pictures:
        found = zlib.crc32(data, zlib.crc32(name.encode(), found))
    return found


class Stub:
    """Answers at once with a fixed chunk; with the chunk of its content where asked to check."""

    def __init__(self) -> None:
        self._rest = reply("", 0)
        self._sought = CHECK.encode()

    async def infer(self, payload: bytes, _: Any) -> bytes:
        length = payload[1]  # serialisers write field 1, the request id, first
        head = payload[: 2 + length]
        if self._sought in payload[:512] or self._sought in payload[-256:]:
            return reply(str(head[2:], "utf-8"), seed_of(payload))
        return head + self._rest


async def serve(methods: dict[str, dict[str, Any]]) -> Any:
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(
                service,
                {name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()},
            )
            for service, calls in methods.items()
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    return server


async def stub() -> None:
    async def healthy(_: bytes, __: Any) -> bytes:
        serving = health_pb2.HealthCheckResponse.SERVING
        return bytes(health_pb2.HealthCheckResponse(status=serving).SerializeToString())

    async def contract(_: bytes, __: Any) -> bytes:
        text = json.dumps(CONTRACT.to_json())
        return bytes(contracts_pb.ContractResponse(contract_json=text).SerializeToString())

    assert not pb.InferenceResponse.FromString(reply("", 0)).request_id
    server = await serve(
        {
            "robot.inference.v1.ModelInference": {"Infer": Stub().infer},
            "phyai.serving.v1.ModelContracts": {"GetContract": contract},
            "grpc.health.v1.Health": {"Check": healthy},
        }
    )
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


async def bare(endpoint: str) -> None:
    """Pass bytes on and do nothing else: what the library itself costs."""
    async with grpc.aio.insecure_channel(endpoint, OPTIONS) as channel:
        ask = channel.unary_unary(INFER)

        async def infer(payload: bytes, _: Any) -> bytes:
            answer: bytes = await ask(payload, timeout=10.0)
            return answer

        server = await serve({"robot.inference.v1.ModelInference": {"Infer": infer}})
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(0)


if __name__ == "__main__":
    asyncio.run(stub() if sys.argv[1] == "stub" else bare(sys.argv[2]))
