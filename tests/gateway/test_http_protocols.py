"""RLinf over HTTP, and what it shares with KServe: every error of the table, listeners."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from phyai_gateway.faults import QueueFull
from phyai_gateway.messages import Fault
from phyai_gateway.protocols.base import Limits, ListenerOptions
from phyai_gateway.protocols.kserve.listener import KserveListener
from phyai_gateway.protocols.rlinf.listener import RlinfListener
from tests.gateway.http_bodies import MSGPACK, PATH, array, flat, kserve_body, post, seen
from tests.gateway.http_client import Answer, fetch, served
from tests.gateway.stub_world import PI05, StubBackend, run, until, world


def test_a_flat_batch_arrives_whole_and_comes_back_with_bytes_keys() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            stub = await w.add(StubBackend(2.5))
            answer = await post(port, flat())
            assert (answer.status, answer.headers["content-type"]) == (200, "application/msgpack")
            actions = msgpack.unpackb(answer.body, strict_map_key=False)["actions"]
            assert actions[b"__ndarray__"] is True
            assert (actions[b"dtype"], actions[b"shape"]) == ("<f4", [2, 1, 1])
            assert struct.unpack("<2f", actions[b"data"]) == (2.5, 2.5)
            request = stub.seen[0]
            assert [(i.name, i.layout, i.shape) for i in request.images] == [
                ("main_images", "hwc", (2, 4, 4, 3)),
                ("wrist_images", "chw", (2, 3, 4, 4)),
            ]
            assert request.state is not None
            assert struct.unpack("<16f", request.state.data) == tuple(range(16))
            assert (request.instructions, request.horizon) == (("a", "b"), 5)
            assert request.extensions == {"metadata": {"batch_size": 2, "mode": "eval"}}

    run(work)


def test_stacked_views_become_numbered_cameras() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            stub = await w.add()
            data = bytes(range(24))  # [B 2, N 2, 1, 2, 3]
            body = seen(wrist_images=array("|u1", (2, 2, 1, 2, 3), data))
            assert (await post(port, body)).status == 200
            images = {image.name: bytes(image.data) for image in stub.seen[0].images}
            assert images["wrist_images.0"] == data[0:6] + data[12:18]
            assert images["wrist_images.1"] == data[6:12] + data[18:24]

    run(work)


def test_the_model_is_named_by_either_key_the_default_or_the_only_one() -> None:
    async def work() -> None:
        async with world(1) as w, served(w) as port:
            assert (await post(port, flat(model_name=None, model="pi05"))).status == 200
            assert (await post(port, flat(model="pi05"))).status == 200
            assert (await post(port, flat(model_name=None))).status == 200  # the only one
            assert (await post(port, flat(model="other"))).code == "invalid_payload"
            assert (await post(port, flat(model_name="other"))).code == "model_not_found"
            await w.add(StubBackend(9.0, replace(PI05, name="second")), "second")
            assert (await post(port, flat(model_name=None))).code == "invalid_payload"
        async with world() as w, served(w, default_model="second") as port:
            await w.add()
            await w.add(StubBackend(9.0), "second")
            actions = msgpack.unpackb(
                (await post(port, flat(model_name=None))).body, strict_map_key=False
            )["actions"]
            assert struct.unpack("<2f", actions[b"data"]) == (9.0, 9.0)

    run(work)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_msgpack"),
        (b"\xc1", 400, "invalid_msgpack"),
        (msgpack.packb(flat())[:-3], 400, "invalid_msgpack"),
        (msgpack.packb(flat()) + b"\x00", 400, "invalid_msgpack"),
        (b"\x91" * 100 + b"\x90", 400, "invalid_msgpack"),
        (b"\xdd\xff\xff\xff\xff", 400, "invalid_msgpack"),
        (seen(states=array("<f4", (2, 8), bytes(60))), 400, "invalid_msgpack"),
        ([1], 422, "invalid_payload"),
        (flat(observation=None), 422, "invalid_payload"),
        (flat(observation=[]), 422, "invalid_payload"),
        (flat(requested_action_horizon=True), 422, "invalid_payload"),
        (flat(requested_action_horizon=-1), 422, "invalid_payload"),
        (flat(requested_action_horizon=51), 422, "invalid_payload"),
        (flat(metadata={"batch_size": 7}), 422, "invalid_payload"),
        (flat(model_name=7), 422, "invalid_payload"),
        (seen(states=array("<f4", (8,))), 422, "invalid_payload"),
        (seen(states=array("<f4", (2, 7))), 422, "invalid_payload"),
        (seen(states=array("<i8", (2, 8))), 422, "invalid_payload"),
        (
            seen(states=array("<f4", (2, 8), struct.pack("<16f", *[float("nan")] * 16))),
            422,
            "invalid_payload",
        ),
        (
            seen(states=array("<f8", (2, 8), struct.pack("<16d", *[1e39] * 16))),
            422,
            "invalid_payload",
        ),
        (seen(main_images=array("<f4", (2, 4, 4, 3))), 422, "invalid_payload"),
        (seen(main_images=array("|u1", (3, 4, 4, 3))), 422, "invalid_payload"),
        (seen(main_images=array("|u1", (2, 4, 4, 4))), 422, "invalid_payload"),
        (seen(main_images=array("|u1", (2, 99, 1, 1, 3))), 422, "invalid_payload"),
        (seen(extra_view_images=array("|u1", (2, 4, 4, 3))), 422, "invalid_payload"),
        (seen(task_descriptions=["a"]), 422, "invalid_payload"),
        (seen(task_descriptions=[1, 2]), 422, "invalid_payload"),
        ({"model": "pi05", "input": [1]}, 422, "invalid_payload"),
        ({"model": "pi05", "input": {"x": b"raw"}}, 422, "invalid_payload"),
        ({"model": "pi05", "input": {"x": float("inf")}}, 422, "invalid_payload"),
    ],
)
def test_wrong_bodies(body: Any, status: int, code: str) -> None:
    async def work() -> None:
        async with world(1) as w, served(w) as port:
            answer = await post(port, body)
            assert (answer.status, answer.code) == (status, code)
            assert next(iter(w.stubs.values())).seen == []
            assert (await post(port, flat())).status == 200

    run(work)


def test_wrong_heads() -> None:
    async def work() -> None:
        limits = Limits(max_message_bytes=2000)
        async with world(1) as w, served(w, limits=limits) as port:
            body = msgpack.packb(flat())
            answer = await fetch(port, "POST", PATH, body, {"Content-Type": "application/json"})
            assert (answer.status, answer.code) == (415, "unsupported_media_type")
            assert (await fetch(port, "GET", PATH)).status == 405
            answer = await post(port, b"\xc0" * 3000)
            assert (answer.status, answer.code) == (413, "payload_too_large")
            answer = await _chunked(port, b"\xc0" * 3000)
            assert (answer.status, answer.code) == (413, "payload_too_large")
            answer = await post(port, body, **{"X-Request-Timeout-Ms": "soon"})
            assert (answer.status, answer.code) == (422, "backend_rejected_request")

    run(work)


async def _chunked(port: int, body: bytes) -> Answer:
    import http.client

    def work() -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        parts = (body[at : at + 100] for at in range(0, len(body), 100))
        connection.request("POST", PATH, parts, dict(MSGPACK), encode_chunked=True)
        answer = connection.getresponse()
        return Answer(answer.status, {}, answer.read())

    return await asyncio.to_thread(work)


@pytest.mark.parametrize(
    ("fault", "status", "code", "kserve"),
    [
        (Fault("invalid_argument", "m"), 422, "backend_rejected_request", 400),
        (Fault("failed_precondition", "m"), 409, "failed_precondition", 409),
        (Fault("resource_exhausted", "m"), 503, "backend_unavailable", 503),
        (QueueFull("m", 2.0), 429, "overloaded", 429),
        (Fault("unavailable", "m", retry_after=1.5), 503, "backend_unavailable", 503),
        (Fault("cancelled", "m"), 503, "backend_unavailable", 503),
        (Fault("deadline_exceeded", "m"), 504, "backend_timeout", 504),
        (Fault("data_loss", "m"), 502, "invalid_backend_response", 502),
        (Fault("internal", "m"), 502, "backend_error", 500),
        (Fault("unimplemented", "m"), 501, "unimplemented", 501),
    ],
)
def test_the_error_table(fault: Fault, status: int, code: str, kserve: int) -> None:
    async def work() -> None:
        async with world(1) as w, served(w) as port:
            (stub,) = w.stubs.values()
            stub.fault = fault
            answer = await post(port, flat())
            assert (answer.status, answer.code) == (status, code)
            assert ("retry-after" in answer.headers) == (fault.retry_after is not None)
            answer = await fetch(port, "POST", "/v2/models/pi05/infer", kserve_body())
            assert (answer.status, answer.json["error"]) == (kserve, "m")

    run(work)


def test_a_reply_that_does_not_fit_is_told() -> None:
    async def work() -> None:
        async with world(1) as w, served(w) as port:
            body = seen(task_descriptions=None, main_images=None)
            body["observation"] = {"states": body["observation"]["states"]}
            answer = await post(port, body)  # two rows, and the stub answers one
            assert (answer.status, answer.code) == (502, "invalid_backend_response")

    run(work)


def test_the_deadline_header_holds_and_a_leaving_client_cancels() -> None:
    async def work() -> None:
        async with world(1) as w, served(w) as port:
            (stub,) = w.stubs.values()
            stub.release.clear()
            answer = await post(port, flat(), **{"X-Request-Timeout-Ms": "50"})
            assert (answer.status, answer.code) == (504, "backend_timeout")
            body = msgpack.packb(flat())
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = (
                f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await until(lambda: stub.running == 1)
            writer.close()
            await until(lambda: stub.running == 0)
            assert stub.cancelled == 2
            assert w.member(stub).in_flight == 0

    run(work)


@pytest.mark.parametrize("form", ["batched", "per_env"])
def test_the_envelope(form: str) -> None:
    async def work() -> None:
        options = {"rlinf_envelope": form}
        async with world(1) as w, served(w, options=options) as port:
            (stub,) = w.stubs.values()
            stub.rows = 2
            body = {
                "model": "pi05",
                "input": {
                    "observation": {"state": array("<f4", (2, 8)), "note": "n"},
                    "image": array("|u1", (2, 4, 4, 3)),
                    "prompt": ["a", "b"],
                },
                "parameters": {"seed": 7},
                "runtime": {"output_format": "numpy"},
            }
            answer = await post(port, body)
            rows = msgpack.unpackb(answer.body, strict_map_key=False)["data"]
            if form == "batched":
                assert rows[0]["action"]["shape"] == [2, 1, 1]
                assert rows[0]["action"]["values"][b"shape"] == [2, 1, 1]
                assert rows[0]["action"]["dtype"] == "float32"
            else:
                assert [row["input_index"] for row in rows] == [0, 1]
                assert [row["action"]["shape"] for row in rows] == [[1, 1]] * 2
            request = stub.seen[0]
            assert {name: t.shape for name, t in request.inputs.items()} == {
                "state": (2, 8),
                "image": (2, 4, 4, 3),
            }
            assert request.extensions["input"] == {
                "observation": {"note": "n"},
                "prompt": ["a", "b"],
            }
            assert request.extensions["parameters"] == {"seed": 7}

    run(work)


@pytest.mark.parametrize("kind", [RlinfListener, KserveListener])
def test_each_is_a_listener_of_its_own(kind: Any) -> None:
    async def work() -> None:
        async with world(1) as w:
            listener = kind(w.gateway.router, ListenerOptions())
            port = await listener.start()
            if kind is RlinfListener:
                assert (await post(port, flat())).status == 200
            else:
                answer = await fetch(port, "POST", "/v2/models/pi05/infer", kserve_body())
                assert answer.status == 200
            await listener.drain()
            await listener.stop()
            await listener.stop()
            with pytest.raises(Fault, match="option"):
                kind(w.gateway.router, ListenerOptions(options={"nonsense": "1"}))

    run(work)
