"""The openpi listener over real WebSockets: paths, frames, errors, tokens, loading, draining."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.arrays import make_array
from phyai_gateway.decode.numpy_msgpack import openpi_hook, pack_openpi, unpack
from phyai_gateway.messages import Fault, InferRequest
from phyai_gateway.protocols import openpi_observation
from phyai_gateway.protocols.base import Limits, ListenerOptions
from phyai_gateway.protocols.openpi import OpenpiListener
from phyai_gateway.tokens import TokenStore
from tests.gateway.golden_clients import ask_openpi
from tests.gateway.stub_router import LoopThread, StubRouter, actions_of, loop_thread, serving

REALTIME = "/v1/realtime/robot/openpi"
TOKEN = "a-token-for-this-test"
CONTRACT = ModelContract(
    "libero",
    cameras={"image": None, "wrist_image": None},
    state_dim=8,
    action_dim=7,
    horizon=12,
    extra={"openpi": {"metadata": {"reset_pose": [0.0, 1.0]}}},
)
OTHER = ModelContract("other", action_dim=3, needs_prompt=False)


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    with loop_thread() as made:
        yield made


@pytest.fixture
def router() -> StubRouter:
    return StubRouter(CONTRACT, OTHER)


@contextmanager
def listening(thread: LoopThread, router: StubRouter, **given: Any) -> Iterator[int]:
    options = ListenerOptions(**{"default_model": "libero", **given})
    with serving(thread, lambda: OpenpiListener(router, options)) as port:
        yield port


@pytest.fixture
def port(thread: LoopThread, router: StubRouter) -> Iterator[int]:
    with listening(thread, router) as made:
        yield made


def observation(**changes: Any) -> dict[str, Any]:
    image = make_array("|u1", (4, 4, 3), bytes(range(48)))
    state = make_array("<f8", (8,), np.arange(8.0).tobytes())
    return {
        "observation/image": image,
        "observation/wrist_image": image,
        "observation/state": state,
        "prompt": "pick up the bowl",
    } | changes


def frame(**changes: Any) -> bytes:
    return pack_openpi(observation(**changes))


def unopened(port: int, path: str = "/") -> ClientConnection:
    url = f"ws://127.0.0.1:{port}{path}"
    return connect(url, compression=None, max_size=None, close_timeout=5)


@contextmanager
def opened(port: int, path: str = "/") -> Iterator[ClientConnection]:
    with unopened(port, path) as client:
        client.metadata = unpack(client.recv(timeout=10), openpi_hook)  # type: ignore[attr-defined]
        yield client


def ask(client: ClientConnection, body: bytes) -> Any:
    client.send(body)
    got = client.recv(timeout=10)
    assert isinstance(got, bytes), got
    return unpack(got, openpi_hook)


def test_metadata_comes_first_and_results_have_timing(port: int, router: StubRouter) -> None:
    with opened(port) as client:
        assert client.metadata["reset_pose"] == [0.0, 1.0]  # type: ignore[attr-defined]
        first, second = ask(client, frame()), ask(client, frame())
    actions = np.frombuffer(first["actions"].data, "<f4").reshape(12, 7)
    assert np.array_equal(actions, actions_of(7)[0])
    assert first["policy_timing"] == {"infer_ms": 1.5}
    assert set(first["server_timing"]) == {"infer_ms"}
    assert set(second["server_timing"]) == {"infer_ms", "prev_total_ms"}
    ids = [request.request_id for request, _ in router.seen]
    assert len(set(ids)) == 2
    assert router.seen[0][1].protocol == "openpi"


@pytest.mark.parametrize("path", ["/models/other", "/?model=other", "/openpi/policy?model=other"])
def test_model_is_named_in_the_path(port: int, router: StubRouter, path: str) -> None:
    with opened(port, path) as client:
        ask(client, pack_openpi({"state": [1.0, 2.0]}))
    assert router.seen[0][0].model == "other"


@pytest.mark.parametrize("path", ["/models/absent", "/?model=absent", "/elsewhere"])
def test_unknown_paths_and_models_are_404(port: int, path: str) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(port, path):
        pass
    assert refused.value.response.status_code == 404


def test_health_and_other_http_on_the_same_port(port: int) -> None:
    for path, status in (("/healthz", 200), ("/", 426)):
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        plain.request("GET", path)
        answer = plain.getresponse()
        assert answer.status == status
        if path == "/healthz":
            assert answer.read() == b"OK\n"
            assert answer.headers["Content-Type"].startswith("text/plain")
        plain.close()


def test_tokens(thread: LoopThread, router: StubRouter) -> None:
    tokens = TokenStore.of({"arm": (TOKEN, ("infer",)), "boss": (TOKEN + "2", ("admin",))})
    with listening(thread, router, tokens=tokens) as port:
        for header, status in (({}, 401), ({"Authorization": "Api-Key nope"}, 401)):
            with pytest.raises(InvalidStatus) as refused:
                ask_openpi(port, frame(), headers=header)
            assert refused.value.response.status_code == status
        with pytest.raises(InvalidStatus) as refused:
            ask_openpi(port, frame(), headers={"Authorization": f"Api-Key {TOKEN}2"})
        assert refused.value.response.status_code == 403
        for kind in ("Api-Key", "Bearer"):
            good = {"Authorization": f"{kind} {TOKEN}"}
            assert ask_openpi(port, frame(), headers=good).result is not None
        assert router.seen[0][1].principal == "arm"
        with socket.create_connection(("127.0.0.1", port), 5) as raw:
            raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in raw.recv(100)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"observation/image": None}, "'image'"),
        ({"observation/state": make_array("<f4", (7,), bytes(28))}, "8 values"),
        ({"prompt": 5}, "prompt must be text"),
        ({"prompt": b"x" * 70_000}, "65536 bytes"),
        ({"observation/image": make_array("|u1", (4, 4), bytes(16))}, "[4, 4]"),
        ({"observation/image": make_array("<f4", (2, 2, 3), b"\x00\x00\x00\x40" * 12)}, "0 to 1"),
    ],
)
def test_wrong_content_is_told_and_the_next_connection_works(
    port: int, changes: dict[str, Any], told: str
) -> None:
    answer = ask_openpi(port, frame(**changes))
    assert answer.code == 1011
    assert told in answer.text
    assert "request " in answer.text
    assert ask_openpi(port, frame()).result is not None


def test_faults_and_bugs_of_the_router_are_short_texts(port: int, router: StubRouter) -> None:
    async def bug(_: InferRequest) -> None:
        raise RuntimeError("secret in /root/secret.py")

    router.before = bug
    answer = ask_openpi(port, frame())
    assert answer.code == 1011
    assert "internal" in answer.text
    assert "secret" not in answer.text


def test_text_frames_and_oversize_frames_have_their_own_codes(
    thread: LoopThread, router: StubRouter
) -> None:
    with listening(thread, router, limits=Limits(max_message_bytes=10_000)) as port:
        assert ask_openpi(port, "hello").code == 1003
        with opened(port) as client:
            client.send(bytes(20_000))
            with pytest.raises(ConnectionClosed) as closed:
                client.recv(timeout=10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        assert ask_openpi(port, frame()).result is not None


def test_controls_of_the_realtime_path(port: int, router: StubRouter) -> None:
    router.contracts["libero"] = ModelContract("libero", state_dim=8, action_dim=7, stateful=True)
    with opened(port, REALTIME) as client:
        for _ in range(2):
            ask(client, frame(session_id="robot 1", endpoint="infer"))
        reset = ask(client, pack_openpi({"endpoint": "reset", "session_id": "robot 1"}))
        assert reset == {"status": "reset successful"}
        ask(client, frame(session_id="robot 1"))
        error = ask(client, frame(endpoint="stop"))
        assert error["type"] == "error"
        assert "infer or reset" in error["message"]
        ask(client, frame())  # the connection goes on
    sent = [(r.options["session_id"], r.options["seq"]) for r, _ in router.seen]
    assert sent[:2] == [("robot 1", 0), ("robot 1", 1)]
    assert sent[2] == ("robot 1#1", 0)
    assert sent[3][0] not in ("robot 1", "robot 1#1")


def test_plain_path_has_no_controls(port: int) -> None:
    assert ask_openpi(port, frame(endpoint="reset")).result is not None


def test_handshake_is_quick_while_inference_runs(port: int, router: StubRouter) -> None:
    opened_gate, entered = threading.Event(), threading.Event()

    async def hold(_: InferRequest) -> None:
        entered.set()
        while not opened_gate.is_set():
            await asyncio.sleep(0.005)

    router.before = hold
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask_openpi, port, frame())
        assert entered.wait(10)
        with opened(port) as other:
            assert other.metadata["model"] == "libero"  # type: ignore[attr-defined]
        opened_gate.set()
        assert running.result().result is not None


def test_float_images_are_converted_off_the_loop(
    port: int, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    convert = openpi_observation.request_of

    def watched(*args: Any) -> InferRequest:
        threads.append(threading.current_thread().name)
        return convert(*args)

    monkeypatch.setattr(openpi_observation, "request_of", watched)
    pixels = np.linspace(0, 1, 3 * 64 * 64, dtype=np.float32).reshape(3, 64, 64)
    image = make_array("<f4", pixels.shape, pixels.tobytes())
    assert ask_openpi(port, frame(**{"observation/image": image})).result is not None
    assert ask_openpi(port, frame()).result is not None
    assert threads[0] != threads[1]
    sent = bytes(router.seen[0][0].images[0].data)
    assert sent == (255 * pixels).astype(np.uint8).tobytes()


def test_client_that_leaves_cancels_its_request(port: int, router: StubRouter) -> None:
    entered = threading.Event()

    async def hold(_: InferRequest) -> None:
        entered.set()
        await asyncio.sleep(30)

    router.before = hold
    with opened(port) as client:
        client.send(frame())
        assert entered.wait(10)
    end = time.monotonic() + 10
    while not router.cancelled:
        assert time.monotonic() < end
        time.sleep(0.01)


class Loading(StubRouter):
    """Knows the model, but no server has answered for a while."""

    polls = 3

    def contract(self, model: str) -> ModelContract:
        self.polls -= 1
        if self.polls > 0:
            raise Fault("unavailable", "no server has answered yet.")
        return super().contract(model)


def test_first_frame_waits_for_a_loading_model(thread: LoopThread) -> None:
    with listening(thread, Loading(CONTRACT)) as port:
        assert ask_openpi(port, frame()).result is not None


def test_loading_that_takes_too_long_is_told(thread: LoopThread) -> None:
    router = Loading(CONTRACT)
    router.polls = 1000
    options = {"loading_s": "0.1"}
    with listening(thread, router, options=options) as port, unopened(port) as client:
        assert "not ready" in str(client.recv(timeout=10))
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=10)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1013


def test_connections_are_limited(thread: LoopThread, router: StubRouter) -> None:
    limits = Limits(max_connections=1)
    with listening(thread, router, limits=limits) as port, opened(port):
        with pytest.raises(InvalidStatus) as refused:
            unopened(port)
        assert refused.value.response.status_code == 503


def test_drain_answers_what_runs_and_closes_with_1001(
    thread: LoopThread, router: StubRouter
) -> None:
    entered = threading.Event()

    async def slow(_: InferRequest) -> None:
        entered.set()
        await asyncio.sleep(0.3)

    router.before = slow
    made: list[OpenpiListener] = []

    def make() -> OpenpiListener:
        made.append(OpenpiListener(router, ListenerOptions(default_model="libero")))
        return made[0]

    with serving(thread, make) as port, opened(port) as client, ThreadPoolExecutor(1) as pool:
        client.send(frame())
        assert entered.wait(10)
        draining = pool.submit(thread.run, made[0].drain())
        assert isinstance(client.recv(timeout=10), bytes)
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=10)
        draining.result()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001


@pytest.mark.parametrize(
    ("robot", "cameras", "slots"),
    [
        (
            "aloha",
            {"images": {"cam_high": None, "cam_low": None, "cam_left_wrist": None}},
            {"base_0_rgb", "left_wrist_0_rgb"},
        ),
        (
            "droid",
            {"observation/exterior_image_1_left": None, "observation/wrist_image_left": None},
            {"base_0_rgb", "left_wrist_0_rgb"},
        ),
    ],
)
def test_base_checkpoints_get_their_own_camera_names(
    port: int, router: StubRouter, robot: str, cameras: dict[str, Any], slots: set[str]
) -> None:
    names = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    router.contracts["libero"] = ModelContract(
        "libero", cameras=dict.fromkeys(names), optional_cameras=names[1:]
    )
    image = make_array("|u1", (3, 4, 4), bytes(48))
    if robot == "aloha":
        cameras = {"images": dict.fromkeys(cameras["images"], image)}
    else:
        cameras = dict.fromkeys(cameras, image)
    body = pack_openpi({**cameras, "state": [0.0] * 14, "prompt": "go"})
    assert ask_openpi(port, body).result is not None
    images = router.seen[0][0].images
    assert {found.name for found in images} == slots
    assert {found.layout for found in images} == {"chw"}
