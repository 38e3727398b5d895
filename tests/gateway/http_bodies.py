"""Request bodies of RLinf and KServe, and posting them."""

from __future__ import annotations

import struct
from typing import Any

import msgpack

from tests.gateway.http_client import Answer, fetch

PATH = "/v1/actions/generations"
MSGPACK = {"Content-Type": "application/msgpack"}


def array(dtype: str, shape: tuple[int, ...], data: bytes | None = None) -> dict[bytes, Any]:
    size = int(dtype[-1])
    count = 1
    for one in shape:
        count *= one
    return {
        b"__ndarray__": True,
        b"data": bytes(size * count) if data is None else data,
        b"dtype": dtype,
        b"shape": list(shape),
    }


def flat(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model_name": "pi05",
        "observation": {
            "main_images": array("|u1", (2, 4, 4, 3)),
            "wrist_images": array("|u1", (2, 3, 4, 4)),
            "states": array("<f8", (2, 8), struct.pack("<16d", *range(16))),
            "task_descriptions": ["a", "b"],
        },
        "metadata": {"batch_size": 2, "mode": "eval"},
        "requested_action_horizon": 5,
    }
    return {key: value for key, value in {**found, **changes}.items() if value is not None}


def seen(**changes: Any) -> dict[str, Any]:
    return flat(observation={**flat()["observation"], **changes})


async def post(port: int, body: Any, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) else msgpack.packb(body)
    return await fetch(port, "POST", PATH, data, {**MSGPACK, **headers})


def kserve_body(**changes: Any) -> dict[str, Any]:
    rows = [
        {"name": "state", "datatype": "FP32", "shape": [1, 8], "data": [0.5] * 8},
        {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["pick"]},
    ]
    return {"id": "k1", "inputs": rows, **changes}
