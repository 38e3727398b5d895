"""Clients that send too much, or nonsense, to every listener; the others are served meanwhile."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import grpc
import pytest
import zmq
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.faults.askers import ASK, lerobot_setup
from tests.faults.processes import PORTS, Gateway, Model, run, running
from tests.faults.robots import CODE, INFER
from tests.gateway import lerobot_robot

pytestmark = pytest.mark.slow
MIB = 1 << 20
TOO_MUCH = bytes(6 * MIB)  # for a gateway that takes 4
ATTACKERS, ROUNDS = 4, 4
SERVED_S = 30.0  # one exchange among the attackers, on a machine that does much else


def native(port: int) -> None:
    options = (("grpc.use_local_subchannel_pool", 1),)
    with (
        grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(INFER)(TOO_MUCH, timeout=SERVED_S)
    assert caught.value.code() is CODE.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]


def lerobot(port: int) -> None:
    with lerobot_robot.Robot(port, SERVED_S) as robot:
        assert robot.ready() is CODE.OK
        assert robot.set_up(lerobot_setup())[0] is CODE.OK
        assert robot.send(TOO_MUCH)[0] is CODE.RESOURCE_EXHAUSTED


def openpi(port: int) -> None:
    with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as client:
        client.recv(timeout=SERVED_S)

        def exchange() -> None:
            client.send(TOO_MUCH)
            client.recv(timeout=SERVED_S)

        with pytest.raises((ConnectionClosed, OSError)) as caught:
            exchange()
        if isinstance(caught.value, ConnectionClosed) and caught.value.rcvd is not None:
            assert caught.value.rcvd.code == 1009


def gr00t(port: int) -> None:
    context = zmq.Context.instance()
    with context.socket(zmq.REQ) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, 500)
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(TOO_MUCH)
        with pytest.raises(zmq.Again):  # ZMQ drops the connection unread
            client.recv()


def _post(path: str, kind: str) -> Callable[[int], None]:
    def post(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SERVED_S)
        with suppress(BrokenPipeError, ConnectionResetError):
            try:
                connection.request("POST", path, TOO_MUCH, {"Content-Type": kind})
                assert connection.getresponse().status == 413
            finally:
                connection.close()

    return post


TOO_LARGE: dict[str, Callable[[int], None]] = {
    "native": native,
    "lerobot": lerobot,
    "openpi": openpi,
    "gr00t": gr00t,
    "rlinf": _post("/v1/actions/generations", "application/msgpack"),
    "kserve": _post("/v2/models/stub/infer", "application/json"),
    "http": _post("/v1/backends", "application/json"),
}


def nonsense(port: int) -> None:
    """Send random bytes, and the beginning of another protocol, until the server has enough."""
    for data in (os.urandom(MIB), b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * MIB, b"\x16\x03" * 1000):
        with (
            socket.create_connection(("127.0.0.1", port), timeout=SERVED_S) as client,
            suppress(OSError),
        ):
            client.settimeout(2.0)
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass


@pytest.mark.parametrize("attack", ["too large", "nonsense"])
def test_the_others_are_served_and_the_memory_comes_back(attack: str) -> None:
    """4 attackers at each listener at once, again and again; 7 protocols asked meanwhile."""

    async def work() -> None:
        model = Model(3)
        gateway = Gateway([model.endpoint], "--max-message-mib", "4", protocols=PORTS)
        async with running(model, gateway):
            for name, ask in ASK.items():
                await asyncio.to_thread(ask, gateway.ports[name], SERVED_S)
            sizes, slowest = [gateway.rss()], 0.0
            for _ in range(ROUNDS):
                attacks = [
                    asyncio.create_task(
                        asyncio.to_thread(
                            TOO_LARGE[name] if attack == "too large" else nonsense, port
                        )
                    )
                    for name, port in gateway.ports.items()
                    for _ in range(ATTACKERS)
                ]
                for name, ask in ASK.items():
                    began = time.monotonic()
                    await asyncio.to_thread(ask, gateway.ports[name], SERVED_S)
                    slowest = max(slowest, time.monotonic() - began)
                await asyncio.gather(*attacks)
                sizes.append(gateway.rss())
            grown = [round((size - sizes[0]) / MIB, 1) for size in sizes]
            print(f"{attack}: slowest exchange {slowest:.2f} s, {grown} MiB kept")
            # What malloc keeps of the first round serves the others.
            assert grown[-1] < 250
            assert grown[-1] - grown[ROUNDS // 2] < 60
            assert not [line for line in gateway.lines if "Traceback" in line]
            assert gateway.inner.returncode is None

    run(work)
