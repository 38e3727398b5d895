"""The LeRobot listener over real gRPC: handshake, mailbox, failures, reconnects."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault, InferRequest
from phyai_gateway.protocols.base import Limits, ListenerOptions
from phyai_gateway.protocols.lerobot import LerobotListener
from tests.gateway import lerobot_robot as robot
from tests.gateway.stub_router import LoopThread, StubRouter, actions_of, loop_thread, serving

OK = grpc.StatusCode.OK
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
CONTRACT = ModelContract("policy", action_dim=7)


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    with loop_thread() as made:
        yield made


@pytest.fixture
def router() -> StubRouter:
    return StubRouter(CONTRACT)


@contextmanager
def listening(
    thread: LoopThread, router: StubRouter, limits: Limits | None = None, **options: str
) -> Iterator[int]:
    given = ListenerOptions(limits=limits or Limits(), options=options)
    with serving(thread, lambda: LerobotListener(router, given)) as port:
        yield port


@pytest.fixture
def port(thread: LoopThread, router: StubRouter) -> Iterator[int]:
    with listening(thread, router) as made:
        yield made


@contextmanager
def connected(port: int, setup: bytes | None = None) -> Iterator[robot.Robot]:
    with robot.Robot(port) as client:
        assert client.ready() is OK
        assert client.set_up(setup or robot.setup())[0] is OK
        yield client


class Gate:
    """Holds inference until it is opened."""

    def __init__(self, router: StubRouter) -> None:
        self.entered, self._open = threading.Semaphore(0), threading.Event()
        router.before = self._wait

    async def _wait(self, _: InferRequest) -> None:
        self.entered.release()
        while not self._open.is_set():
            await asyncio.sleep(0.005)

    def reached(self) -> None:
        assert self.entered.acquire(timeout=10)

    def open(self) -> None:
        self._open.set()


def failing(router: StubRouter, times: int) -> None:
    left = [times]

    async def fail(_: InferRequest) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise Fault("internal", "the model broke.")

    router.before = fail


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---------------------------------------------------------------- the usual course


def test_chunk_carries_the_models_floats(port: int, router: StubRouter) -> None:
    with connected(port) as client:
        assert client.send(robot.observation(7))[0] is OK
        found = client.actions()
    assert np.array_equal(np.stack([a.action for a in found]), actions_of(7)[0, :10])
    assert [a.timestep for a in found] == list(range(7, 17))
    assert found[3].timestamp == 1007.0 + 3 / 30
    request, call = router.seen[0]
    assert call.protocol == "lerobot"
    assert request.instruction == "pick up the cube"
    assert request.state is not None
    assert struct.unpack("<3f", request.state.data) == (0.5, 1.5, 2.5)


def test_observation_is_acknowledged_before_inference(port: int, router: StubRouter) -> None:
    gate = Gate(router)
    with connected(port) as client, ThreadPoolExecutor(1) as pool:
        assert client.send(robot.observation(0))[0] is OK
        waiting = pool.submit(client.actions)
        gate.reached()
        assert client.send(robot.observation(1))[0] is OK
        gate.open()
        assert waiting.result()[0].timestep == 0


def test_newest_observation_wins_and_inherits_must_go(port: int, router: StubRouter) -> None:
    gate = Gate(router)
    with connected(port) as client, ThreadPoolExecutor(1) as pool:
        client.send(robot.observation(0))
        waiting = pool.submit(client.actions)
        gate.reached()
        client.send(robot.observation(0, must_go=True))  # a starved robot stands still
        client.send(robot.observation(5, must_go=False))
        gate.open()
        assert waiting.result()[0].timestep == 0
        assert client.actions()[0].timestep == 5
        client.send(robot.observation(5, must_go=False))  # predicted before: dropped
        client.send(robot.observation(5, must_go=True))
        assert client.actions()[0].timestep == 5
    assert len(router.seen) == 3


def test_without_observation_the_answer_is_empty_after_a_wait(port: int) -> None:
    with connected(port) as client:
        start = time.monotonic()
        assert client.actions() == []
        assert time.monotonic() - start > 1.5


def test_ready_begins_afresh(port: int) -> None:
    with connected(port) as client:
        client.send(robot.observation(4, must_go=False))
        assert client.actions()[0].timestep == 4
        assert client.ready() is OK  # keeps the setup, forgets what was predicted
        client.send(robot.observation(4, must_go=False))
        assert client.actions()[0].timestep == 4


def test_large_observations_come_in_chunks(port: int, router: StubRouter) -> None:
    cameras = {"front": (720, 1280, 3), "wrist": (720, 1280, 3)}
    found = robot.values(cameras=cameras)
    messages = robot.chunks(robot.observation(found=found))
    assert [m[1] for m in messages] == [1, 2, 3]
    with connected(port, robot.setup(cameras=cameras)) as client:
        assert client.send_messages(messages)[0] is OK
        assert len(client.actions()) == 10
    images = router.seen[0][0].images
    assert bytes(images[0].data) == found["front"].tobytes()


# ---------------------------------------------------------------- failures


def test_must_go_is_tried_again_once_and_errors_are_held(port: int, router: StubRouter) -> None:
    failing(router, times=1)
    with connected(port) as client:
        client.send(robot.observation(3))
        start = time.monotonic()
        assert client.actions() == []
        assert time.monotonic() - start > 0.2
        assert client.actions()[0].timestep == 3


def test_failed_step_may_be_sent_again(port: int, router: StubRouter) -> None:
    failing(router, times=1)
    with connected(port) as client:
        client.send(robot.observation(3, must_go=False))
        assert client.actions() == []
        client.send(robot.observation(3, must_go=False))
        assert client.actions()[0].timestep == 3


def test_lasting_failure_becomes_an_error(thread: LoopThread, router: StubRouter) -> None:
    failing(router, times=100)
    with listening(thread, router, max_failures="2") as port, connected(port) as client:
        client.send(robot.observation(0))
        assert client.actions() == []
        code, text = client.actions_status()
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "2 times" in text
    assert "the model broke" in text


def test_client_that_leaves_cancels_its_inference(port: int, router: StubRouter) -> None:
    gate = Gate(router)
    with connected(port) as client, ThreadPoolExecutor(1) as pool:
        client.send(robot.observation(0))
        waiting = pool.submit(client.actions_status)
        gate.reached()
        client.channel.close()
        waiting.exception()
    eventually(lambda: router.cancelled == 1)


# ---------------------------------------------------------------- sessions


def test_robot_that_comes_back_from_a_new_port_goes_on(port: int) -> None:
    with connected(port) as client, ThreadPoolExecutor(1) as pool:
        polling = pool.submit(lambda: client.actions_status()[0])
        time.sleep(0.1)
        client.channel.close()
        polling.exception()
    with robot.Robot(port) as again:  # no handshake
        eventually(lambda: again.send(robot.observation(2))[0] is OK)
        assert again.actions()[0].timestep == 2


def test_connected_robot_is_not_taken_over(port: int) -> None:
    with connected(port) as client, ThreadPoolExecutor(1) as pool:
        polling = pool.submit(client.actions)
        with robot.Robot(port) as other:
            start = time.monotonic()
            code, text = other.send(robot.observation())
            assert code is PRECONDITION
            assert time.monotonic() - start > 0.2
            assert "Ready" in text
        polling.result()


def test_of_two_different_lost_robots_none_is_guessed(port: int) -> None:
    for setup in (robot.setup(), robot.setup(actions_per_chunk=3)):
        with connected(port, setup) as client, ThreadPoolExecutor(1) as pool:
            polling = pool.submit(lambda c=client: c.actions_status()[0])
            time.sleep(0.1)
            client.channel.close()
            polling.exception()
    time.sleep(0.2)
    with robot.Robot(port) as again:
        assert again.send(robot.observation())[0] is PRECONDITION


def test_robots_are_known_after_a_restart(
    thread: LoopThread, router: StubRouter, tmp_path: Path
) -> None:
    file = str(tmp_path / "robots.json")
    with listening(thread, router, state_file=file) as port, connected(port) as client:
        client.send(robot.observation(0))
        assert len(client.actions()) == 10
    with listening(thread, router, state_file=file) as port, robot.Robot(port) as again:
        assert again.send(robot.observation(1))[0] is OK
        assert again.actions()[0].timestep == 1


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"host": "x", "setup": {}}]'])
def test_broken_state_file_costs_adoption_only(
    thread: LoopThread, router: StubRouter, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "robots.json"
    file.write_text(content)
    with listening(thread, router, state_file=str(file)) as port, connected(port) as client:
        assert client.send(robot.observation())[0] is OK


def test_sessions_are_limited(thread: LoopThread, router: StubRouter) -> None:
    limits = Limits(max_sessions=1)
    with listening(thread, router, limits) as port, connected(port), robot.Robot(port) as other:
        assert other.ready() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_observation_before_a_setup(port: int) -> None:
    with robot.Robot(port) as client:
        assert client.ready() is OK
        assert client.send(robot.observation())[0] is PRECONDITION


# ---------------------------------------------------------------- contracts and refusals


def test_joints_go_out_in_the_models_order(port: int, router: StubRouter) -> None:
    names = tuple(reversed(robot.JOINTS))
    router.contracts["policy"] = ModelContract("policy", state_names=names, state_dim=3)
    with connected(port) as client:
        client.send(robot.observation())
        client.actions()
    assert struct.unpack("<3f", router.seen[0][0].state.data) == (2.5, 1.5, 0.5)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("contract", "told"),
    [
        (ModelContract("policy", cameras={"front": None, "top": None}), "'top'"),
        (ModelContract("policy", cameras={"front": (16, 16, 3)}), "[16, 16, 3]"),
        (ModelContract("policy", state_dim=6), "6 values"),
        (ModelContract("policy", state_dim=3, state_names=("a", "b", "c")), "'a', 'b', 'c'"),
    ],
)
def test_setup_that_the_model_cannot_serve(
    port: int, router: StubRouter, contract: ModelContract, told: str
) -> None:
    router.contracts["policy"] = contract
    with robot.Robot(port) as client:
        client.ready()
        code, text = client.set_up(robot.setup())
    assert code is INVALID
    assert told in text


def test_cameras_are_renamed_for_clients_that_cannot(
    thread: LoopThread, router: StubRouter
) -> None:
    router.contracts["policy"] = ModelContract("policy", cameras={"base": None, "wrist": None})
    options = {"camera.front": "base"}
    with listening(thread, router, **options) as port, connected(port) as client:
        client.send(robot.observation())
        client.actions()
    assert {image.name for image in router.seen[0][0].images} == {"base", "wrist"}


def test_depth_goes_only_to_models_that_declare_it(port: int, router: StubRouter) -> None:
    cameras = {"front": (4, 4, 3), "front_depth": (4, 4, 1)}
    sent = robot.observation(found=robot.values(cameras=cameras))
    for declared in ({"front": None}, {"front": None, "front_depth": None}):
        router.contracts["policy"] = ModelContract("policy", cameras=declared)
        with connected(port, robot.setup(cameras=cameras)) as client:
            client.send(sent)
            client.actions()
        assert {image.name for image in router.seen[-1][0].images} == set(declared)


def test_unknown_policy_lists_the_models_and_an_alias_helps(
    thread: LoopThread, router: StubRouter
) -> None:
    alias = "lerobot/other=policy"
    with listening(thread, router, alias=alias) as port, robot.Robot(port) as client:
        client.ready()
        code, text = client.set_up(robot.setup("../../etc/passwd"))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "'policy'" in text
        assert client.set_up(robot.setup("lerobot/other"))[0] is OK


@pytest.mark.parametrize(
    "found",
    [
        {**robot.values(), "gripper.pos": float("nan")},
        {**robot.values(), "gripper.pos": True},
        {**robot.values(), "task": "x" * 70_000},
        {**robot.values(), "extra": {"nested": 1}},
        {**robot.values(), "front": np.zeros((8, 6, 3), np.float32)},
        {k: v for k, v in robot.values().items() if k != "gripper.pos"},
        {**robot.values(), "observation.state": np.zeros(3)},
    ],
)
def test_wrong_observations(port: int, found: dict[str, Any]) -> None:
    with connected(port) as client:
        assert client.send(robot.observation(found=found))[0] is INVALID
        assert client.send(robot.observation())[0] is OK
        assert len(client.actions()) == 10


def test_packed_state_and_scalars_of_numpy(port: int, router: StubRouter) -> None:
    packed = {k: v for k, v in robot.values().items() if k not in robot.JOINTS}
    packed["observation.state"] = np.array([3.0, 4.0, 5.0])
    with connected(port) as client:
        assert client.send(robot.observation(found=packed))[0] is OK
        client.actions()
    assert struct.unpack("<3f", router.seen[0][0].state.data) == (3.0, 4.0, 5.0)  # type: ignore[union-attr]


def test_other_formats_are_named(port: int) -> None:
    text = b'{"timestep": 0}'
    with connected(port) as client:
        code, told = client.send(len(text).to_bytes(4, "little") + text + bytes(40))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert "JSON" in told


def test_oversize_observation(thread: LoopThread, router: StubRouter) -> None:
    limits = Limits(max_message_bytes=3 << 20)
    with listening(thread, router, limits) as port, connected(port) as client:
        assert client.send(bytes(4 << 20))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert client.send(robot.observation())[0] is OK


def test_slow_stream_is_cut(thread: LoopThread, router: StubRouter) -> None:
    def slowly() -> Iterator[bytes]:
        yield robot.message(1, b"x")
        time.sleep(2)

    limits = Limits(receive_timeout_s=0.2)
    with listening(thread, router, limits) as port, connected(port) as client:
        code, _ = client.send_messages(slowly())
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_similar_states_are_dropped_only_on_demand(thread: LoopThread, router: StubRouter) -> None:
    with listening(thread, router, similarity_atol="1.0") as port, connected(port) as client:
        client.send(robot.observation(0, must_go=False))
        assert len(client.actions()) == 10
        client.send(robot.observation(1, must_go=False))
        client.send(robot.observation(2, must_go=True))
        assert client.actions()[0].timestep == 2
    assert [r.timestamp_ns for r, _ in router.seen] == [0, 0]


@pytest.mark.parametrize("options", [{"fps": "0"}, {"fps": "x"}, {"unknown": "1"}, {"alias": "a"}])
def test_wrong_options(router: StubRouter, options: dict[str, str]) -> None:
    with pytest.raises(Fault):
        LerobotListener(router, ListenerOptions(options=options))
