"""Clients that mean harm or are broken, over live sockets; after each a genuine one is served."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
import zmq
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.numpy_msgpack import pack_nd_form
from phyai_gateway.messages import Fault, InferRequest
from phyai_gateway.protocols.base import Limits, Listener, ListenerOptions, Router
from phyai_gateway.protocols.gr00t import Gr00tListener
from phyai_gateway.protocols.lerobot import LerobotListener
from phyai_gateway.protocols.openpi import OpenpiListener
from tests.gateway import golden_clients as clients
from tests.gateway import lerobot_robot as robot
from tests.gateway import test_gr00t as groot
from tests.gateway import test_openpi as openpi
from tests.gateway.stub_router import LoopThread, StubRouter, loop_thread, serving

CODE = grpc.StatusCode
POLICY = ModelContract("policy", action_dim=7)
STATEFUL = replace(POLICY, stateful=True, needs_prompt=False)


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    with loop_thread() as made:
        yield made


@contextmanager
def listening(
    thread: LoopThread,
    kind: Callable[[Router, ListenerOptions], Listener],
    *contracts: ModelContract,
    **given: Any,
) -> Iterator[tuple[int, StubRouter]]:
    router = StubRouter(*contracts)
    with serving(thread, lambda: kind(router, ListenerOptions(**given))) as port:
        yield port, router


def eventually(holds: Callable[[], bool], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def failing_with(*faults: Fault) -> Callable[[InferRequest], Any]:
    left = list(faults)

    async def before(_: InferRequest) -> None:
        if left:
            raise left.pop(0)

    return before


# ---------------------------------------------------------------- LeRobot


def robot_works(port: int) -> None:
    with robot.Robot(port) as client:
        eventually(lambda: client.ready() is CODE.OK)  # one that left has freed its place
        assert client.set_up(robot.setup())[0] is CODE.OK
        assert client.send(robot.observation()) == (CODE.OK, "")
        assert len(client.actions()) == 10


def latin1(text: bytes) -> bytes:
    """A pickle that encodes one text to bytes, as protocol 2 writes arrays."""
    parts = (text, b"latin1")
    sent = b"".join(b"X" + struct.pack("<I", len(part)) + part for part in parts)
    return b"\x80\x02c_codecs\nencode\n" + sent + b"\x86R."


@pytest.mark.parametrize(
    "text", [b"\x80" * (1 << 21), b"a" + b"\xbf" * (1 << 21), b"\xc3" * (1 << 21)]
)
def test_lerobot_text_that_is_no_utf8_ends_the_reading(thread: LoopThread, text: bytes) -> None:
    with listening(thread, LerobotListener, POLICY) as (port, _):
        with robot.Robot(port, limit_s=5.0) as client:
            assert client.ready() is CODE.OK
            assert client.set_up(latin1(text))[0] is CODE.INVALID_ARGUMENT
        robot_works(port)


def test_lerobot_mailboxes_hold_a_bounded_sum(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = robot.observation()
    monkeypatch.setattr("phyai_gateway.protocols.lerobot._BYTES_HELD", 2 * len(payload) + 100)
    limits = Limits(max_message_bytes=2 * len(payload))
    with (
        listening(thread, LerobotListener, POLICY, limits=limits) as (port, _),
        robot.Robot(port) as one,
        robot.Robot(port) as two,
        robot.Robot(port) as three,
    ):
        for client in (one, two, three):
            assert client.ready() is CODE.OK
            assert client.set_up(robot.setup())[0] is CODE.OK
        assert one.send(payload)[0] is CODE.OK
        assert two.send(payload)[0] is CODE.OK
        assert three.send(payload)[0] is CODE.RESOURCE_EXHAUSTED
        assert one.send(payload)[0] is CODE.OK  # replaces its own
        assert len(two.actions()) == 10
        assert three.send(payload)[0] is CODE.OK


def test_lerobot_robots_that_left_make_room(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phyai_gateway.protocols.lerobot_session._SILENT_S", 0.05)
    limits = Limits(max_sessions=2)
    with listening(thread, LerobotListener, POLICY, limits=limits) as (port, _):
        for _ in range(5):
            with robot.Robot(port) as client:
                eventually(lambda c=client: c.ready() is CODE.OK)  # type: ignore[misc]
        robot_works(port)


def test_lerobot_bugs_are_told_without_details(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret in /srv/models")

    with listening(thread, LerobotListener, POLICY) as (port, _):
        with monkeypatch.context() as patch, robot.Robot(port) as client:
            patch.setattr("phyai_gateway.protocols.lerobot_objects.read_setup", broken)
            assert client.ready() is CODE.OK
            code, text = client.set_up(robot.setup())
        assert (code, "secret" in text) == (CODE.INTERNAL, False)
        robot_works(port)


# ---------------------------------------------------------------- sessions of stateful models


UNSURE = Fault("deadline_exceeded", "late.", started=True)
LOST = Fault("failed_precondition", "session is lost.")
SURE = Fault("unavailable", "no backend.")
REJECTED = Fault("failed_precondition", "guards refuse it.", reason="action_rejected")


@pytest.mark.parametrize(
    ("fault", "same"), [(UNSURE, False), (LOST, False), (SURE, True), (REJECTED, True)]
)
@pytest.mark.parametrize("protocol", ["lerobot", "gr00t", "openpi"])
def test_session_after_a_fault(thread: LoopThread, protocol: str, fault: Fault, same: bool) -> None:
    """The number goes on only after an answer; a session that may be a step ahead is left."""
    kinds: dict[str, Any] = {
        "lerobot": LerobotListener,
        "gr00t": Gr00tListener,
        "openpi": OpenpiListener,
    }
    with listening(thread, kinds[protocol], STATEFUL) as (port, router):
        router.before = failing_with(fault)
        if protocol == "lerobot":
            with robot.Robot(port) as client:
                client.ready()
                client.set_up(robot.setup())
                for step in range(3):
                    client.send(robot.observation(step, must_go=False))
                    client.actions()
        elif protocol == "gr00t":
            with clients.GrootClient(port) as groot_client:
                for _ in range(3):
                    groot_client.ask(pack_nd_form(groot.body(groot.observation())))
        else:
            with connect(f"ws://127.0.0.1:{port}{openpi.REALTIME}") as ws:
                ws.recv()
                for _ in range(3):
                    ws.send(openpi.frame(session_id="arm"))
                    if isinstance(ws.recv(), str):  # a late answer closes: a new session anyway
                        assert not same
                        return
        sent = [request.options for request, _ in router.seen]
    assert [one["seq"] for one in sent] == [0, 0, 1]
    assert (sent[0]["session_id"] == sent[1]["session_id"]) is same
    assert sent[1]["session_id"] == sent[2]["session_id"]


# ---------------------------------------------------------------- openpi


UPGRADE = (
    "Host: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
)


@pytest.mark.parametrize("path", ["//[", "//[::1/healthz", "/?" + "model=libero&" * 40])
def test_openpi_paths_that_are_no_urls(thread: LoopThread, path: str) -> None:
    with listening(thread, OpenpiListener, openpi.CONTRACT) as (port, _):
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\n{UPGRADE}\r\n".encode())
            assert raw.recv(100).startswith(b"HTTP/1.1 404")
        assert clients.ask_openpi(port, openpi.frame()).result is not None


class Loading(StubRouter):
    """A router of which no server has answered yet."""

    loading = True

    def contract(self, model: str) -> ModelContract:
        if self.loading:
            raise Fault("unavailable", "no server has answered yet.")
        return super().contract(model)


def test_openpi_clients_that_leave_a_loading_model_free_their_place(thread: LoopThread) -> None:
    router = Loading(openpi.CONTRACT)
    options = ListenerOptions(limits=Limits(max_connections=2))
    with serving(thread, lambda: OpenpiListener(router, options)) as port:
        for _ in range(6):
            end = time.monotonic() + 5.0
            while True:  # the place of the one before is free within a moment
                try:
                    with connect(f"ws://127.0.0.1:{port}/"):
                        break
                except InvalidStatus:
                    assert time.monotonic() < end
                    time.sleep(0.05)
        time.sleep(0.5)
        router.loading = False
        assert clients.ask_openpi(port, openpi.frame()).result is not None


def test_openpi_client_that_reads_nothing_and_one_that_resets(thread: LoopThread) -> None:
    with listening(thread, OpenpiListener, openpi.CONTRACT) as (port, _):
        silent = connect(f"ws://127.0.0.1:{port}/", max_queue=1)
        with silent:
            for _ in range(20):
                silent.send(openpi.frame())
            raw = silent.socket
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert clients.ask_openpi(port, openpi.frame()).result is not None
            raw.close()
        assert clients.ask_openpi(port, openpi.frame()).result is not None


# ---------------------------------------------------------------- GR00T


def test_gr00t_client_that_reads_nothing_delays_nobody(thread: LoopThread) -> None:
    wide = replace(groot.CONTRACT, extra={}, cameras={}, state_dim=0, action_dim=100_000)
    with listening(thread, Gr00tListener, wide) as (port, router):
        context = zmq.Context()
        deaf = context.socket(zmq.DEALER)
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.RCVBUF, 4096)
        deaf.connect(f"tcp://127.0.0.1:{port}")
        try:
            asked = pack_nd_form(groot.body(groot.observation()))
            for _ in range(60):  # 4.8 MB each to come
                deaf.send_multipart([b"", asked])
            eventually(lambda: len(router.seen) == 60)
            with clients.GrootClient(port) as client:
                for _ in range(3):
                    client.ask(pack_nd_form({"endpoint": "ping"}))
        finally:
            deaf.close()
            context.term()


def test_gr00t_names_are_text(thread: LoopThread) -> None:
    open_model = ModelContract("open", action_dim=6, needs_prompt=False)
    found = {"video": {b"\xff": groot.array((1, 1, 4, 6, 3), "|u1")}}
    with (
        listening(thread, Gr00tListener, open_model) as (port, _),
        clients.GrootClient(port) as client,
    ):
        reply, _ = client.ask(pack_nd_form(groot.body(found)))
        assert reply["error"].startswith("invalid_argument: names of video")
        assert isinstance(client.ask(pack_nd_form(groot.body(groot.observation())))[0], list)


def test_gr00t_messages_of_many_frames(thread: LoopThread) -> None:
    with listening(thread, Gr00tListener, groot.CONTRACT) as (port, _):
        context = zmq.Context()
        many = context.socket(zmq.DEALER)
        many.setsockopt(zmq.LINGER, 0)
        many.connect(f"tcp://127.0.0.1:{port}")
        try:
            for _ in range(3):
                many.send_multipart([b""] * 20_000)
            with clients.GrootClient(port) as client:
                client.ask(pack_nd_form({"endpoint": "ping"}))
        finally:
            many.close()
            context.term()
