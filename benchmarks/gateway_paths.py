"""Clients of each path to the model server: one observation, as each protocol sends it.

Frames are made once, so that no client's own encoder is timed; every path sends the same pictures.
"""

from __future__ import annotations

import pickletools
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import zmq
import zmq.asyncio
from benchmarks.gateway_processes import (
    ACTION_DIM,
    CAMERAS,
    CHECK,
    INFER,
    JOINTS,
    MODEL,
    OPTIONS,
    SIDE,
    STATE_DIM,
)
from websockets.asyncio.client import ClientConnection, connect

from phyai_gateway.decode.arrays import Array, make_array
from phyai_gateway.decode.numpy_msgpack import (
    GrootHook,
    MsgpackLimits,
    openpi_hook,
    pack_nd_form,
    pack_openpi,
    unpack,
)
from phyai_gateway.messages import ImageData, InferRequest, TensorData
from phyai_gateway.proto.codec import decode_reply, encode_request
from tests.gateway import lerobot_robot

SHAPE = (SIDE, SIDE, 3)
_random = np.random.default_rng(0)
PIXELS = {name: _random.integers(0, 256, SHAPE, np.uint8) for name in CAMERAS}
STATE = (np.arange(STATE_DIM, dtype=np.float32) / 8).tolist()
STATE_BYTES = struct.pack(f"<{STATE_DIM}f", *STATE)
GO = "pick up the cube"


class Client(ABC):
    """One robot. ack_s: seconds until an observation was taken, where that is told apart."""

    ack_s: float | None = None

    @abstractmethod
    async def ask(self, check: bool = False) -> bytes:
        """Send the observation, return the answer as it came."""

    @abstractmethod
    def actions(self, answer: bytes) -> bytes:
        """Return the float32 actions of an answer."""

    @abstractmethod
    async def close(self) -> None: ...


class Raw(Client):
    """The native protocol with raw bytes; all of one channel share its connection."""

    def __init__(self, port: int, shared: Any = None) -> None:
        self.channel = shared or grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        )
        self._ask = self.channel.unary_unary(INFER)
        self._frames = [_native(GO), _native(CHECK)]

    async def ask(self, check: bool = False) -> bytes:
        answer: bytes = await self._ask(self._frames[check], timeout=10.0)
        return answer

    def actions(self, answer: bytes) -> bytes:
        found = decode_reply(answer).actions
        assert found is not None
        return bytes(found.data)

    async def close(self) -> None:
        await self.channel.close()


class Lerobot(Client):
    """A LeRobot robot: as in its client, a call for actions waits while an observation is sent."""

    @classmethod
    async def open(cls, port: int) -> Lerobot:
        found = cls(port)
        await found.channel.unary_unary("/transport.AsyncInference/Ready")(b"", timeout=10.0)
        setup = lerobot_robot.setup(
            MODEL, JOINTS, dict.fromkeys(CAMERAS, SHAPE), actions_per_chunk=50
        )
        body = b"\x0a" + lerobot_robot.varint(len(setup)) + setup
        await found.channel.unary_unary("/transport.AsyncInference/SendPolicyInstructions")(
            body, timeout=10.0
        )
        return found

    def __init__(self, port: int) -> None:
        self.channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", (("grpc.use_local_subchannel_pool", 1),)
        )
        self._send = self.channel.stream_unary("/transport.AsyncInference/SendObservations")
        self._get = self.channel.unary_unary("/transport.AsyncInference/GetActions")
        self._messages = [_lerobot(GO), _lerobot(CHECK)]

    async def ask(self, check: bool = False) -> bytes:
        actions = self._get(b"", timeout=10.0)
        began = time.perf_counter()
        await self._send(iter(self._messages[check]), timeout=10.0)
        self.ack_s = time.perf_counter() - began
        answer: bytes = await actions
        if not answer:
            raise RuntimeError("the gateway had no actions for an observation that must go")
        return answer

    def actions(self, answer: bytes) -> bytes:
        """Read the floats of the pickle, time stamps left out, without loading it."""
        at = answer.index(b"\x80\x04")
        found = [v for op, v, _ in pickletools.genops(answer[at:]) if op.name == "BINFLOAT"]
        rows = [found[start + 1 : start + 1 + ACTION_DIM] for start in _starts(found)]
        flat = [value for row in rows for value in row]
        return struct.pack(f"<{len(flat)}f", *flat)

    async def close(self) -> None:
        await self.channel.close()


class Openpi(Client):
    """An openpi robot on its WebSocket."""

    @classmethod
    async def open(cls, port: int) -> Openpi:
        connection = await connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None)
        await connection.recv()  # the model's metadata
        return cls(connection)

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        arrays: dict[str, Any] = {name: _array(PIXELS[name]) for name in CAMERAS}
        arrays["state"] = make_array("<f4", (STATE_DIM,), STATE_BYTES)
        self._frames = [pack_openpi({**arrays, "prompt": text}) for text in (GO, CHECK)]

    async def ask(self, check: bool = False) -> bytes:
        await self._connection.send(self._frames[check])
        answer = await self._connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"the gateway refused: {answer}")
        return answer

    def actions(self, answer: bytes) -> bytes:
        return _flat(unpack(answer, openpi_hook, MsgpackLimits())["actions"])

    async def close(self) -> None:
        await self._connection.close()


class Gr00t(Client):
    """A GR00T robot of the newest generation on its REQ socket."""

    def __init__(self, port: int, context: Any) -> None:
        self._socket = context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._frames = [_gr00t(GO), _gr00t(CHECK)]

    async def ask(self, check: bool = False) -> bytes:
        await self._socket.send(self._frames[check])
        answer: bytes = await self._socket.recv()
        return answer

    def actions(self, answer: bytes) -> bytes:
        found = unpack(answer, GrootHook(), MsgpackLimits())
        if not isinstance(found, list):
            raise RuntimeError(f"the gateway refused: {found}")
        return _flat(found[0]["action"])

    async def close(self) -> None:
        self._socket.close()


async def clients(path: str, port: int, count: int) -> list[Client]:
    """Return that many robots of a path; on the native ones they share a connection."""
    if path == "lerobot":
        return [await Lerobot.open(port) for _ in range(count)]
    if path == "openpi":
        return [await Openpi.open(port) for _ in range(count)]
    if path == "gr00t":
        context = zmq.asyncio.Context.instance()
        return [Gr00t(port, context) for _ in range(count)]
    first = Raw(port)
    return [first, *(Raw(port, first.channel) for _ in range(count - 1))]


# ---------------------------------------------------------------- frames


def _native(text: str) -> bytes:
    images = tuple(ImageData(name, PIXELS[name].tobytes(), SHAPE) for name in CAMERAS)
    state = TensorData(STATE_BYTES, (STATE_DIM,), "float32")
    return encode_request(InferRequest("r1", MODEL, images=images, state=state, instruction=text))


def _lerobot(text: str) -> list[bytes]:
    joints = dict(zip(JOINTS, STATE, strict=True))
    return lerobot_robot.chunks(
        lerobot_robot.observation(found={**joints, **PIXELS, "task": text}, must_go=True)
    )


def _gr00t(text: str) -> bytes:
    video = {name: _array(PIXELS[name][None, None]) for name in CAMERAS}
    state = {"state": make_array("<f4", (1, 1, STATE_DIM), STATE_BYTES)}
    language = {"annotation.human.task_description": [[text]]}
    observation = {"video": video, "state": state, "language": language}
    return pack_nd_form({"endpoint": "get_action", "data": {"observation": observation}})


def _array(pixels: Any) -> Array:
    return make_array("|u1", pixels.shape, pixels.tobytes())


def _flat(array: Array) -> bytes:
    return bytes(array.row_major())


def _starts(found: Sequence[object]) -> range:
    """Return where the rows begin: each is a time stamp and its actions."""
    return range(0, len(found), 1 + ACTION_DIM)
