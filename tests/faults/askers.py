"""One plain client per protocol: a whole exchange for one chunk, blocking, with its own timeout."""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import msgpack
import numpy as np
import zmq
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus
from websockets.sync.client import connect

from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from tests.faults.model_process import ACTION_DIM, CAMERAS, HORIZON, STATE_DIM
from tests.faults.robots import INFER, message
from tests.gateway import lerobot_robot

PICTURE = np.zeros((8, 8, 3), np.uint8)
STATE = np.zeros(STATE_DIM, np.float32)
LIMIT_S = 15.0


class Refused(Exception):
    """The server said no, in the protocol's own words: the request was not accepted."""


def _openpi_array(value: np.ndarray[Any, Any]) -> dict[bytes, Any]:
    return {
        b"__ndarray__": True,
        b"data": value.tobytes(),
        b"dtype": value.dtype.str,
        b"shape": value.shape,
    }


def _nd(value: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return an array as msgpack-numpy writes it."""
    return {
        "nd": True,
        "type": value.dtype.str,
        "kind": b"",
        "shape": value.shape,
        "data": value.tobytes(),
    }


def _actions(data: bytes) -> float:
    """Return the number of the server that answered."""
    assert len(data) == 4 * HORIZON * ACTION_DIM
    (number,) = struct.unpack_from("<f", data)
    return float(number)


def native(port: int, limit_s: float = LIMIT_S) -> float:
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        try:
            raw = channel.unary_unary(INFER)(message("n1"), timeout=limit_s)
        except grpc.RpcError as error:
            started = dict(error.trailing_metadata() or ()).get("x-phyai-started")
            if started == "0" or "failed to connect" in str(error.details()).lower():
                raise Refused(error.details()) from None
            raise
    reply = pb.InferenceResponse.FromString(raw)
    assert reply.request_id == "n1"
    return _actions(reply.actions.data)


def lerobot(port: int, limit_s: float = LIMIT_S) -> float:
    with lerobot_robot.Robot(port, limit_s) as robot:
        assert robot.ready() is grpc.StatusCode.OK
        code, text = robot.set_up(lerobot_setup())
        assert code is grpc.StatusCode.OK, text
        return lerobot_chunk(robot)


def lerobot_setup() -> bytes:
    cameras = dict.fromkeys(CAMERAS, (8, 8, 3))
    return lerobot_robot.setup("stub", cameras=cameras)


def lerobot_chunk(robot: lerobot_robot.Robot, timestep: int = 0) -> float:
    cameras = dict.fromkeys(CAMERAS, (8, 8, 3))
    found = lerobot_robot.values(cameras=cameras)
    code, text = robot.send(lerobot_robot.observation(timestep, found=found))
    assert code is grpc.StatusCode.OK, text
    chunk = robot.actions()
    assert [one.timestep for one in chunk] == list(range(timestep, timestep + HORIZON))
    return float(chunk[0].action[0])


def openpi(port: int, limit_s: float = LIMIT_S) -> float:
    try:
        client = connect(
            f"ws://127.0.0.1:{port}", compression=None, max_size=None, open_timeout=limit_s
        )
    except (OSError, EOFError, InvalidMessage) as error:
        raise Refused(type(error).__name__) from None
    except InvalidStatus as error:
        if error.response.status_code == 503:
            raise Refused(error.response.body.decode()) from None
        raise
    with client, _going_away():
        client.recv(timeout=limit_s)
        seen = {f"observation/{name}": _openpi_array(PICTURE) for name in CAMERAS}
        seen |= {"observation/state": _openpi_array(STATE), "prompt": "go"}
        client.send(msgpack.packb(seen))
        got = client.recv(timeout=limit_s)
    if isinstance(got, str):
        raise Refused(got)
    found = msgpack.unpackb(got, strict_map_key=False)
    return _actions(found["actions"][b"data"])


@contextmanager
def _going_away() -> Iterator[None]:
    """Close code 1001 is the gateway's word for "ends; this was not started"."""
    try:
        yield
    except ConnectionClosed as error:
        if error.rcvd is not None and error.rcvd.code == 1001:
            raise Refused(error.rcvd.reason) from None
        raise


def gr00t_socket(port: int, limit_s: float = LIMIT_S) -> Any:
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, int(limit_s * 1e3))
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def gr00t(port: int, limit_s: float = LIMIT_S) -> float:
    with gr00t_socket(port, limit_s) as socket:
        seen = {
            "video": {name: _nd(PICTURE.reshape(1, 1, 8, 8, 3)) for name in CAMERAS},
            "state": {"arm": _nd(STATE.reshape(1, 1, -1))},
            "language": {"annotation.human.task_description": [["go"]]},
        }
        body = {"endpoint": "get_action", "data": {"observation": seen, "options": None}}
        socket.send(msgpack.packb(body))
        found = msgpack.unpackb(socket.recv(), strict_map_key=False)
    if isinstance(found, dict) and "error" in found:
        raise Refused(found["error"])
    arm = {str(k, "ascii") if isinstance(k, bytes) else k: v for k, v in found[0]["arm"].items()}
    return _actions(arm["data"])


def rlinf(port: int, limit_s: float = LIMIT_S) -> float:
    seen = {
        "main_images": _openpi_array(PICTURE[None]),
        "wrist_images": _openpi_array(PICTURE[None]),
        "states": _openpi_array(STATE[None]),
        "task_descriptions": ["go"],
    }
    body = {"model_name": "stub", "observation": seen, "metadata": {"batch_size": 1}}
    found = msgpack.unpackb(
        _post(port, "/v1/actions/generations", msgpack.packb(body), "application/msgpack", limit_s),
        strict_map_key=False,
    )
    actions = found["actions"]
    data = actions[b"data"] if b"data" in actions else actions["data"]
    return _actions(data)


def kserve(port: int, limit_s: float = LIMIT_S) -> float:
    rows: list[dict[str, Any]] = [
        {"name": name, "datatype": "UINT8", "shape": [1, 8, 8, 3], "data": [0] * 192}
        for name in CAMERAS
    ]
    rows.append({"name": "state", "datatype": "FP32", "shape": [1, STATE_DIM], "data": [0.0] * 3})
    rows.append({"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["go"]})
    body = json.dumps({"inputs": rows}).encode()
    found = json.loads(_post(port, "/v2/models/stub/infer", body, "application/json", limit_s))
    (actions,) = [one for one in found["outputs"] if one["name"] == "actions"]
    assert len(actions["data"]) == HORIZON * ACTION_DIM
    return float(actions["data"][0])


def status(port: int, limit_s: float = LIMIT_S) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    connection.request("GET", "/")
    answer = connection.getresponse()
    assert answer.status == 200
    assert b"<html" in answer.read()
    connection.request("GET", "/v1/backends")
    assert json.loads(connection.getresponse().read())["backends"]
    connection.close()
    return 0.0


def _post(port: int, path: str, body: bytes, kind: str, limit_s: float) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    try:
        try:
            connection.connect()
        except ConnectionRefusedError as error:
            raise Refused("connection refused") from error
        connection.request("POST", path, body, {"Content-Type": kind})
        answer = connection.getresponse()
        data = answer.read()
        if answer.status == 503:
            raise Refused(data.decode())
        assert answer.status == 200, data
        return data
    finally:
        connection.close()


ASK: dict[str, Callable[..., float]] = {
    "native": native,
    "http": status,
    "lerobot": lerobot,
    "openpi": openpi,
    "gr00t": gr00t,
    "rlinf": rlinf,
    "kserve": kserve,
}
"""By listener; each returns the number of the server that answered, and fails loudly."""
