"""A stub model server for ``load.py``: raw bytes, a fixed time per request, few places.

    python -m benchmarks.load_backend DELAY_S PLACES

Answers with a fixed chunk after the delay; more requests than places and as many again that wait
are refused as a full queue. Prints its port, ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from phyai_gateway.contract import MAX_IN_FLIGHT, ModelContract
from phyai_gateway.proto import contracts_v1_pb2 as contracts_pb
from phyai_gateway.proto import robot_inference_v1_pb2 as pb

MODEL, CAMERA = "load", "image"
STATE_DIM, HORIZON, ACTION_DIM = 7, 50, 7
JOINTS = tuple(f"joint_{index}.pos" for index in range(STATE_DIM))
CONTRACT = ModelContract(
    MODEL,
    cameras={CAMERA: None},
    state_dim=STATE_DIM,
    action_dim=ACTION_DIM,
    horizon=HORIZON,
    control_hz=30.0,
)


class Stub:
    """Takes ``places`` requests at once, lets as many wait, and refuses the rest."""

    def __init__(self, delay_s: float, places: int) -> None:
        self._delay_s, self._places = delay_s, places
        self._free = asyncio.Semaphore(places)
        self._held = 0
        data = struct.pack(f"<{HORIZON * ACTION_DIM}f", *range(HORIZON * ACTION_DIM))
        actions = pb.Tensor(data=data, shape=(HORIZON, ACTION_DIM), dtype=pb.DATA_TYPE_FLOAT32)
        self._rest = pb.InferenceResponse(actions=actions).SerializeToString()

    async def infer(self, payload: bytes, context: Any) -> bytes:
        head = payload[: 2 + payload[1]]  # serialisers write field 1, the request id, first
        if self._held >= 2 * self._places:
            hints = (("grpc-retry-pushback-ms", "50"), ("x-phyai-started", "0"))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full.", hints)
        self._held += 1
        try:
            async with self._free:
                await asyncio.sleep(self._delay_s)
        finally:
            self._held -= 1
        return head + self._rest

    async def contract(self, _: bytes, __: Any) -> bytes:
        found = CONTRACT.to_json()
        found["extra"][MAX_IN_FLIGHT] = 2 * self._places
        return bytes(
            contracts_pb.ContractResponse(contract_json=json.dumps(found)).SerializeToString()
        )


async def _healthy(_: bytes, __: Any) -> bytes:
    serving = health_pb2.HealthCheckResponse.SERVING
    return bytes(health_pb2.HealthCheckResponse(status=serving).SerializeToString())


async def main() -> None:
    stub = Stub(float(sys.argv[1]), int(sys.argv[2]))
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    for service, name, call in (
        ("robot.inference.v1.ModelInference", "Infer", stub.infer),
        ("grpc.health.v1.Health", "Check", _healthy),
        ("phyai.serving.v1.ModelContracts", "GetContract", stub.contract),
    ):
        methods = {name: grpc.unary_unary_rpc_method_handler(call)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
