"""The light client: what it sends, what it raises, what it refuses before sending."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from phyai_gateway.client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerUnavailable,
)
from phyai_gateway.proto import robot_inference_v1_pb2 as pb

ACTIONS = np.arange(6, dtype=np.float32).reshape(2, 3)


@contextmanager
def answering(behaviour: Any) -> Iterator[str]:
    """A server of somebody else's, with another implementation of gRPC's threads."""

    def infer(raw: bytes, context: Any) -> bytes:
        found: bytes = behaviour(pb.InferenceRequest.FromString(raw), context)
        return found

    server = grpc.server(futures.ThreadPoolExecutor(2))
    handler = grpc.unary_unary_rpc_method_handler(infer)
    service = {"Infer": handler}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("robot.inference.v1.ModelInference", service),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def reply(request: Any, name: str | None = None) -> bytes:
    found = pb.InferenceResponse(
        request_id=request.request_id if name is None else name,
        actions=pb.Tensor(data=ACTIONS.tobytes(), shape=[2, 3], dtype=6),
        inference_time_us=1500,
        extensions_json='{"control_hz": 20.0}',
    )
    found.outputs["half"].CopyFrom(pb.Tensor(data=b"\x80\x3f\x00\x40", shape=[2], dtype=5))
    return found.SerializeToString()


def test_what_is_sent_and_what_comes_back() -> None:
    seen: list[Any] = []

    def behaviour(request: Any, context: Any) -> bytes:
        seen.append((request, dict(context.invocation_metadata()), context.time_remaining()))
        return reply(request)

    with (
        answering(behaviour) as where,
        Client(where, model="m", token="t" * 20, robot="arm", timeout_s=30) as client,
    ):
        picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
        answer = client.ask(
            {"a": picture[::-1], "b": b"\xff\xd8\xff\xe0rest"},
            [0.5, 1],
            "go",
            horizon=2,
            options={"seed": 3, "rtc": {"prev_chunk": ACTIONS}},
        )
        assert np.array_equal(answer.actions, ACTIONS)  # type: ignore[arg-type]
        assert answer.inference_s == 0.0015
        assert answer.extensions == {"control_hz": 20.0}
        assert answer.outputs["half"].tolist() == [1.0, 2.0]  # bfloat16
        answer.outputs["half"][0] = answer.actions[0, 0] = 7  # type: ignore[index]
        request, metadata, left = seen[0]
        assert request.images[0].data == picture[::-1].tobytes()
        assert (request.images[1].encoding, request.images[1].shape) == (2, [])
        assert np.frombuffer(request.robot_state.data, "<f4").tolist() == [0.5, 1.0]
        assert request.extensions_json == (
            '{"options":{"seed":3,"rtc":{"prev_chunk":[[0.0,1.0,2.0],[3.0,4.0,5.0]]}}}'
        )
        assert (request.requested_action_horizon, request.model_name) == (2, "m")
        assert request.timestamp_ns > 0
        assert metadata["authorization"] == "Bearer " + "t" * 20
        assert metadata["x-robot-id"] == "arm"
        assert 0 < left <= 30
        client.infer({}, None, "go")
        assert seen[1][0].request_id != request.request_id


def test_a_client_without_an_event_loop_and_one_with() -> None:
    with answering(lambda request, _: reply(request)) as where:
        with Client(where) as client:
            assert np.array_equal(client.infer({}), ACTIONS)
            assert not client.ready()  # this server has no health method

        async def test() -> None:
            async with AsyncClient(where) as client:
                found = await asyncio.gather(*(client.infer({}) for _ in range(3)))
                assert all(np.array_equal(one, ACTIONS) for one in found)

        asyncio.run(test())


def test_an_answer_to_another_request_is_never_used() -> None:
    with answering(lambda request, _: reply(request, "another")) as where, Client(where) as client:
        with pytest.raises(ServerFailed) as caught:
            client.infer({})
        assert caught.value.status == "data_loss"


@pytest.mark.parametrize("raw", [b"\xff", b"", pb.InferenceResponse().SerializeToString()])
def test_garbage_is_an_error_of_the_server(raw: bytes) -> None:
    with (
        answering(lambda request, _: raw) as where,
        Client(where) as client,
        pytest.raises(ServerFailed),
    ):
        client.infer({})


def test_errors_by_what_to_do_about_them() -> None:
    def behaviour(request: Any, context: Any) -> bytes:
        code, trailing = {
            "busy": (grpc.StatusCode.RESOURCE_EXHAUSTED, [("grpc-retry-pushback-ms", "250")]),
            "lost": (
                grpc.StatusCode.FAILED_PRECONDITION,
                [("x-phyai-reason", "session_evicted"), ("x-phyai-started", "0")],
            ),
            "odd": (grpc.StatusCode.UNKNOWN, []),
        }[request.instruction]
        context.set_trailing_metadata(trailing)
        context.abort(code, "the text")
        return b""

    with answering(behaviour) as where, Client(where) as client:
        with pytest.raises(ServerBusy, match="the text") as busy:
            client.infer({}, None, "busy")
        assert busy.value.retry_after == 0.25
        with pytest.raises(RequestRefused) as lost:
            client.infer({}, None, "lost")
        assert (lost.value.reason, lost.value.started) == ("session_evicted", False)
        with pytest.raises(ServerFailed) as odd:
            client.infer({}, None, "odd")
        assert odd.value.started


def test_a_stalled_server_does_not_hang_the_robot() -> None:
    release = threading.Event()

    def behaviour(request: Any, context: Any) -> bytes:
        release.wait(20)
        return reply(request)

    with answering(behaviour) as where, Client(where, timeout_s=0.2) as client:
        began = time.monotonic()
        with pytest.raises(TimeoutError) as caught:
            client.infer({})
        assert isinstance(caught.value, DeadlineExceeded)
        assert time.monotonic() - began < 10
        release.set()
        assert np.array_equal(client.infer({}, timeout_s=20), ACTIONS)  # not the late one's


def test_a_slow_network_is_not_taken_for_a_dead_server() -> None:
    """The first bytes of a connection may come late: Wi-Fi, TLS over a long line, a busy host."""

    async def slow_line(address: str) -> str:
        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.6)
            there = await asyncio.open_connection(*address.rsplit(":", 1))
            await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))

        line = await asyncio.start_server(join, "127.0.0.1", 0)
        return f"127.0.0.1:{line.sockets[0].getsockname()[1]}"

    async def test(address: str) -> None:
        async with AsyncClient(await slow_line(address)) as client:
            assert np.array_equal(await client.infer({}, None, "go"), ACTIONS)

    with answering(lambda request, context: reply(request)) as address:
        asyncio.run(test(address))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


def test_nobody_there() -> None:
    with Client("127.0.0.1:1") as client:
        assert not client.ready(timeout_s=5)
        with pytest.raises(ServerUnavailable) as caught:
            client.infer({}, timeout_s=5)
        assert not caught.value.started
        assert "Is it running?" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"images": {"a": np.zeros((4, 4), np.uint8)}}, r"uint8 RGB .* \[4, 4\]"),
        ({"images": {"a": np.zeros((4, 4, 3))}}, "float64"),
        ({"images": {"a": b"GIF89a"}}, "JPEG or PNG"),
        ({"images": {}, "state": "x"}, "numbers"),
        ({"images": {}, "horizon": -1}, "horizon"),
        ({"images": {}, "options": {"x": object()}}, "JSON"),
        ({"images": {}, "options": {"x": float("nan")}}, "JSON"),
    ],
)
def test_wrong_values_never_leave(values: dict[str, Any], text: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=text):
        client.infer(**values)


def test_wrong_settings() -> None:
    for timeout in (0, -1, 601, float("nan")):
        with pytest.raises(ValueError, match="timeout_s"):
            Client("127.0.0.1:1", timeout_s=timeout)
    with pytest.raises(ValueError, match="ca"):
        Client("127.0.0.1:1", cert="x")


def test_the_client_is_light() -> None:
    code = (
        "import sys, phyai_gateway.client\n"
        "bad = {'torch', 'PIL', 'phyai', 'starlette', 'uvicorn'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
