"""Plain clients of the listeners, and what each golden payload needs around it."""

from __future__ import annotations

import http.client
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import zmq
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.arrays import Array
from phyai_gateway.decode.limits import DecodeError
from phyai_gateway.decode.numpy_msgpack import GrootHook, openpi_hook, unpack
from phyai_gateway.decode.pickle_nodes import Instance
from phyai_gateway.decode.pickle_reader import read_pickle
from tests.gateway import lerobot_robot as robot
from tests.gateway.golden_serving import Payload, is_array

LIMIT_S = 20.0


# ---------------------------------------------------------------- openpi


@dataclass
class Answer:
    """What an openpi client got: a result map, or an error text and the close code."""

    result: dict[str, Any] | None = None
    text: str = ""
    code: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def ask_openpi(
    port: int, frame: bytes | str, path: str = "/", headers: Mapping[str, str] | None = None
) -> Answer:
    """Connect as openpi's client does, send one frame, and return the answer."""
    with connect(
        f"ws://127.0.0.1:{port}{path}",
        compression=None,
        max_size=None,
        additional_headers=dict(headers or {}),
        close_timeout=LIMIT_S,
    ) as socket:
        first = socket.recv(timeout=LIMIT_S)
        assert isinstance(first, bytes)
        metadata = unpack(first, openpi_hook)
        text = ""
        try:
            socket.send(frame)
            got = socket.recv(timeout=LIMIT_S)
            if isinstance(got, bytes):
                return Answer(unpack(got, openpi_hook), metadata=metadata)
            text = got
            socket.recv(timeout=LIMIT_S)
        except ConnectionClosed as closed:
            code = closed.rcvd.code if closed.rcvd is not None else None
            return Answer(text=text, code=code, metadata=metadata)
    raise AssertionError("an error text must be followed by a close")


LIBERO = ModelContract(
    "libero", cameras={"image": None, "wrist_image": None}, state_dim=8, action_dim=7
)
_STATES = (
    ("observation/state",),
    ("state",),
    ("observation/joint_position", "observation/gripper_position"),
)


def state_keys(found: Mapping[str, Any]) -> tuple[str, ...]:
    return next((keys for keys in _STATES if all(key in found for key in keys)), ())


def openpi_images(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the images of a decoded observation by the name the model has for them."""
    flat = {**found, **(found.get("images") or {})}
    return {k.rpartition("/")[2]: v for k, v in flat.items() if _has_rank(v, 3)}


def _has_rank(value: Any, rank: int) -> bool:
    return is_array(value, rank) or (isinstance(value, Array) and len(value.shape) == rank)


def openpi_contract(name: str, decoded: Mapping[str, Any]) -> ModelContract:
    """Return the contract that an accepted observation was made for."""
    width = sum(
        int(np.prod(decoded[key]["shape"])) if is_array(decoded[key]) else 1
        for key in state_keys(decoded)
    )
    return ModelContract(
        name,
        cameras=dict.fromkeys(openpi_images(decoded)),
        state_dim=width,
        action_dim=7,
        needs_prompt="prompt" in decoded,
    )


# ---------------------------------------------------------------- GR00T


class GrootClient:
    """A REQ socket; one reply per request."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(LIMIT_S * 1000))
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def __enter__(self) -> GrootClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def ask(self, body: bytes) -> tuple[Any, str | None]:
        """Return the decoded reply and the form of its arrays."""
        self._socket.send(body)
        hook = ClientHook()
        return unpack(self._socket.recv(), hook), hook.form


class ClientHook(GrootHook):
    """As the server's, but it lets modality configurations through, which only servers send."""

    def __call__(self, found: dict[Any, Any]) -> Any:
        if "__ModalityConfig__" in found or "__ModalityConfig_class__" in found:
            return found
        return super().__call__(found)


def groot_groups(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return an observation's video, state and language, whichever form it has."""
    found = data.get("observation", data)
    if "video" in found:
        return {name: dict(found[name]) for name in ("video", "state", "language")}
    groups: dict[str, dict[str, Any]] = {"video": {}, "state": {}, "language": {}}
    for key, value in found.items():
        group, _, name = key.partition(".")
        if group in ("video", "state"):
            groups[group][name] = value
        else:
            groups["language"][key] = value
    return groups


def groot_contract(name: str, decoded: Mapping[str, Any] | None) -> ModelContract:
    """Return the contract that an accepted observation was made for; a small one else."""
    groups = groot_groups((decoded or {}).get("data") or {})
    video = groups["video"] or {"front": None, "wrist": None}
    state = {k: v["shape"][-1] for k, v in groups["state"].items()} or {"single_arm": 5}
    actions = {"single_arm": 5, "gripper": 1}
    return ModelContract(
        name,
        cameras=dict.fromkeys(video),
        state_dim=sum(state.values()),
        action_dim=6,
        max_rows=4,
        extra={"gr00t": {"state": state, "actions": actions}},
    )


# ---------------------------------------------------------------- LeRobot


@dataclass(frozen=True)
class Candidate:
    """A setup that an observation may have been made for."""

    payload: bytes
    model: str
    keys: frozenset[str]
    cameras: tuple[str, ...]
    joints: int

    def contract(self) -> ModelContract:
        cameras = dict.fromkeys(self.cameras)
        return ModelContract(self.model, cameras=cameras, state_dim=self.joints, action_dim=6)


def recorded_setup(payload: Payload) -> Candidate:
    """Return a setup of the manifest."""
    features = payload.decoded["lerobot_features"]
    renames = payload.decoded["rename_map"]
    prefix = "observation.images."
    keys = [key for key in features if key.startswith(prefix)]
    joints = features["observation.state"]["names"]
    return Candidate(
        payload.data,
        payload.decoded["pretrained_name_or_path"],
        frozenset([*joints, *(key.removeprefix(prefix) for key in keys)]),
        tuple(renames.get(key, key).removeprefix(prefix) for key in keys),
        len(joints),
    )


def derived_setup(observation: Mapping[str, Any]) -> Candidate:
    """Return the setup that fits a decoded observation."""
    joints = [key for key, value in observation.items() if _is_number(value)]
    cameras = {
        key: tuple(value["shape"])
        for key, value in observation.items()
        if is_array(value, 3) and value["dtype"] in ("|u1", "<u2")
    }
    made = robot.setup("derived", tuple(joints), cameras)
    return Candidate(made, "derived", frozenset([*joints, *cameras]), tuple(cameras), len(joints))


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) or (isinstance(value, dict) and "scalar" in value)


def observation_keys(payload: bytes) -> frozenset[str]:
    """Return the entries of an observation that can be read; none of one that can't."""
    try:
        found = read_pickle(payload)
    except DecodeError:
        return frozenset()
    if not isinstance(found, Instance) or not isinstance(found.state, dict):
        return frozenset()
    entries = found.state.get("observation")
    return frozenset(entries) if isinstance(entries, dict) else frozenset()


def best(candidates: Iterable[Candidate], keys: frozenset[str]) -> Candidate:
    """Return the setup that has most in common with an observation; the first one of equals."""
    return max(candidates, key=lambda c: len(c.keys & keys) / max(len(c.keys | keys), 1))


# ---------------------------------------------------------------- native and HTTP


def ask_native(port: int, payload: bytes) -> grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/robot.inference.v1.ModelInference/Infer")
        try:
            call(payload, timeout=LIMIT_S)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def post(port: int, path: str, body: bytes, headers: Mapping[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("POST", path, body, dict(headers))
        return connection.getresponse().status
    finally:
        connection.close()


def header_length(payload: Payload, body: bytes) -> str:
    """Return the length of a KServe body's JSON: the file beside it says it, else the body does."""
    beside = Path(payload.root / payload.name).with_suffix(".header_length.txt")
    if beside.is_file():
        return beside.read_text().strip()
    depth = 0
    for at, byte in enumerate(body):
        depth += {ord("{"): 1, ord("}"): -1}.get(byte, 0)
        if depth == 0:
            return str(at + 1)
    return str(len(body))


POLICY = ModelContract(
    "pi05",
    cameras={"main_images": None, "wrist_images": None},
    state_dim=8,
    action_dim=7,
    horizon=10,
    max_rows=4,
)
STACKED = ModelContract(
    "pi05",
    cameras=dict.fromkeys(["main_images", "wrist_images.0", "wrist_images.1"]),
    state_dim=8,
    action_dim=7,
    horizon=10,
    max_rows=4,
)
STATE_ONLY = ModelContract("pi05", state_dim=8, action_dim=7, horizon=10, max_rows=4)
OPEN = ModelContract("pi05", action_dim=7, max_rows=4, extra={"kind": "tensors"})
