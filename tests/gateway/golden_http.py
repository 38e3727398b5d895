"""Golden payloads of the native gRPC, RLinf and KServe."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np

from phyai_gateway.decode import numpy_msgpack as codec
from phyai_gateway.messages import ImageData, InferRequest, TensorData
from phyai_gateway.proto.codec import encode_request
from tests.gateway import golden_clients as clients
from tests.gateway.golden_serving import Payload
from tests.gateway.golden_world import (
    World,
    array_of,
    outcome,
)
from tests.gateway.native_semantics import check_native

OK = grpc.StatusCode.OK


def check_native_payload(world: World, payload: Payload) -> None:
    offers = [clients.POLICY] if payload.expect == "refuse" else [clients.POLICY, clients.OPEN]
    codes = []
    for contract in offers:
        world.offer(contract)
        world.router.before = check_native(contract)
        try:
            codes.append(clients.ask_native(world.ports["native"], payload.data))
        finally:
            world.router.before = None
    if not outcome(payload, OK in codes):
        assert [code.name for code in codes] == [payload.entry["status"]]


def check_rlinf(world: World, payload: Payload) -> None:
    offers = [clients.POLICY]
    if payload.expect != "refuse":
        offers += [clients.STACKED, clients.OPEN]
    codes = []
    for contract in offers:
        world.offer(contract)
        codes.append(post_rlinf(world, payload.data))
    if not outcome(payload, 200 in codes):
        assert codes == [400 if payload.entry["level"] == "wire" else 422]


def post_rlinf(world: World, body: bytes) -> int:
    headers = {"Content-Type": "application/msgpack"}
    return clients.post(world.ports["rlinf"], "/v1/actions/generations", body, headers)


def check_kserve(world: World, payload: Payload) -> None:
    world.offer(clients.STATE_ONLY)
    status = post_kserve(world, payload.data, clients.header_length(payload, payload.data))
    if not outcome(payload, status == 200):
        assert status in (400, 422)


def post_kserve(world: World, body: bytes, length: str) -> int:
    headers = {
        "Inference-Header-Content-Length": length,
        "Content-Type": "application/octet-stream",
    }
    return clients.post(world.ports["kserve"], "/v2/models/pi05/infer", body, headers)


def check_kserve_length(world: World, payload: Payload) -> None:
    """The length belongs to a body beside it, which is JSON up to there."""
    body = Path(payload.root / payload.name.removesuffix(".header_length.txt")).with_suffix(".body")
    length = int(payload.data)
    assert body.read_bytes()[:1] == b"{"
    assert body.read_bytes()[length - 1 : length] == b"}"


def genuine_native(world: World) -> None:
    world.offer(clients.POLICY)
    pixels = TensorData(bytes(32), (8,), "float32")
    images = [ImageData(name, bytes(48), (4, 4, 3)) for name in clients.POLICY.cameras]
    request = InferRequest("genuine", "pi05", tuple(images), pixels, "go")
    world.router.before = check_native(clients.POLICY)
    try:
        assert clients.ask_native(world.ports["native"], encode_request(request)) is OK
    finally:
        world.router.before = None


def genuine_rlinf(world: World) -> None:
    world.offer(clients.POLICY)
    pictures = array_of(np.zeros((1, 4, 4, 3), np.uint8))
    observation = {
        "main_images": pictures,
        "wrist_images": pictures,
        "states": array_of(np.zeros((1, 8), np.float32)),
        "task_descriptions": ["go"],
    }
    body = codec.pack_openpi({"model": "pi05", "observation": observation, "metadata": {}})
    assert post_rlinf(world, body) == 200


def genuine_kserve(world: World) -> None:
    world.offer(clients.STATE_ONLY)
    body = (
        b'{"inputs": [{"name": "state", "shape": [1, 8], "datatype": "FP32", "data": '
        b'[0, 0, 0, 0, 0, 0, 0, 0]}, {"name": "prompt", "shape": [1], "datatype": "BYTES", '
        b'"data": ["go"]}]}'
    )
    assert post_kserve(world, body, str(len(body))) == 200
