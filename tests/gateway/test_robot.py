"""The robot's stream: commands for sensor data, the newest wins, errors, cancelling, draining."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault, InferReply, TensorData
from phyai_gateway.proto import robot_v1_pb2 as pb
from phyai_gateway.protocols import robot_messages as messages
from phyai_gateway.protocols.base import Limits, ListenerOptions
from phyai_gateway.protocols.robot import RobotListener
from tests.gateway.stub_router import StubRouter
from tests.gateway.stub_world import run, until

JOINTS = 2
ARM = ModelContract("arm", cameras={"front": None}, state_dim=10, action_dim=JOINTS + 1)
IMAGE = bytes(480 * 640 * 3)

FROZEN = {
    "SensorData": {
        "image_rgb": 1,
        "image_depth": 2,
        "timestamp_ns": 3,
        "state": 4,
        "language_instruction": 5,
    },
    "RobotState": {
        "joint_angles": 1,
        "joint_velocities": 2,
        "x": 3,
        "y": 4,
        "z": 5,
        "roll": 6,
        "pitch": 7,
        "yaw": 8,
    },
    "ActionCmd": {
        "target_joint_angles": 1,
        "target_joint_velocities": 2,
        "gripper_opening": 3,
        "timestamp_ns": 4,
        "inference_time": 5,
    },
}


def test_field_numbers_are_frozen() -> None:
    assert pb.DESCRIPTOR.package == "robot"
    for name, numbers in FROZEN.items():
        fields = pb.DESCRIPTOR.message_types_by_name[name].fields
        assert {field.name: field.number for field in fields} == numbers
    method = pb.DESCRIPTOR.services_by_name["RobotInference"].methods_by_name["Communicate"]
    assert method.client_streaming
    assert method.server_streaming


class Arm(StubRouter):
    """Gives joint targets 0.25 and 0.5, and a half open gripper."""

    values = (0.25, 0.5, 0.5)
    shape = (1, JOINTS + 1)

    def answer(self, request: Any) -> InferReply:
        data = struct.pack(f"<{len(self.values)}f", *self.values)
        tensor = TensorData(data, self.shape, "float32")
        return InferReply(request.request_id, tensor, inference_time_us=1500)


class Drops:
    """An observer that keeps the reasons of drops."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.count = 0

    def dropped(self, reason: str) -> None:
        self.reasons.append(reason)

    def decode_error(self, protocol: str, reason: str) -> None: ...

    def sessions(self, protocol: str, count: int) -> None:
        self.count = count

    def transferred(self, direction: str, count: int) -> None: ...


def sensed(time_ns: int = 1, **changes: Any) -> Any:
    state = pb.RobotState(joint_angles=[0.1, 0.2], joint_velocities=[1.0, 2.0], x=3.0, yaw=-1.0)
    values = {"image_rgb": IMAGE, "timestamp_ns": time_ns, "state": state}
    return pb.SensorData(**{**values, "language_instruction": "wave", **changes})


@asynccontextmanager
async def serving(
    router: StubRouter, observer: Any = None, limits: Limits | None = None, **options: str
) -> AsyncIterator[tuple[RobotListener, Any]]:
    """Give the listener and what opens a stream to it."""
    given = ListenerOptions(
        options=options, limits=limits or Limits(), observer=observer or Drops()
    )
    listener = RobotListener(router, given)
    port = await listener.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            opened = channel.stream_stream(
                "/robot.RobotInference/Communicate",
                lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
                pb.ActionCmd.FromString,
            )
            yield listener, opened
    finally:
        await listener.stop()


async def ended(stream: Any) -> tuple[grpc.StatusCode, str]:
    """Return the error of a stream, after whatever it still sends."""
    try:
        while await stream.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("the stream ended without an error")


def test_each_command_answers_the_sensor_data_it_is_for() -> None:
    async def work() -> None:
        router = Arm(ARM)
        async with serving(router) as (_, opened):
            stream = opened()
            for time_ns in (11, 12):
                await stream.write(sensed(time_ns))
                command = await stream.read()
                assert list(command.target_joint_angles) == [0.25, 0.5]
                assert command.gripper_opening == 0.5
                assert (command.timestamp_ns, command.inference_time) == (time_ns, 1500)
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK
        request, call = router.seen[0]
        (image,) = request.images
        assert (image.name, image.shape, image.layout) == ("front", (480, 640, 3), "hwc")
        assert request.state is not None
        found = struct.unpack("<10f", request.state.data)
        assert found == pytest.approx([0.1, 0.2, 1, 2, 3, 0, 0, 0, 0, -1])
        assert request.extensions == {"robot": {"joint_angle_count": 2, "joint_velocity_count": 2}}
        assert (request.horizon, request.instruction) == (1, "wave")
        assert call.robot is not None
        assert request.request_id != router.seen[1][0].request_id

    run(work)


def test_a_robot_that_says_nothing_leaves_its_place_to_others() -> None:
    async def work() -> None:
        limits = Limits(max_sessions=1, receive_timeout_s=0.1)
        async with serving(Arm(ARM), limits=limits, idle_s="0.2") as (listener, opened):
            code, text = await ended(opened())
            assert (code, "within 0.1 s" in text) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
            stream = opened()
            await stream.write(sensed(1))
            assert (await stream.read()).timestamp_ns == 1
            code, text = await ended(stream)
            assert (code, "within 0.2 s" in text) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
            await until(lambda: not listener._streams)
            again = opened()
            await again.write(sensed(2))
            assert (await again.read()).timestamp_ns == 2

    run(work)


def test_the_newest_wins_while_the_model_works() -> None:
    async def work() -> None:
        router, drops, gate = Arm(ARM), Drops(), asyncio.Event()

        async def hold(_: Any) -> None:
            await gate.wait()

        router.before = hold
        async with serving(router, drops) as (_, opened):
            stream = opened()
            await stream.write(sensed(1))
            await until(lambda: len(router.seen) == 1)
            for time_ns in (2, 3, 4):
                await stream.write(sensed(time_ns))
            await until(lambda: len(drops.reasons) == 2)
            gate.set()
            assert (await stream.read()).timestamp_ns == 1
            assert (await stream.read()).timestamp_ns == 4
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
        assert drops.reasons == ["superseded"] * 2
        assert drops.count == 0

    run(work)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff", "SensorData"),
        (sensed(image_rgb=b"abc"), "image_rgb"),
        (sensed(state=pb.RobotState()), "joint_angles"),
        (sensed(state=pb.RobotState(joint_angles=[float("nan")], joint_velocities=[0.0] * 3)),
         "finite"),
        (sensed(state=pb.RobotState(joint_angles=[0.0])), "10 values"),
    ],
)  # fmt: skip
def test_wrong_sensor_data_ends_the_stream_and_no_other(data: Any, words: str) -> None:
    async def work() -> None:
        async with serving(Arm(ARM)) as (_, opened):
            other, stream = opened(), opened()
            await stream.write(data)
            code, details = await ended(stream)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert words in details
            await other.write(sensed())
            assert (await other.read()).timestamp_ns == 1
            other.cancel()

    run(work)


@pytest.mark.parametrize(
    ("values", "shape", "words"),
    [
        ((0.0,) * 6, (2, 3), "[1, 3]"),
        ((0.0,) * 2, (1, 2), "[1, 3]"),
        ((0.0, float("nan"), 0.0), (1, 3), "finite"),
        ((0.0, 0.0, 1.5), (1, 3), "gripper"),
    ],
)
def test_actions_of_another_form_are_never_sent(
    values: tuple[float, ...], shape: tuple[int, ...], words: str
) -> None:
    data = struct.pack(f"<{len(values)}f", *values)
    with pytest.raises(Fault) as caught:
        messages.command(InferReply("r", TensorData(data, shape, "float32")), sensed())
    assert caught.value.status == "data_loss"
    assert words in caught.value.message
    batch = InferReply("r", TensorData(bytes(12), (1, 1, 3), "float32"))
    assert messages.command(batch, sensed())


def test_a_busy_model_costs_observations_and_a_broken_one_the_stream() -> None:
    async def work() -> None:
        router = Arm(ARM)
        faults = [
            Fault("resource_exhausted", "full.", retry_after=0.01),
            Fault("deadline_exceeded", "late."),
        ]

        async def fail(_: Any) -> None:
            if faults:
                raise faults.pop(0)

        router.before = fail
        async with serving(router) as (_, opened):
            stream = opened()
            for time_ns in (1, 2, 3):
                await stream.write(sensed(time_ns))
                await until(lambda n=time_ns: len(router.seen) == n)  # type: ignore[misc]
            assert (await stream.read()).timestamp_ns == 3
            faults.append(Fault("unavailable", "no backend.", retry_after=1.0))
            await stream.write(sensed(4))
            code, details = await ended(stream)
            assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "no backend.")
            assert dict(await stream.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"

    run(work)


def test_a_model_that_stays_busy_ends_the_stream() -> None:
    async def work() -> None:
        router = Arm(ARM)

        async def fail(_: Any) -> None:
            raise Fault("resource_exhausted", "full.", retry_after=0.01)

        router.before = fail
        async with serving(router, give_up_s="0.005") as (_, opened):
            stream = opened()
            await stream.write(sensed(1))
            await until(lambda: len(router.seen) == 1)
            await asyncio.sleep(0.02)
            await stream.write(sensed(2))
            assert (await ended(stream))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(work)


def test_a_robot_that_leaves_cancels_its_inference() -> None:
    async def work() -> None:
        router, drops = Arm(ARM), Drops()

        async def hold(_: Any) -> None:
            await asyncio.Event().wait()

        router.before = hold
        async with serving(router, drops) as (_, opened):
            stream = opened()
            await stream.write(sensed())
            await until(lambda: len(router.seen) == 1)
            assert drops.count == 1
            stream.cancel()
            await until(lambda: router.cancelled == 1 and drops.count == 0)

    run(work)


def test_a_drain_answers_what_runs_and_ends_the_streams() -> None:
    async def work() -> None:
        router, gate = Arm(ARM), asyncio.Event()

        async def hold(_: Any) -> None:
            await gate.wait()

        router.before = hold
        async with serving(router) as (listener, opened):
            busy, idle = opened(), opened()
            await busy.write(sensed(5))
            await idle.wait_for_connection()
            await until(lambda: len(router.seen) == 1 and len(listener._streams) == 2)
            draining = asyncio.create_task(listener.drain())
            assert (await ended(idle))[0] is grpc.StatusCode.UNAVAILABLE
            gate.set()
            assert (await busy.read()).timestamp_ns == 5
            assert (await ended(busy))[0] is grpc.StatusCode.UNAVAILABLE
            await draining

    run(work)


def test_a_stateful_model_counts_the_stream() -> None:
    async def work() -> None:
        router = Arm(replace(ARM, stateful=True))
        async with serving(router) as (_, opened):
            stream = opened()
            for time_ns in (1, 2):
                await stream.write(sensed(time_ns))
                await stream.read()
            stream.cancel()
        sessions = [request.options["session_id"] for request, _ in router.seen]
        assert sessions[0] == sessions[1]
        assert [request.options["seq"] for request, _ in router.seen] == [0, 1]

    run(work)


def test_streams_are_limited_and_models_named() -> None:
    async def work() -> None:
        router = Arm(ARM, replace(ARM, name="other"))
        async with serving(router, limits=Limits(max_sessions=1)) as (_, opened):
            first = opened()
            await first.wait_for_connection()
            second = opened()
            assert (await ended(second))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            await first.write(sensed())
            code, details = await ended(first)
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "--robot-model" in details
        async with serving(router, model="other", state="all") as (_, opened):
            stream = opened()
            await stream.write(sensed())
            assert (await stream.read()).timestamp_ns == 1
            stream.cancel()
        assert router.seen[-1][0].model == "other"

    run(work)


def test_a_message_of_another_size_class_is_refused_by_its_length() -> None:
    async def work() -> None:
        router = Arm(ARM)
        async with serving(router) as (_, opened):
            stream = opened()
            await stream.write(sensed(image_depth=bytes(messages.MAX_BYTES)))
            assert (await ended(stream))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not router.seen

    run(work)


def test_joints_alone_and_the_models_only_camera() -> None:
    contract = replace(ARM, cameras={"top": (480, 640, 3)}, state_dim=2)
    request = messages.request_of(sensed(), contract, None, "joints", "r")
    assert request.images[0].name == "top"
    assert request.state is not None
    assert request.state.shape == (2,)
    small = replace(contract, cameras={"top": (224, 224, 3)})
    with pytest.raises(Fault, match="Resize"):
        messages.request_of(sensed(), small, None, "joints", "r")
    with pytest.raises(Fault, match="option camera"):
        messages.request_of(sensed(), contract, "wrist", "joints", "r")


@pytest.mark.parametrize("options", [{"x": "1"}, {"state": "pose"}, {"give_up_s": "0"}])
def test_wrong_options(options: dict[str, str]) -> None:
    with pytest.raises(Fault) as caught:
        RobotListener(Arm(ARM), ListenerOptions(options=options))
    assert caught.value.status == "invalid_argument"
