"""A stand-in LeRobot client: genuine pickles, chunked streams, and its reading of replies."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

HELPERS = "lerobot.async_inference.helpers"
CHUNK_BYTES = 2 * 1024 * 1024
JOINTS = ("shoulder_pan.pos", "shoulder_lift.pos", "gripper.pos")
CAMERAS = {"front": (8, 6, 3), "wrist": (4, 6, 3)}


def pickled(name: str, state: Mapping[str, Any]) -> bytes:
    """Return what a client sends for an object of a class that isn't installed here."""
    body = pickle.dumps(dict(state), 4)[2:-1]  # without PROTO and STOP
    while body[:1] == b"\x95":
        body = body[9:]  # small states have one frame
    text = b"".join(b"\x8c" + bytes([len(t)]) + t for t in (HELPERS.encode(), name.encode()))
    return b"\x80\x04" + text + b"\x93)\x81" + body + b"b."


def setup(
    policy: str = "policy",
    joints: tuple[str, ...] = JOINTS,
    cameras: Mapping[str, tuple[int, ...]] | None = None,
    **changes: Any,
) -> bytes:
    features: dict[str, Any] = {}
    if joints:
        features["observation.state"] = {
            "dtype": "float32",
            "shape": (len(joints),),
            "names": list(joints),
        }
    for name, shape in (CAMERAS if cameras is None else cameras).items():
        features[f"observation.images.{name}"] = {
            "dtype": "image",
            "shape": tuple(shape),
            "names": ["height", "width", "channels"],
            "info": {"is_depth_map": shape[2] == 1},
        }
    state: dict[str, Any] = {
        "policy_type": "pi05",
        "pretrained_name_or_path": policy,
        "lerobot_features": features,
        "actions_per_chunk": 10,
        "device": "cuda",
        "rename_map": {},
    }
    return pickled("RemotePolicyConfig", state | changes)


def values(
    joints: tuple[str, ...] = JOINTS, cameras: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Any]:
    """Return one observation's entries."""
    found: dict[str, Any] = {joint: 0.5 + index for index, joint in enumerate(joints)}
    for index, (name, shape) in enumerate((CAMERAS if cameras is None else cameras).items()):
        dtype = np.uint16 if shape[2] == 1 else np.uint8
        count = int(np.prod(shape))
        found[name] = ((np.arange(count) + index) % 251).astype(dtype).reshape(shape)
    return found | {"task": "pick up the cube"}


def observation(
    timestep: int = 0, must_go: bool = True, found: Mapping[str, Any] | None = None, **changes: Any
) -> bytes:
    state = {
        "timestamp": 1000.0 + timestep,
        "timestep": timestep,
        "observation": dict(values() if found is None else found),
        "must_go": must_go,
    }
    return pickled("TimedObservation", state | changes)


def message(state: int, data: bytes) -> bytes:
    """Return one protobuf ``Observation``."""
    return (b"\x08" + bytes([state]) if state else b"") + b"\x12" + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))


def chunks(payload: bytes) -> list[bytes]:
    """Return the messages of one payload as the client cuts it; none for an empty one."""
    parts = [payload[at : at + CHUNK_BYTES] for at in range(0, len(payload), CHUNK_BYTES)]
    states = [1] + [2] * (len(parts) - 2) + [3] if len(parts) > 1 else [3]
    return [message(state, part) for state, part in zip(states, parts, strict=False)]


@dataclass
class TimedAction:
    timestamp: float = 0.0
    timestep: int = 0
    action: Any = None


class _ReplyReader(pickle.Unpickler):
    """Reads our own reply as the client does, torch.tensor giving a float32 array."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (HELPERS, "TimedAction"):
            return TimedAction
        assert (module, name) == ("torch", "tensor")
        return lambda rows: np.asarray(rows, np.float32)


def read_actions(message: bytes) -> list[TimedAction]:
    """Return the elements of an ``Actions`` message; none when it is empty."""
    if not message:
        return []
    assert message[0] == 0x0A
    at, shift, length = 1, 0, 0
    while True:
        length |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if message[at - 1] < 0x80:
            break
    assert length == len(message) - at
    found: list[TimedAction] = _ReplyReader(io.BytesIO(message[at:])).load()
    return found


def split_stream(data: bytes) -> list[bytes]:
    """Return the messages of a recorded stream."""
    out, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        out.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return out


class Robot:
    """One connection. Status codes come back as grpc.StatusCode; a reply as bytes."""

    def __init__(self, port: int, limit_s: float = 20.0) -> None:
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{port}",
            options=(
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", 4 << 20),
                ("grpc.enable_retries", 0),
            ),
        )
        self.limit_s = limit_s

    def __enter__(self) -> Robot:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def ready(self) -> grpc.StatusCode:
        return self._unary("Ready", b"")[0]

    def set_up(self, payload: bytes) -> tuple[grpc.StatusCode, str]:
        body = b"\x0a" + varint(len(payload)) + payload if payload else b""
        code, _, text = self._unary("SendPolicyInstructions", body)
        return code, text

    def send(self, payload: bytes) -> tuple[grpc.StatusCode, str]:
        return self.send_messages(chunks(payload))

    def send_messages(self, messages: Iterable[bytes]) -> tuple[grpc.StatusCode, str]:
        call = self.channel.stream_unary(_path("SendObservations"))
        iterator: Iterator[bytes] = iter(messages)
        try:
            reply = call(iterator, timeout=self.limit_s)
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
        assert reply == b""
        return grpc.StatusCode.OK, ""

    def actions(self) -> list[TimedAction]:
        code, reply, text = self._unary("GetActions", b"")
        assert code is grpc.StatusCode.OK, text
        return read_actions(reply)

    def actions_status(self) -> tuple[grpc.StatusCode, str]:
        code, _, text = self._unary("GetActions", b"")
        return code, text

    def _unary(self, name: str, body: bytes) -> tuple[grpc.StatusCode, bytes, str]:
        try:
            reply = self.channel.unary_unary(_path(name))(body, timeout=self.limit_s)
        except grpc.RpcError as error:
            return error.code(), b"", error.details() or ""
        return grpc.StatusCode.OK, reply, ""


def _path(name: str) -> str:
    return f"/transport.AsyncInference/{name}"
