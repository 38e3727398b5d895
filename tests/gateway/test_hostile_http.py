"""As test_hostile, for HTTP, native gRPC and our own clients."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgpack
import pytest

from phyai_gateway.client import AsyncClient, Client, ServingError
from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.arrays import column_major, make_array
from phyai_gateway.decode.limits import DecodeError
from phyai_gateway.messages import Fault, InferRequest
from phyai_gateway.proto import extensions
from phyai_gateway.protocols.base import Limits
from phyai_gateway.protocols.kserve import decode as kserve_decode
from phyai_gateway.protocols.kserve.listener import KserveListener
from phyai_gateway.protocols.native import NativeListener
from phyai_gateway.protocols.rlinf.listener import RlinfListener
from tests.gateway import golden_clients as clients
from tests.gateway import http_bodies as http
from tests.gateway.stub_router import LoopThread, loop_thread
from tests.gateway.test_hostile import POLICY, eventually, failing_with, listening


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    with loop_thread() as made:
        yield made


# ---------------------------------------------------------------- HTTP


def infer(port: int, body: bytes) -> int:
    return clients.post(port, "/v2/models/pi05/infer", body, {"Content-Type": "application/json"})


def row(**changes: Any) -> dict[str, Any]:
    return {"name": "state", "datatype": "FP32", "shape": [1], "data": [0.5]} | changes


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"inputs": [row(name="\ud800")]}).encode(),
        json.dumps({"inputs": [row(name="prompt", datatype="BYTES", data=["\udfff"])]}).encode(),
        json.dumps({"inputs": [row()]}).replace("0.5", "1e999").encode(),
        json.dumps({"inputs": [row()], "parameters": {"a": 0.25}})
        .replace("0.25", "1e999")
        .encode(),
        json.dumps({"inputs": [row(datatype="FP64", data=[10**400])]}).encode(),
    ],
)
def test_kserve_json_that_cannot_go_on(thread: LoopThread, body: bytes) -> None:
    with listening(thread, KserveListener, ModelContract("pi05")) as (port, router):
        assert infer(port, body) == 400
        assert not router.seen
        assert infer(port, json.dumps({"inputs": [row()]}).encode()) == 200


@pytest.mark.parametrize("cell", [b"[]", b"{}", b"0.5"])
def test_kserve_json_takes_no_multiple_of_its_bytes(cell: bytes) -> None:
    body = b'{"inputs":[' + cell + (b"," + cell) * 1_500_000 + b"]}"
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            kserve_decode.decode(body, None, ModelContract("pi05"))
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()


def test_rlinf_names_of_arrays_are_text(thread: LoopThread) -> None:
    with listening(thread, RlinfListener, ModelContract("pi05")) as (port, router):
        wrong = {"input": {b"\xff": http.array("|u1", (1,))}}
        assert clients.post(port, http.PATH, msgpack.packb(wrong), http.MSGPACK) == 422
        assert not router.seen
        right = {"input": {"x": http.array("|u1", (1,))}}
        assert clients.post(port, http.PATH, msgpack.packb(right), http.MSGPACK) == 200


def trickle(raw: socket.socket) -> None:
    raw.settimeout(0.2)
    end = time.monotonic() + 10.0
    with raw, suppress(ConnectionError):
        while True:
            assert time.monotonic() < end
            raw.sendall(b"x")
            with suppress(TimeoutError):
                if not raw.recv(1000):
                    return


@pytest.mark.parametrize("kind", [KserveListener, RlinfListener])
def test_http_clients_that_stop_in_the_middle(thread: LoopThread, kind: Any) -> None:
    limits = Limits(receive_timeout_s=1.0, max_connections=8)
    with listening(thread, kind, ModelContract("pi05"), limits=limits) as (port, _):
        path = http.PATH if kind is RlinfListener else "/v2/models/pi05/infer"
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/msgpack\r\n"
        for sent in (b"", b"POST", head.encode(), f"{head}Content-Length: 99\r\n\r\nabc".encode()):
            for way in (socket.SHUT_WR, None):
                raw = socket.create_connection(("127.0.0.1", port), timeout=5.0)
                raw.sendall(sent)
                if way is not None:
                    raw.shutdown(way)
                    while raw.recv(1000):
                        pass
                raw.close()
        held = [socket.create_connection(("127.0.0.1", port), timeout=5.0) for _ in range(6)]
        for raw in held:
            raw.sendall(f"{head}Content-Length: 99\r\n\r\nabc".encode())
        for raw in held:  # one byte at a time after the answer keeps nothing open
            trickle(raw)
        assert clients.post(port, path, b"", {}) in (400, 415)


# ---------------------------------------------------------------- native


@pytest.mark.parametrize("text", ['{"options": {"x": 1e999}}', r'{"instructions": ["\ud800"]}'])
def test_native_json_that_no_message_can_carry_on(text: str) -> None:
    with pytest.raises(Fault, match="extensions_json"):
        extensions.read(text)


def test_native_refusals_reach_clients_whatever_they_say(thread: LoopThread) -> None:
    with listening(thread, NativeListener, POLICY) as (port, router):
        router.before = failing_with(Fault("invalid_argument", "\U0001f9be" * 3000))
        with Client(f"127.0.0.1:{port}", model="policy") as client:
            with pytest.raises(ValueError, match="\U0001f9be"):
                client.infer({})
            assert client.infer({}).shape[-1] == 7


def test_async_client_that_is_closed_fails_its_requests_and_cancels_nobody(
    thread: LoopThread,
) -> None:
    with listening(thread, NativeListener, POLICY) as (port, router):
        entered = threading.Event()

        async def wait(_: InferRequest) -> None:
            entered.set()
            await asyncio.sleep(30)

        router.before = wait

        async def work() -> None:
            client = AsyncClient(f"127.0.0.1:{port}", model="policy")
            asked = asyncio.create_task(client.infer({}))
            await asyncio.to_thread(entered.wait, 10)
            await client.close()
            with pytest.raises(ServingError, match="closed"):
                await asked
            router.before = wait
            asked = asyncio.create_task(client.infer({}))
            await asyncio.sleep(0.1)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await client.close()

        asyncio.run(work())
        eventually(lambda: router.cancelled == 2)


# ---------------------------------------------------------------- arrays


def test_empty_array_of_huge_sizes_costs_nothing() -> None:
    shape = (0, *[1 << 20] * 5)
    began = time.process_time()
    assert make_array("<f4", shape, b"", column_major(shape)).floats() == []
    assert time.process_time() - began < 0.1
