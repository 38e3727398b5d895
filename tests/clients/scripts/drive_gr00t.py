"""Runs in an environment of pyzmq and msgpack: GR00T clients of three generations, by behaviour.

Arguments: STEP GENERATION PORT and the step's own. Prints JSON.
"""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import zmq

TASK = "annotation.human.task_description"


def npy_out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return {"__ndarray_class__": True, "as_npy": file.getvalue()}
    raise TypeError(type(value))


def npy_in(found: dict[Any, Any]) -> Any:
    if "__ndarray_class__" in found:
        return np.load(io.BytesIO(found["as_npy"]), allow_pickle=False)
    return found


class Client:
    """One REQ socket, and the arrays of its generation: "a", "b" or "c"."""

    def __init__(self, generation: str, port: int, token: str | None = None) -> None:
        self.generation, self.token = generation, token
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def call(self, endpoint: str, data: Any = None) -> Any:
        request: dict[str, Any] = {"endpoint": endpoint}
        if data is not None:
            request["data"] = data
        if self.token is not None:
            request["api_token"] = self.token
        third = self.generation == "c"
        self.socket.send(msgpack.packb(request, default=msgpack_numpy.encode if third else npy_out))
        message = self.socket.recv()
        if message == b"ERROR":
            raise RuntimeError("Server error")
        found = msgpack.unpackb(message, object_hook=msgpack_numpy.decode if third else npy_in)
        if isinstance(found, dict) and "error" in found:
            raise RuntimeError(f"Server error: {found['error']}")
        return found

    def get_action(self, observation: dict[str, Any], options: Any = None) -> dict[str, Any]:
        if self.generation == "a":
            found: dict[str, Any] = self.call("get_action", observation)
            return found
        answer = self.call("get_action", {"observation": observation, "options": options})
        assert len(answer) == 2
        assert answer[1] == {}
        return dict(answer[0])


def observed(generation: str, rows: int, modality: Any, random: np.random.Generator) -> Any:
    """Return an observation after a server's own modality configuration; uint8 and float32."""
    video, state, language = (modality[name] for name in ("video", "state", "language"))
    steps = len(video["delta_indices"])
    widths = json.loads(sys.argv[5])
    pictures = {
        key: random.integers(0, 256, (rows, steps, 64, 48, 3), np.uint8)
        for key in video["modality_keys"]
    }
    states = {
        key: random.random((rows, 1, widths[key.removeprefix("state.")])).astype(np.float32)
        for key in state["modality_keys"]
    }
    text = language["modality_keys"][0]
    if generation == "a":
        # Its own answer has whole names; that to a client that has shown nothing of itself hasn't.
        groups = {"video": pictures, "state": states}
        flat = {
            f"{group}.{key.removeprefix(f'{group}.')}": value[0]
            for group, values in groups.items()
            for key, value in values.items()
        }
        return flat | {text: ["stack the cups"]}
    return {"video": pictures, "state": states, "language": {text: [["stack the cups"]] * rows}}


def records(found: dict[str, Any]) -> dict[str, Any]:
    """Return modality -> record of any generation's form."""
    plain = {}
    for name, config in found.items():
        assert all(config[marker] is True for marker in set(config) - {"as_json"})
        given = config["as_json"]
        plain[name] = json.loads(given) if isinstance(given, str) else given
    return plain


def whole(client: Client, rows: int, out: str) -> dict[str, Any]:
    """Every endpoint in turn, on one socket; an error in between."""
    said: dict[str, Any] = {"ping": client.call("ping")}
    found = client.call("get_modality_config")
    said["first_marks"] = sorted(set(found["video"]) - {"as_json"})
    modality = said["modality"] = records(found)
    random, arrays = np.random.default_rng(5), {}
    said["reset"] = client.call("reset", None if client.generation == "a" else {"options": None})
    for turn in range(3):
        sent = observed(client.generation, rows, modality, random)
        # A second request of the same robot finds another server as well.
        actions = client.get_action(sent)
        said["forms"] = {k: [v.dtype.str, v.shape] for k, v in actions.items()}
        arrays |= {f"{turn}/sent/{key}": value for key, value in flat(sent)}
        arrays |= {f"{turn}/got/{key}": value for key, value in actions.items()}
    found = client.call("get_modality_config")
    said["marks"] = sorted(set(found["video"]) - {"as_json"})
    said["same"] = set(records(found)) == set(modality)
    said["errors"] = [failing(client, wrong) for wrong in broken(sent)]
    again = client.get_action(sent)
    said["after"] = all(np.array_equal(again[k], v) for k, v in actions.items())
    said["kill"] = client.call("kill")
    said["alive"] = client.call("ping")
    np.savez(out, **arrays)
    return said


def flat(sent: dict[str, Any]) -> list[tuple[str, Any]]:
    if "video" not in sent:
        return [(k, v) for k, v in sent.items() if isinstance(v, np.ndarray)]
    return [(f"{g}.{k}", v) for g in ("video", "state") for k, v in sent[g].items()]


def broken(sent: dict[str, Any]) -> list[Any]:
    """Return observations that no server takes: float pictures, a missing state, nothing."""
    nested = "video" in sent
    floats = {
        k: v / 255.0 if isinstance(v, np.ndarray) and v.dtype == np.uint8 else v
        for k, v in (sent["video"] if nested else sent).items()
    }
    if nested:
        return [sent | {"video": floats}, sent | {"state": {}}, {"nothing": 1}]
    return [floats, {k: v for k, v in sent.items() if "state" not in k}, {"nothing": 1}]


def failing(client: Client, observation: Any) -> str:
    try:
        client.get_action(observation)
    except RuntimeError as error:
        return str(error)
    return ""


def tokens(generation: str, port: int, right: str) -> dict[str, str]:
    found = {}
    for name, token in (("none", None), ("wrong", "not-the-token-at-all"), ("right", right)):
        try:
            found[name] = str(Client(generation, port, token).call("ping"))
        except RuntimeError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    step, generation, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if step == "tokens":
        print(json.dumps(tokens(generation, port, sys.argv[4])))
    else:
        client = Client(generation, port)
        print(json.dumps(whole(client, int(step), sys.argv[4])))
