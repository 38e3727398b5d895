"""Runs in openpi-client's environment: its unmodified policy against a gateway.

Arguments: STEP PORT and the step's own. Prints JSON as its last line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from openpi_client import image_tools, msgpack_numpy
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

SIDE = 224


def camera(random: np.random.Generator, height: int = 240, width: int = 320) -> Any:
    """Return what a robot's program sends of a camera: padded and resized by openpi's tools."""
    picture = random.random((height, width, 3))
    resized = image_tools.resize_with_pad(image_tools.convert_to_uint8(picture), SIDE, SIDE)
    return image_tools.convert_to_uint8(resized)


def libero(random: np.random.Generator) -> dict[str, Any]:
    return {
        "observation/image": np.ascontiguousarray(camera(random)[::-1, ::-1]),
        "observation/wrist_image": camera(random, 128, 128),
        "observation/state": np.concatenate((random.random(6), random.random(2))),
        "prompt": "put the bowl on the plate",
    }


def droid(random: np.random.Generator) -> dict[str, Any]:
    return {
        "observation/exterior_image_1_left": camera(random),
        "observation/wrist_image_left": camera(random),
        "observation/joint_position": random.random(7),
        "observation/gripper_position": random.random(1),
        "prompt": "pick up the marker",
    }


def aloha(random: np.random.Generator) -> dict[str, Any]:
    names = ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")
    return {
        "images": {name: camera(random).transpose(2, 0, 1) for name in names},
        "state": random.random(14),
        "prompt": "transfer the cube",
    }


LAYOUTS = {"libero": libero, "droid": droid, "aloha": aloha}


def kept(observation: dict[str, Any]) -> dict[str, Any]:
    flat = {k: v for k, v in observation.items() if k != "images"}
    return flat | {f"images/{k}": v for k, v in observation.get("images", {}).items()}


def layouts(port: int, out: str) -> dict[str, Any]:
    """Two requests of every layout on one connection; raw float and channels-first forms, too."""
    found: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, make in LAYOUTS.items():
        policy = WebsocketClientPolicy(f"ws://127.0.0.1:{port}/models/{name}")
        random, rounds = np.random.default_rng(len(name)), []
        for turn in range(2):
            sent = make(random)
            got = policy.infer(sent)
            policy.reset()
            rounds.append(
                {
                    "keys": sorted(got),
                    "dtype": got["actions"].dtype.str,
                    "shape": got["actions"].shape,
                    # As the example client does: both maps hold numbers.
                    "timing": {k: float(v) for k, v in got["server_timing"].items()},
                    "policy": {k: float(v) for k, v in got["policy_timing"].items()},
                }
            )
            arrays |= {f"{name}/{turn}/sent/{k}": v for k, v in kept(sent).items()}
            arrays[f"{name}/{turn}/actions"] = got["actions"]
        found[name] = {"metadata": policy.get_server_metadata(), "rounds": rounds}
    policy = WebsocketClientPolicy("127.0.0.1", port)  # the listener's own model
    sent = libero(np.random.default_rng(0))
    first = policy.infer(sent)["actions"]
    as_floats = {
        k: (v.transpose(2, 0, 1) / 255.0 if k.endswith("image") else v) for k, v in sent.items()
    }
    arrays["libero/as_uint8"] = first
    arrays["libero/as_float_chw"] = policy.infer(as_floats)["actions"]
    broker = ActionChunkBroker(policy, action_horizon=5)
    arrays["libero/one_by_one"] = np.stack([broker.infer(sent)["actions"] for _ in range(7)])
    found["text"] = refused(policy, {**sent, "observation/state": np.zeros(3)})
    again = WebsocketClientPolicy("127.0.0.1", port)
    arrays["libero/after_error"] = again.infer(sent)["actions"]
    again.infer({**sent, "prompt": np.str_("numpy text")})
    np.savez(out, **arrays)
    return found


def refused(policy: Any, observation: dict[str, Any]) -> dict[str, str]:
    """Return the error of an observation, and of the call after it on the closed connection."""
    found = {}
    for name in ("first", "second"):
        try:
            policy.infer(observation)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def keys(port: int, right: str) -> dict[str, Any]:
    """Return what becomes of no key, a wrong one, the right one."""
    found: dict[str, Any] = {}
    for name, key in (("none", None), ("wrong", "no-such-key-here"), ("right", right)):
        try:
            policy = WebsocketClientPolicy("127.0.0.1", port, api_key=key)
            shape = policy.infer(libero(np.random.default_rng(0)))["actions"].shape
            found[name] = list(shape)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def lasting(port: int, count: str) -> dict[str, Any]:
    """Ask until there are so many answers; connect again when the server has gone."""
    sent = libero(np.random.default_rng(3))
    policy, actions, broken = None, [], []
    end = time.monotonic() + 100
    while time.monotonic() < end and len(actions) < int(count):
        try:
            policy = policy or WebsocketClientPolicy("127.0.0.1", port)
            actions.append(policy.infer(sent)["actions"])
            print("answered", flush=True)
            time.sleep(0.02)
        except Exception as error:
            broken.append(f"{type(error).__name__}: {error}")
            policy = None
            time.sleep(0.1)
    same = all(np.array_equal(actions[0], other) for other in actions)
    return {"answers": len(actions), "same": same, "broken": broken}


if __name__ == "__main__":
    step, port = sys.argv[1], int(sys.argv[2])
    assert msgpack_numpy.__name__ == "openpi_client.msgpack_numpy"
    work = {"layouts": layouts, "keys": keys, "lasting": lasting}[step]
    print(json.dumps(work(port, sys.argv[3])))
