"""Raw tensors, sessions, other protocols, what errors mean, the queue, pictures."""

from __future__ import annotations

import asyncio
import io
import math
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from phyai.engine import Engine
from phyai.errors import (
    ActionRejected,
    CapacityError,
    ConfigError,
    EngineUnavailableError,
    RequestError,
    SessionEvicted,
    SessionUnknown,
)
from phyai.manifest import AdapterManifest
from phyai_gateway.client import (
    AsyncClient,
    InvalidRequest,
    RequestRefused,
    ServerUnavailable,
)
from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault, ImageData, InferRequest
from phyai_gateway.protocols.native import NativeListener
from phyai_gateway.server import listening
from phyai_gateway.server.dispatcher import Dispatcher
from phyai_gateway.server.faults import fault_of
from phyai_gateway.server.images import decode_image
from phyai_gateway.server.observations import ObservationBuilder
from tests.core.session_adapter import Odometer
from tests.gateway.serving import (
    ACTION_DIM,
    address,
    pictures,
    run,
    serving,
    state,
)
from tests.gateway.serving import isolated as isolated


def test_raw_tensors(tmp_path: Path) -> None:
    adapter = {
        "factory": "tensors",
        "args": {"request_type": "tests.gateway.serving:ScaleRequest", "output_name": "x"},
    }
    noise = np.arange(18, dtype=np.float32).reshape(1, 6, 3)

    async def test() -> None:
        async with serving(tmp_path, adapter=adapter) as server, AsyncClient(address(server)) as c:
            found = await c.infer_tensors({"noise": noise}, {"factor": 2.0})
            assert np.array_equal(found["x"], 2 * noise)
            assert (await c.contract()).extra["guards"] == "no safety hooks"
            for inputs, parameters, text in (
                ({"noise": noise[:, :5]}, None, "expected shape"),
                ({"other": noise}, None, r"noise, factor"),
                ({"noise": noise}, {"noise": 1}, "share names"),
                ({}, {}, "got none"),
            ):
                with pytest.raises(InvalidRequest, match=text):
                    await c.infer_tensors(inputs, parameters)
            with pytest.raises(InvalidRequest, match="named tensors"):
                await c.infer(pictures(), state(), "go")

    run(test)


def test_sessions_go_on_and_say_when_they_are_lost(tmp_path: Path) -> None:
    manifest = AdapterManifest(
        "odometer",
        "adds up moves",
        "tests.core.session_adapter:Odometer",
        "tests.core.session_adapter:OdometerArgs",
        capabilities={
            "sessions": True,
            "options": ["session_id", "seq"],
            "own_options": ["wheel"],
        },
    )
    Engine.register(Odometer, manifest)

    async def test() -> None:
        async with (
            serving(tmp_path, plugin="odometer") as server,
            AsyncClient(address(server)) as client,
        ):

            async def move(seq: int) -> float:
                options = {"session_id": "a", "seq": seq}
                return float((await client.infer({}, [1.0, 10.0], options=options))[0, 0])

            assert (await client.contract()).stateful
            assert (await client.contract()).options == ("session_id", "seq", "wheel")
            assert not (await client.contract()).idempotent
            assert [await move(0), await move(1), await move(1)] == [1.0, 2.0, 2.0]
            with pytest.raises(InvalidRequest, match="seq"):
                await move(7)
            assert server.host is not None
            await asyncio.to_thread(server.host.engine.close_session, "a")
            with pytest.raises(RequestRefused) as caught:
                await move(2)
            assert caught.value.reason == "session_closed"
            assert await move(0) == 1.0

    run(test)


class Second(NativeListener):
    """As the native listener, under another name."""

    name: ClassVar[str] = "second"


def test_another_protocol_beside_the_native_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "find_listener", lambda name: Second)

    async def test() -> None:
        async with serving(tmp_path, listen={"second": "127.0.0.1:0"}) as server:
            assert len({server.ports[name] for name in ("native", "second", "http")}) == 3
            async with AsyncClient(f"127.0.0.1:{server.ports['second']}") as client:
                assert (await client.infer(pictures(), state(), "go")).shape[1] == ACTION_DIM

    run(test)


def test_options_of_a_protocol_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "find_listener", lambda name: Second)
    listen = {"listen": {"second": "127.0.0.1:0"}, "listen_options": {"second": {"a": "b"}}}

    async def test() -> None:
        with pytest.raises(ConfigError, match=r"listen\.second.*options"):
            async with serving(tmp_path, **listen):
                pass

    run(test)


def test_a_taken_port_says_so(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server:
            with pytest.raises(ConfigError, match="must be free"):
                async with serving(tmp_path, port=server.ports["native"]):
                    pass

    run(test)


# ---------------------------------------------------------------- what errors mean


@pytest.mark.parametrize(
    ("error", "status", "reason", "started"),
    [
        (RequestError("state expected 3."), "invalid_argument", None, False),
        (SessionEvicted("gone."), "failed_precondition", "session_evicted", False),
        (SessionUnknown("gone."), "failed_precondition", "session_unknown", False),
        (ActionRejected("outside."), "failed_precondition", "action_rejected", True),
        (CapacityError("/dev/x full"), "resource_exhausted", None, True),
        (EngineUnavailableError("x", reason="closed"), "unavailable", "closed", False),
        (EngineUnavailableError("x", reason="worker_died"), "unavailable", "worker_died", True),
        (RuntimeError("/root/secret"), "internal", None, True),
        (Fault("not_found", "x"), "not_found", None, False),
    ],
)
def test_faults_of_errors(error: Exception, status: str, reason: str | None, started: bool) -> None:
    fault = fault_of(error, "r")
    assert (fault.status, fault.reason, fault.started) == (status, reason, started)
    assert "/" not in fault.message


def test_an_engine_that_is_gone_turns_the_server_unready(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server, AsyncClient(address(server)) as client:
            assert server.host is not None
            assert await client.ready()
            await asyncio.to_thread(server.host.engine.close)
            with pytest.raises(ServerUnavailable):
                await client.infer(pictures(), state(), "go")
            while await client.ready():
                await asyncio.sleep(0.05)
            assert server.not_ready() == "no replica is ready"

    run(test)


# ---------------------------------------------------------------- the queue alone


def test_as_many_requests_run_as_there_are_workers() -> None:
    async def test() -> None:
        futures: list[Future[Any]] = []

        def submit(request: Any) -> Future[Any]:
            futures.append(Future())
            futures[-1].set_running_or_notify_cancel()
            return futures[-1]

        queue = Dispatcher(submit, workers=3, max_queue=2)
        deadline = time.monotonic() + 20
        tasks = [asyncio.create_task(queue.run(lambda: "x", deadline)) for _ in range(5)]
        while len(futures) < 3 or queue.waiting != 2:
            await asyncio.sleep(0.005)
        assert queue.running == 3
        with pytest.raises(Fault) as caught:
            await queue.run(lambda: "x", deadline)
        assert caught.value.status == "resource_exhausted"
        for _ in range(5):
            while not futures:
                await asyncio.sleep(0.005)
            futures.pop(0).set_result("y")
        assert {done.result for done in await asyncio.gather(*tasks)} == {"y"}
        assert queue.busy_seconds > 0
        with pytest.raises(Fault) as caught:
            await queue.run(lambda: "x", time.monotonic() - 1)
        assert caught.value.status == "deadline_exceeded"
        queue.close()

    run(test)


def test_the_loop_lives_while_inputs_are_decoded() -> None:
    async def test() -> None:
        queue = Dispatcher(lambda request: _done(request), workers=1, max_queue=1)
        hold = threading.Event()

        def build() -> str:
            assert hold.wait(20)
            return "built"

        task = asyncio.create_task(queue.run(build, time.monotonic() + 20))
        await asyncio.sleep(0.02)
        assert queue.waiting == 1
        hold.set()
        assert (await task).result == "built"
        queue.close()

    run(test)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    ("shape", "layout", "text"),
    [
        ((4, 4), "hwc", "shape"),
        ((4, 4, 4), "hwc", "3 channels"),
        ((4, 4, 3), "chw", "3 channels"),
        ((0, 4, 3), "hwc", "shape"),
        ((1, 20_000, 3), "hwc", "shape"),
        ((100, 100, 3), "hwc", "pixels"),
        ((4, 5, 3), "hwc", "60 bytes"),
    ],
)
def test_raw_pictures_of_wrong_form(shape: Any, layout: Any, text: str) -> None:
    with pytest.raises(Fault, match=text) as caught:
        decode_image(ImageData("front", bytes(48), shape, layout=layout), 1000)
    assert caught.value.status == "invalid_argument"


def test_several_frames_of_a_camera_are_no_batch() -> None:
    """[T, H, W, 3] is one observation of a model that looks at frames, [B, T, ...] are B."""
    contract = ModelContract("m", needs_prompt=False, max_rows=4, extra={"frames": [-15, 0]})
    builder = ObservationBuilder(contract, {}, 1000)
    for shape, rows in (((2, 4, 5, 3), None), ((1, 2, 4, 5, 3), 1), ((3, 2, 4, 5, 3), 3)):
        data = bytes(index % 251 for index in range(math.prod(shape)))
        image = ImageData("front", data, shape)
        built = builder.build(InferRequest("r", "m", images=(image,)))
        assert (built.batched, len(built.observations)) == (rows is not None, rows or 1)
        wanted = np.frombuffer(data, np.uint8).reshape(-1, 2, 4, 5, 3)
        for index, row in enumerate(built.observations):
            assert np.array_equal(row.images["front"], wanted[index])
    one = ObservationBuilder(ModelContract("m", needs_prompt=False, max_rows=4), {}, 1000)
    image = ImageData("front", bytes(120), (2, 4, 5, 3))
    assert len(one.build(InferRequest("r", "m", images=(image,))).observations) == 2


def test_files_share_a_budget_of_pixels() -> None:
    out = io.BytesIO()
    Image.new("RGB", (30, 30)).save(out, "PNG")
    builder = ObservationBuilder(ModelContract("m", needs_prompt=False), {}, 1000)
    images = [ImageData(f"camera {i}", out.getvalue(), encoding="png") for i in range(3)]
    assert len(builder.build(InferRequest("r", "m", images=tuple(images[:2]))).observations) == 1
    with pytest.raises(Fault, match="'camera 2' must have at most 200 pixels"):
        builder.build(InferRequest("r", "m", images=tuple(images)))
    raw = ImageData("raw", bytes(2700), (30, 30, 3))
    builder.build(InferRequest("r", "m", images=(*images[:2], raw)))
