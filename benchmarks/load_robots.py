"""Robots for ``load.py``: each ticks at its own rate over its own connection, in three protocols.

All bytes but a request's id are made once, so that the generator costs little beside the gateway.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any

import grpc
import msgpack
import numpy as np
from benchmarks.load_backend import CAMERA, HORIZON, JOINTS, MODEL, STATE_DIM
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from phyai_gateway.proto import robot_inference_v1_pb2 as pb

INFER = "/robot.inference.v1.ModelInference/Infer"
SIDE = 129  # 129 x 129 x 3 bytes: 50 kB, raw
MOST_AT_ONCE = 4  # requests of one robot; further ticks are skipped
DEADLINE_S = 5.0
HELPERS = "lerobot.async_inference.helpers"
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
REFUSALS = {"resource_exhausted", "unavailable", "deadline_exceeded"}


class Tally:
    """What became of the requests: counts by (protocol, outcome), and times of good answers.

    Outcome ``skipped``: a tick at which the robot still waited; nothing was sent.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.errors: list[str] = []
        self.last_bad = 0.0

    def begin(self) -> Counter[tuple[str, str]]:
        """Count anew; returns what was counted so far."""
        counts, self.counts = self.counts, Counter()
        self.seconds.clear()
        self.last_bad = 0.0
        return counts

    def note(self, protocol: str, outcome: str, began: float, text: str = "") -> None:
        self.counts[protocol, outcome] += 1
        if outcome == "ok":
            self.seconds[protocol].append(time.monotonic() - began)
        if outcome in ("ok", "skipped"):
            return
        self.last_bad = max(self.last_bad, began)
        if outcome == "error" and len(self.errors) < 20:
            self.errors.append(f"{protocol}: {text}")

    def total(self, *outcomes: str) -> int:
        return sum(count for (_, found), count in self.counts.items() if found in outcomes)

    def quantile_ms(self, protocol: str, q: float) -> float:
        found = sorted(self.seconds[protocol])
        return 1e3 * found[min(int(q * len(found)), len(found) - 1)] if found else float("nan")


class Robot(ABC):
    """One robot. ``start`` connects; a tick sends one observation and waits for its actions."""

    protocol = ""

    def __init__(self, number: int, port: int, tally: Tally) -> None:
        self.number, self.port, self.tally = number, port, tally
        self._under_way: set[asyncio.Task[None]] = set()
        self._most = MOST_AT_ONCE

    @abstractmethod
    async def start(self) -> None:
        """Connect."""

    @abstractmethod
    async def ask(self, began: float) -> None:
        """Send one observation, and note what became of it."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect."""

    async def work(self, period_s: float, first_s: float, until: float) -> None:
        """Tick until the time; ticks do not wait for answers, as a control loop does not."""
        due = time.monotonic() + first_s
        while due < until:
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            if len(self._under_way) < self._most:
                task = asyncio.create_task(self._one())
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
            else:
                self.tally.note(self.protocol, "skipped", time.monotonic())
            due += period_s
        if self._under_way:
            await asyncio.wait(set(self._under_way))

    async def _one(self) -> None:
        began = time.monotonic()
        try:
            await self.ask(began)
        except Exception as error:
            self.tally.note(self.protocol, "error", began, repr(error)[:200])


class NativeRobot(Robot):
    """Native gRPC with a JPEG. named: tells who it is, so that its newest observation wins."""

    protocol = "native"

    def __init__(self, number: int, port: int, tally: Tally, jpeg: bytes, named: bool) -> None:
        super().__init__(number, port, tally)
        image = pb.Image(name=CAMERA, data=jpeg, encoding=pb.IMAGE_ENCODING_JPEG)
        state = pb.Tensor(data=bytes(4 * STATE_DIM), shape=(STATE_DIM,), dtype=6)
        whole = pb.InferenceRequest(
            images=[image], robot_state=state, instruction="pick it up", model_name=MODEL
        )
        self._rest = whole.SerializeToString()
        self._metadata = (("x-robot-id", f"robot-{number}"),) if named else ()
        self._ids = itertools.count()

    async def start(self) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", OPTIONS)
        self._call = self._channel.unary_unary(INFER)
        await self._channel.channel_ready()

    async def ask(self, began: float) -> None:
        name = f"{self.number}-{next(self._ids)}".encode()
        head = b"\x0a" + bytes([len(name)]) + name
        try:
            raw = await self._call(head + self._rest, timeout=DEADLINE_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            code, text = error.code().name.lower(), error.details() or ""
            if code == "cancelled" and "newer" in text:
                code = "superseded"
            elif code == "deadline_exceeded" and "newer" in text:
                code = "stale"
            elif code not in REFUSALS:
                code = "error"
            self.tally.note(self.protocol, code, began, text)
            return
        good = raw.startswith(head) and len(raw) > 4 * HORIZON
        self.tally.note(self.protocol, "ok" if good else "error", began, "another's answer")

    async def close(self) -> None:
        await self._channel.close()


class DirectRobot(NativeRobot):
    """The same without a gateway: what the path costs by itself."""

    protocol = "direct"


class OpenpiRobot(Robot):
    """openpi's WebSocket with a raw image, one request at a time."""

    protocol = "openpi"

    def __init__(self, number: int, port: int, tally: Tally) -> None:
        super().__init__(number, port, tally)
        self._most = 1
        image = np.full((SIDE, SIDE, 3), 7, np.uint8)
        seen = {
            f"observation/{CAMERA}": _array(image),
            "observation/state": _array(np.zeros(STATE_DIM, np.float32)),
            "prompt": "pick it up",
        }
        self._frame = msgpack.packb(seen)

    async def start(self) -> None:
        self._socket = await connect(
            f"ws://127.0.0.1:{self.port}",
            compression=None,
            max_size=None,
            ping_interval=None,
            open_timeout=60,
        )
        await self._socket.recv()

    async def ask(self, began: float) -> None:
        try:
            await self._socket.send(self._frame)
            got = await self._socket.recv()
        except ConnectionClosed as error:
            self.tally.note(self.protocol, "error", began, repr(error))
            await self.start()
            return
        if isinstance(got, bytes):
            self.tally.note(self.protocol, "ok", began)
            return
        code = got.partition(":")[0]
        refused = code if code in REFUSALS else "error"
        self.tally.note(self.protocol, refused, began, got[:200])
        await self.close()
        await self.start()

    async def close(self) -> None:
        await self._socket.close()


class LerobotRobot(Robot):
    """LeRobot's asynchronous client with a raw image: send, then poll for the chunk."""

    protocol = "lerobot"

    def __init__(self, number: int, port: int, tally: Tally) -> None:
        super().__init__(number, port, tally)
        self._most = 1
        self._steps = itertools.count()
        self._image = np.full((SIDE, SIDE, 3), 7, np.uint8)

    async def start(self) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", OPTIONS)
        service = "/transport.AsyncInference/"
        await self._channel.unary_unary(f"{service}Ready")(b"", timeout=30)
        setup = _pickled("RemotePolicyConfig", _policy())
        body = _field(1, setup)
        await self._channel.unary_unary(f"{service}SendPolicyInstructions")(body, timeout=30)
        self._send = self._channel.stream_unary(f"{service}SendObservations")
        self._get = self._channel.unary_unary(f"{service}GetActions")

    async def ask(self, began: float) -> None:
        step = next(self._steps)
        seen: dict[str, Any] = dict.fromkeys(JOINTS, 0.5)
        seen |= {CAMERA: self._image, "task": "pick it up"}
        state = {"timestamp": 1.0, "timestep": step, "observation": seen, "must_go": True}
        message = b"\x08\x03" + _field(2, _pickled("TimedObservation", state))
        try:
            await self._send(iter([message]), timeout=DEADLINE_S)
            reply = await self._get(b"", timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            code = error.code().name.lower()
            code = code if code in REFUSALS else "error"
            self.tally.note(self.protocol, code, began, error.details() or "")
            return
        # An empty chunk is how this protocol says that nothing came of the observation.
        self.tally.note(self.protocol, "ok" if reply else "empty", began)

    async def close(self) -> None:
        with suppress(Exception):
            await self._channel.close()


def _array(value: np.ndarray[Any, Any]) -> dict[bytes, Any]:
    return {
        b"__ndarray__": True,
        b"data": value.tobytes(),
        b"dtype": value.dtype.str,
        b"shape": value.shape,
    }


def _policy() -> dict[str, Any]:
    features = {
        "observation.state": {"dtype": "float32", "shape": (STATE_DIM,), "names": list(JOINTS)},
        f"observation.images.{CAMERA}": {
            "dtype": "image",
            "shape": (SIDE, SIDE, 3),
            "names": ["height", "width", "channels"],
        },
    }
    return {
        "policy_type": "pi05",
        "pretrained_name_or_path": MODEL,
        "lerobot_features": features,
        "actions_per_chunk": HORIZON,
        "device": "cpu",
        "rename_map": {},
    }


def _pickled(name: str, state: dict[str, Any]) -> bytes:
    """Return the pickle of an object of LeRobot's, whose package is not needed for that."""
    body = pickle.dumps(state, 4)[2:-1]
    if body[:1] == b"\x95" and int.from_bytes(body[1:9], "little") == len(body) - 9:
        body = body[9:]
    kind = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (HELPERS, name))
    return b"\x80\x04" + kind + b"\x93)\x81" + body + b"b."


def _field(number: int, data: bytes) -> bytes:
    """Return one protobuf field of bytes."""
    size, out = len(data), bytearray([number << 3 | 2])
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(out) + bytes([size]) + data
