"""The model server over live sockets: same numbers as the engine, typed refusals, and recovery."""

from __future__ import annotations

import asyncio
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from phyai_gateway.client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServingError,
)
from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from phyai_gateway.server import engine_host
from tests.gateway.serving import (
    ACTION_DIM,
    CAMERAS,
    GATE,
    HORIZON,
    STATE_DIM,
    address,
    expected,
    picture,
    pictures,
    run,
    serving,
    state,
)
from tests.gateway.serving import isolated as isolated

INFER = "/robot.inference.v1.ModelInference/Infer"


async def fails(call: Any, kind: type[ServingError]) -> ServingError:
    with pytest.raises(kind) as caught:
        await call
    return caught.value


def test_result_equals_the_engines_own(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server, AsyncClient(address(server), model="scale") as c:
            answer = await c.ask(pictures(20), state(0.25), "go", options={"seed": 3})
            wanted = await asyncio.to_thread(expected, server, 20, 0.25, 3)
            assert answer.actions is not None
            assert answer.actions.dtype == np.float32
            assert np.array_equal(answer.actions, wanted)
            assert answer.inference_s > 0
            cut = await c.infer(pictures(20), state(0.25), "go", horizon=2, options={"seed": 3})
            assert np.array_equal(cut, wanted[:2])
            cut[:] = 0  # the caller's own memory

    run(test)


def test_batches_and_layouts(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server, AsyncClient(address(server)) as client:
            rows = [await asyncio.to_thread(expected, server, v, v / 10, 7) for v in (1, 2, 3)]
            images = {name: np.stack([picture(v) for v in (1, 2, 3)]) for name in CAMERAS}
            states = np.stack([state(v / 10) for v in (1, 2, 3)])
            found = await client.infer(images, states, ["go"] * 3, options={"seed": 7})
            assert found.shape == (3, HORIZON, ACTION_DIM)
            assert np.array_equal(found, np.stack(rows))
            seeds = await client.infer(images, states, ["go"] * 3, options={"seed": [7, 8, 7]})
            assert np.array_equal(seeds[0], rows[0])
            assert not np.array_equal(seeds[1], rows[1])
            chw = pb.InferenceRequest.FromString(_message())
            for image in chw.images:
                pixels = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)
                image.data = np.ascontiguousarray(pixels.transpose(2, 0, 1)).tobytes()
                image.shape[:] = [3, 8, 6]
                image.layout = pb.IMAGE_LAYOUT_CHW
            hwc = pb.InferenceRequest.FromString(chw.SerializeToString())
            for image in hwc.images:
                image.data = np.arange(8 * 6 * 3, dtype=np.uint8).tobytes()
                image.shape[:] = [8, 6, 3]
                image.layout = pb.IMAGE_LAYOUT_HWC
            assert (await _raw(server, chw)).actions == (await _raw(server, hwc)).actions

    run(test)


def test_compressed_pictures(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server, AsyncClient(address(server)) as client:
            wanted = await asyncio.to_thread(expected, server, 90, 0.5, 1)
            for kind in ("PNG", "JPEG"):
                images = {name: _file(picture(90), kind) for name in CAMERAS}
                found = await client.infer(images, state(), "go", options={"seed": 1})
                np.testing.assert_allclose(found, wanted, atol=1.5)  # of 90, by JPEG
                if kind == "PNG":
                    assert np.array_equal(found, wanted)

    run(test)


BAD: dict[str, Any] = {
    "camera": ({"images": {"front": picture()}}, "'front', 'wrist'"),
    "unknown camera": ({"images": {**pictures(), "third": picture()}}, "'third'"),
    "state missing": ({"state": None}, "4 numbers"),
    "state short": ({"state": np.zeros(3)}, r"\[4\]"),
    "state nan": ({"state": np.full(STATE_DIM, np.nan)}, "finite"),
    "prompt": ({"prompt": None}, "instruction must be given"),
    "long prompt": ({"prompt": "x" * 70_000}, "65536 bytes"),
    "horizon": ({"horizon": HORIZON + 1}, r"\[0, 6\]"),
    "option": ({"options": {"colour": 1}}, "colour"),
    "seed": ({"options": {"seed": -1}}, "seed"),
    "rows": ({"prompt": ["a", "b"]}, "has one without a row dim"),
    "many rows": ({"prompt": ["a"] * 5}, "1 to 4 rows"),
    "adapter": ({"prompt": "refuse"}, "must not be 'refuse'"),
}


def test_bad_requests_are_refused_and_the_next_one_works(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server, AsyncClient(address(server)) as client:
            for name, (change, text) in BAD.items():
                values = {"images": pictures(), "state": state(), "prompt": "go", **change}
                with pytest.raises(InvalidRequest, match=text):
                    await client.infer(**values)
                assert (await client.infer(pictures(), state(), "go")).shape == (6, 3), name

    run(test)


def test_bad_messages(tmp_path: Path) -> None:
    """Faults no client of ours can make."""

    def change(edit: Any) -> pb.InferenceRequest:
        message = pb.InferenceRequest.FromString(_message())
        edit(message)
        return message

    invalid, wrong = (
        grpc.StatusCode.INVALID_ARGUMENT,
        [
            (change(lambda m: setattr(m, "request_id", " ")), "request_id"),
            (change(lambda m: setattr(m, "extensions_json", "[1]")), "JSON object"),
            (change(lambda m: setattr(m, "extensions_json", "{nope")), "JSON object"),
            (change(lambda m: setattr(m, "extensions_json", '{"a":' * 3000)), "JSON object"),
            (change(lambda m: setattr(m, "extensions_json", '{"a":[[' * 20 + "]]}" * 20)), "deep"),
            (change(lambda m: setattr(m, "extensions_json", '{"a":NaN}')), "JSON object"),
            (change(lambda m: setattr(m, "extensions_json", '{"options":3}')), "options"),
            (change(lambda m: setattr(m.images[0], "name", "wrist")), "unique"),
            (change(lambda m: setattr(m.images[0], "data", b"x")), "192 bytes"),
            (change(lambda m: setattr(m.images[0], "dtype", 6)), "UINT8"),
            (change(lambda m: setattr(m.images[0], "encoding", 0)), "encoding"),
            (change(lambda m: setattr(m.images[0], "encoding", 2)), "whole JPEG file"),
            (change(lambda m: m.images[0].shape.__setitem__(0, 2**40)), "shape"),
            (change(lambda m: m.robot_state.shape.__setitem__(0, 2**63)), "bytes"),
            (change(lambda m: setattr(m.robot_state, "dtype", 99)), "data types"),
            (change(lambda m: setattr(m.robot_state, "data", b"123")), "16 bytes"),
            (change(lambda m: m.inputs["x"].CopyFrom(m.robot_state)), "inputs"),
            (b"\xff\xff\xff", "parsed"),
            (_message()[:-3], "parsed"),
        ],
    )

    async def test() -> None:
        async with serving(tmp_path) as server:
            for message, text in wrong:
                with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
                    await _raw(server, message)
                assert caught.value.code() == invalid
            unnamed = change(lambda m: setattr(m, "model_name", ""))
            assert (await _raw(server, unnamed)).request_id == "id"

    run(test)


def test_picture_bombs_are_refused_by_their_headers(tmp_path: Path) -> None:
    huge = _png_header(60_000, 60_000)
    jpeg = bytearray(_file(picture(side=16), "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = struct.pack(">HH", 50_000, 50_000)

    async def test() -> None:
        limit = {"max_image_pixels": 10_000}
        async with serving(tmp_path, **limit) as server, AsyncClient(address(server)) as client:
            for bomb in (huge, bytes(jpeg), _file(picture(side=101), "PNG"), huge[:-20]):
                images = {**pictures(), "front": bomb}
                with pytest.raises(InvalidRequest, match=r"pixels|whole PNG"):
                    await client.infer(images, state(), "go")
            # Together, too: each may have 10000 pixels, both 20000.
            both = {name: _file(picture(side=99), "PNG") for name in CAMERAS}
            await client.infer(both, state(), "go")

    run(test)


def test_statuses(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server, AsyncClient(address(server)) as client:
            async with AsyncClient(address(server), model="other") as other:
                error = await fails(other.infer(pictures(), state(), "go"), ModelNotFound)
                assert "'scale'" in str(error)
                assert not error.started
            error = await fails(client.infer(pictures(), state(), "nan"), RequestRefused)
            assert error.reason == "action_rejected"
            assert error.started
            error = await fails(client.infer(pictures(), state(), "explode"), ServerFailed)
            assert error.status == "internal"
            assert "secret" not in str(error)
            await client.infer(pictures(), state(), "go")

    run(test)


def test_too_large_a_message(tmp_path: Path) -> None:
    async def test() -> None:
        limit = {"max_message_bytes": 20_000}
        async with serving(tmp_path, **limit) as server, AsyncClient(address(server)) as client:
            big = {name: picture(side=200) for name in CAMERAS}
            error = await fails(client.infer(big, state(), "go"), ServerBusy)
            assert "larger than max" in str(error)
            await client.infer(pictures(), state(), "go")

    run(test)


def test_queue_is_bounded_and_says_when_to_come_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, max_queue=1) as server, AsyncClient(address(server)) as c:
            GATE.shut()
            first = asyncio.create_task(c.infer(pictures(), state(), "go"))
            await GATE.reached()
            second = asyncio.create_task(c.infer(pictures(), state(), "go"))
            assert server.host is not None
            while server.host.dispatcher.waiting < 1:
                await asyncio.sleep(0.01)
            error = await fails(c.infer(pictures(), state(), "go"), ServerBusy)
            assert error.retry_after is not None
            assert error.retry_after > 0
            assert not error.started
            GATE.open()
            assert (await first).shape == (await second).shape == (6, 3)

    run(test)


def test_deadline_and_cancellation_free_the_queue(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, max_queue=1) as server, AsyncClient(address(server)) as c:
            assert server.host is not None
            queue = server.host.dispatcher
            GATE.shut()
            late = asyncio.create_task(c.infer(pictures(), state(), "go", timeout_s=1.0))
            await GATE.reached()
            waiting = asyncio.create_task(c.infer(pictures(), state(), "go", timeout_s=1.0))
            assert (await fails(late, DeadlineExceeded)).status == "deadline_exceeded"
            await fails(waiting, DeadlineExceeded)
            cancelled = asyncio.create_task(c.infer(pictures(), state(), "go"))
            while queue.waiting + queue.running < 2 and not cancelled.done():
                await asyncio.sleep(0.01)
            cancelled.cancel()
            while queue.waiting:
                await asyncio.sleep(0.01)
            assert queue.running == 1  # the engine still has what nobody waits for
            GATE.open()
            wanted = await asyncio.to_thread(expected, server, 10, 0.5, 4)
            found = await c.infer(pictures(), state(), "go", options={"seed": 4})
            assert np.array_equal(found, wanted)

    run(test)


def test_two_clients_side_by_side(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, max_queue=50) as server:
            wanted = [await asyncio.to_thread(expected, server, 10, 0.5, s) for s in range(8)]

            async def one(seeds: range) -> None:
                async with AsyncClient(address(server), model="scale") as client:
                    for seed in seeds:
                        found = await client.infer(
                            pictures(), state(), "go", options={"seed": seed}
                        )
                        assert np.array_equal(found, wanted[seed])

            await asyncio.gather(one(range(0, 8)), one(range(7, -1, -1)))
            blocking = Client(address(server), model="scale")
            with blocking:
                found = await asyncio.to_thread(
                    blocking.infer, pictures(), state(), "go", options={"seed": 2}
                )
                assert np.array_equal(found, wanted[2])
                assert await asyncio.to_thread(blocking.ready)
                contract = await asyncio.to_thread(blocking.contract)
            assert contract == server.host.contract  # type: ignore[union-attr]
            assert contract.horizon == HORIZON
            assert contract.action_dim == ACTION_DIM
            assert "/a/path" not in str(contract.to_json())
            held = server.host.dispatcher  # type: ignore[union-attr]
            assert contract.extra["max_in_flight"] == held.workers + held.max_queue

    run(test)


def test_requests_share_a_batch_and_none_waits_past_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHYAI_BATCH_WAIT_MS", "1e9")
    monkeypatch.setattr(engine_host, "RUN_SHARE", 0.05)  # of the deadline: the rest is ours

    async def test() -> None:
        async with (
            serving(tmp_path, warm_up=False) as server,
            AsyncClient(address(server), model="scale") as client,
        ):
            host = server.host
            assert host is not None
            assert host.dispatcher.workers == 8  # two batches of four rows

            async def ask(seed: int, **more: Any) -> Any:
                return await client.infer(pictures(), state(), "go", options={"seed": seed}, **more)

            GATE.shut()
            # With time to spare: the first's time at the gate is what a batch is expected to take.
            asking = [asyncio.create_task(ask(0, timeout_s=600.0))]
            await GATE.reached()  # nothing is known of times yet, so it went at once
            asking += [asyncio.create_task(ask(seed, timeout_s=600.0)) for seed in range(1, 5)]
            queue = host.engine._back._loop
            while queue._ready_rows() < 4:  # what is prepared when the model is free goes at once
                await asyncio.sleep(0.001)
            GATE.open()
            found = await asyncio.gather(*asking)
            (replica,) = host.stats(max_age_s=0)["replicas"]
            assert replica["batches"]["rows"] == {1: 1, 4: 1}
            alone = await ask(2, timeout_s=5.0)  # nobody joins it
            assert np.allclose(alone, found[2])

    run(test)


# ---------------------------------------------------------------- plain messages


def _message() -> bytes:
    """Return a genuine request, made without any code of the client."""
    images = [
        pb.Image(
            name=name,
            data=picture().tobytes(),
            shape=[8, 8, 3],
            dtype=pb.DATA_TYPE_UINT8,
            encoding=pb.IMAGE_ENCODING_RAW,
            layout=pb.IMAGE_LAYOUT_HWC,
        )
        for name in CAMERAS
    ]
    found = pb.InferenceRequest(
        request_id="id",
        images=images,
        robot_state=pb.Tensor(data=state().tobytes(), shape=[4], dtype=pb.DATA_TYPE_FLOAT32),
        instruction="go",
        model_name="scale",
        extensions_json='{"options": {"seed": 1}}',
    )
    return found.SerializeToString()


async def _raw(server: Any, message: pb.InferenceRequest | bytes) -> pb.InferenceResponse:
    payload = message if isinstance(message, bytes) else message.SerializeToString()
    async with grpc.aio.insecure_channel(address(server)) as channel:
        raw = await channel.unary_unary(INFER)(payload, timeout=20)
    return pb.InferenceResponse.FromString(raw)


def _file(pixels: Any, kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def _png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
