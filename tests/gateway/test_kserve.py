"""KServe over HTTP: JSON and binary tensors, what is refused, sequences."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import pytest

from phyai_gateway.contract import ModelContract
from tests.gateway.http_bodies import kserve_body
from tests.gateway.http_client import Answer, fetch, served
from tests.gateway.stub_world import PI05, StubBackend, run, world


def test_kserve_json_and_binary_mean_the_same() -> None:
    async def work() -> None:
        async with world(1) as w, served(w) as port:
            (stub,) = w.stubs.values()
            path = "/v2/models/pi05/infer"
            plain = await fetch(port, "POST", path, kserve_body())
            assert plain.json == {
                "model_name": "pi05",
                "id": "k1",
                "outputs": [
                    {"name": "actions", "datatype": "FP32", "shape": [1, 1, 1], "data": [0.0]}
                ],
            }
            body = kserve_body(parameters={"binary_data_output": True})
            body["inputs"][0] = {
                "name": "state",
                "datatype": "FP32",
                "shape": [1, 8],
                "parameters": {"binary_data_size": 32},
            }
            pixels = bytes(range(48))
            body["inputs"].append(
                {
                    "name": "main_images",
                    "datatype": "UINT8",
                    "shape": [1, 4, 4, 3],
                    "parameters": {"binary_data_size": 48},
                }
            )
            head = json.dumps(body).encode()
            data = head + struct.pack("<8f", *[0.5] * 8) + pixels
            length = {"Inference-Header-Content-Length": str(len(head))}
            binary = await fetch(port, "POST", path, data, length)
            size = int(binary.headers["inference-header-content-length"])
            assert json.loads(binary.body[:size])["outputs"][0]["parameters"] == {
                "binary_data_size": 4
            }
            assert binary.body[size:] == bytes(4)
            first, second = stub.seen
            assert first.state is not None
            assert second.state is not None
            assert bytes(first.state.data) == bytes(second.state.data)
            assert first.instruction == second.instruction == "pick"
            assert bytes(second.images[0].data) == pixels

    run(work)


def _one(**changes: Any) -> dict[str, Any]:
    row = {"name": "state", "datatype": "FP32", "shape": [1, 8], "data": [0.5] * 8}
    return kserve_body(inputs=[{**row, **changes}])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 20_000,
        {},
        {"inputs": []},
        _one(name="other"),
        _one(name=""),
        _one(datatype="FP33"),
        _one(shape=[1, 7]),
        _one(shape=[1, 8, -1]),
        _one(shape=[True, 8]),
        _one(shape="x"),
        _one(shape=[1, 9], data=[0.5] * 9),
        _one(data=["x"] * 8),
        _one(data=[True] * 8),
        _one(data=[1e39] * 8),
        _one(data=None),
        _one(datatype="INT64", data=[1 << 70] * 8),
        _one(datatype="BF16"),
        _one(parameters={"binary_data_size": 32}),
        kserve_body(inputs=_one()["inputs"] * 2),
        kserve_body(parameters=[1]),
        kserve_body(parameters={"x": {}}),
        kserve_body(outputs=[{"name": "nothing"}]),
        kserve_body(id=3),
        b'{"inputs": [{"name": "state", "datatype": "FP32", "shape": [1], "data": [NaN]}]}',
    ],
)
def test_kserve_refuses(body: Any) -> None:
    async def work() -> None:
        async with world(1) as w, served(w) as port:
            path = "/v2/models/pi05/infer"
            answer = await fetch(port, "POST", path, body)
            assert answer.status == 400
            assert isinstance(answer.json["error"], str)
            assert (await fetch(port, "POST", path, kserve_body())).status == 200

    run(work)


@pytest.mark.parametrize(
    ("size", "tail", "length"),
    [(32, 31, None), (32, 33, None), (31, 31, None), (-1, 0, None), (32, 32, 0), (32, 32, 10**9)],
)
def test_kserve_binary_sizes_must_add_up(size: int, tail: int, length: int | None) -> None:
    async def work() -> None:
        async with world(1) as w, served(w) as port:
            row = {"name": "state", "datatype": "FP32", "shape": [1, 8]}
            row["parameters"] = {"binary_data_size": size}
            head = json.dumps({"inputs": [row]}).encode()
            used = len(head) if length is None else length
            header = {"Inference-Header-Content-Length": str(used)}
            answer = await fetch(port, "POST", "/v2/models/pi05/infer", head + bytes(tail), header)
            assert answer.status == 400

    run(work)


def test_kserve_says_what_it_serves() -> None:
    async def work() -> None:
        async with world(1) as w, served(w) as port:
            assert (await fetch(port, "GET", "/v2/health/live")).json == {"live": True}
            assert (await fetch(port, "GET", "/v2/health/ready")).status == 200
            assert (await fetch(port, "GET", "/v2")).json["extensions"] == ["binary_tensor_data"]
            for path in ("/v2/models/pi05", "/v2/models/pi05/versions/1"):
                found = (await fetch(port, "GET", path)).json
                assert {"name": "state", "datatype": "FP32", "shape": [-1, 8]} in found["inputs"]
                assert found["outputs"][0]["shape"] == [-1, 50, 7]
                assert (await fetch(port, "GET", path + "/ready")).status == 200
            assert (await fetch(port, "GET", "/v2/models/x/ready")).status == 404
            assert (await fetch(port, "GET", "/v2/models/pi05/versions/2")).status == 404

    run(work)


def test_kserve_sequences_are_numbered_for_the_model() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            stub = await w.add(StubBackend(0, replace(PI05, stateful=True)))
            path = "/v2/models/pi05/infer"

            async def ask(**parameters: Any) -> Answer:
                body = kserve_body(parameters={"sequence_id": 42, **parameters})
                return await fetch(port, "POST", path, body)

            assert (await ask()).status == 409
            for more in ({"sequence_start": True}, {}, {}, {"sequence_end": True}):
                assert (await ask(**more)).status == 200
            assert (await ask()).status == 409
            assert [r.options for r in stub.seen] == [
                {"session_id": "42", "seq": n} for n in range(4)
            ]

    run(work)


def test_kserve_serves_tensor_models_too() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            stub = await w.add(StubBackend(0, ModelContract("raw")), "raw")
            row = {"name": "x", "datatype": "INT32", "shape": [2, 1], "data": [[1], [-2]]}
            answer = await fetch(port, "POST", "/v2/models/raw/infer", {"inputs": [row]})
            assert answer.status == 200
            assert struct.unpack("<2i", stub.seen[0].inputs["x"].data) == (1, -2)

    run(work)
