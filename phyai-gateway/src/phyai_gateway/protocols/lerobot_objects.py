"""What LeRobot's clients pickle: the policy setup and observations, read and checked.

Reading is the opcode reader's; here the records become values, and are held against the setup and
the model's contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from phyai_gateway.decode.arrays import Array, Scalar
from phyai_gateway.decode.limits import (
    MAX_CAMERAS,
    MAX_IMAGE_PIXELS,
    MAX_STATE_VALUES,
    MAX_TEXT_BYTES,
    DecodeError,
)
from phyai_gateway.decode.pickle_nodes import ArrayNode, Instance
from phyai_gateway.decode.pickle_reader import read_pickle
from phyai_gateway.messages import Fault
from phyai_gateway.protocols.observation import invalid, names, number

_STATE = "observation.state"
_IMAGES = "observation.images."
MAX_ACTIONS_PER_CHUNK = 1024
MAX_NAME = 256
_SETUP_KEYS = {
    "policy_type",
    "pretrained_name_or_path",
    "lerobot_features",
    "actions_per_chunk",
    "device",
    "rename_map",
}
_OBSERVATION_KEYS = {"timestamp", "timestep", "observation", "must_go"}


@dataclass(frozen=True, slots=True)
class Camera:
    """key: the robot's name. name: after ``rename_map``. shape: [H, W, C]. depth: uint16 pixels."""

    key: str
    name: str
    shape: tuple[int, int, int]
    depth: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """A client's policy setup. policy: the name it asks for. device: only logged."""

    policy: str
    policy_type: str
    device: str
    actions_per_chunk: int
    joints: tuple[str, ...]
    cameras: tuple[Camera, ...]


@dataclass(frozen=True, slots=True)
class TimedObservation:
    """One observation as it was sent. values: numbers, numpy scalars, arrays and texts by key."""

    timestamp_s: float
    timestep: int
    must_go: bool
    values: Mapping[str, float | int | str | Scalar | Array]


def read_setup(payload: memoryview) -> Setup:
    """Return the setup of ``SendPolicyInstructions``. Raises: Fault."""
    state = _state_of(payload, "RemotePolicyConfig", _SETUP_KEYS)
    renames = _texts(state["rename_map"], "rename_map")
    if len(set(renames.values())) != len(renames):
        raise invalid("rename_map must give every feature another name.")
    features = state["lerobot_features"]
    if not isinstance(features, dict):
        raise invalid("lerobot_features must be a map.")
    actions = state["actions_per_chunk"]
    if type(actions) is not int or not 1 <= actions <= MAX_ACTIONS_PER_CHUNK:
        raise invalid(f"actions_per_chunk must be from 1 to {MAX_ACTIONS_PER_CHUNK}.")
    cameras = tuple(
        _camera(key, feature, renames) for key, feature in features.items() if _is_image(key)
    )
    if len(cameras) > MAX_CAMERAS or len({c.name for c in cameras}) != len(cameras):
        raise invalid(f"cameras must be at most {MAX_CAMERAS}, each with its own name.")
    return Setup(
        policy=_text(state["pretrained_name_or_path"], "pretrained_name_or_path"),
        policy_type=_text(state["policy_type"], "policy_type"),
        device=_text(state["device"], "device"),
        actions_per_chunk=actions,
        joints=_joints(features.get(_STATE)),
        cameras=cameras,
    )


def read_observation(payload: memoryview) -> TimedObservation:
    """Return the observation of ``SendObservations``, not yet held against a setup.

    Raises: Fault.
    """
    state = _state_of(payload, "TimedObservation", _OBSERVATION_KEYS)
    timestamp, timestep, must_go = state["timestamp"], state["timestep"], state["must_go"]
    if type(timestamp) not in (float, int) or not -1e15 < timestamp < 1e15:
        raise invalid("timestamp must be a finite number of seconds.")
    if type(timestep) is not int or not 0 <= timestep < (1 << 63) - MAX_ACTIONS_PER_CHUNK:
        raise invalid("timestep must be an integer from 0 to 2**63.")
    if type(must_go) is not bool:
        raise invalid("must_go must be true or false.")
    found = state["observation"]
    if not isinstance(found, dict):
        raise invalid("observation must be a map.")
    values = {key: _value(key, value) for key, value in found.items()}
    arrays = [value for value in values.values() if isinstance(value, Array)]
    if sum(array.data.nbytes for array in arrays) > len(payload):
        raise DecodeError("arrays of an observation must each have their own bytes.")
    return TimedObservation(float(timestamp), timestep, must_go, values)


def joint_values(observation: TimedObservation, setup: Setup) -> list[float]:
    """Return the declared joints in order: single numbers, or one packed ``observation.state``.

    Raises: Fault naming what is missing, not finite, or told twice differently.
    """
    values = observation.values
    packed = values.get(_STATE)
    whole = None
    if isinstance(packed, Array):
        whole = packed.floats()
        if len(packed.shape) != 1 or len(whole) != len(setup.joints):
            raise invalid(f"{_STATE} must be [{len(setup.joints)}]; got {list(packed.shape)}.")
    missing = [joint for joint in setup.joints if joint not in values]
    if missing and whole is None:
        raise invalid(f"observation must hold the joints {names(missing)}; got {names(values)}.")
    if missing:
        found = whole or []
    else:
        found = [number(_single(values[joint]), f"joint {joint!r}") for joint in setup.joints]
        if whole is not None and whole != found:
            raise invalid(f"{_STATE} and the single joints must agree.")
    for joint, value in zip(setup.joints, found, strict=True):
        if not isfinite(value):
            raise invalid(f"joint {joint!r} must be finite; got {value}. Check the sensor.")
    return found


def camera_pixels(observation: TimedObservation, camera: Camera) -> Array:
    """Return a declared camera's array. Raises: Fault for another shape or dtype."""
    value = observation.values.get(camera.key)
    if not isinstance(value, Array):
        raise invalid(f"observation must hold the camera {camera.key!r}; it does not.")
    code = "u2" if camera.depth else "u1"
    if value.code != code or value.shape != camera.shape:
        wanted = f"{'uint16' if camera.depth else 'uint8'} {list(camera.shape)}"
        raise invalid(
            f"camera {camera.key!r} must be {wanted}, as the setup says; got {value.dtype} "
            f"{list(value.shape)}."
        )
    return value


def task_of(observation: TimedObservation) -> str | None:
    """Return the task text, None when there is none. Raises: Fault for another type."""
    task = observation.values.get("task")
    if task is not None and not isinstance(task, str):
        raise invalid("task must be text.")
    return task


# ---------------------------------------------------------------- reading


def _state_of(payload: memoryview, name: str, keys: set[str]) -> dict[str, Any]:
    if _is_length_prefixed_json(payload):
        raise Fault(
            "unimplemented",
            "payload looks like JSON with safetensors; this listener reads pickled observations "
            "only. Use a LeRobot release that sends them.",
        )
    found = read_pickle(payload)
    if not isinstance(found, Instance) or found.name != name or found.state is None:
        raise DecodeError(f"payload must be a {name}.")
    if set(found.state) != keys:
        raise invalid(f"fields of {name} must be {names(keys)}; got {names(found.state)}.")
    return found.state


def _is_length_prefixed_json(payload: memoryview) -> bool:
    """The form proposed to replace pickle: a 4-byte length, JSON of that length, tensors."""
    if len(payload) < 6 or payload[4] != ord("{"):
        return False
    head = payload[:4].tobytes()
    return any(2 <= int.from_bytes(head, e) <= len(payload) - 4 for e in ("little", "big"))


def _value(key: str, value: object) -> float | int | str | Scalar | Array:
    if isinstance(value, ArrayNode):
        if value.array is None:
            raise DecodeError("an array of the observation has no content.")
        return value.array
    if isinstance(value, float | int | str | Scalar) and len(key) <= 1024:
        return value
    raise DecodeError("values of an observation must be numbers, texts or arrays.")


def _single(value: object) -> object:
    if isinstance(value, Array) and value.size == 1:
        return value.floats()[0]
    return value


# ---------------------------------------------------------------- setup


def _is_image(key: str) -> bool:
    return key.startswith(_IMAGES) and len(key) > len(_IMAGES)


def _camera(key: str, feature: object, renames: Mapping[str, str]) -> Camera:
    name = _text(key.removeprefix(_IMAGES), "a camera's name", MAX_NAME)
    if not isinstance(feature, dict) or feature.get("dtype") not in ("image", "video"):
        raise invalid(f"feature {name!r} must be an image.")
    shape = feature.get("shape")
    if not isinstance(shape, list | tuple) or len(shape) != 3:
        raise invalid(f"shape of camera {name!r} must be [H, W, C].")
    if not all(type(size) is int and size > 0 for size in shape):
        raise invalid(f"shape of camera {name!r} must be [H, W, C].")
    info = feature.get("info")
    depth = isinstance(info, dict) and info.get("is_depth_map") is True
    if shape[2] != (1 if depth else 3) or shape[0] * shape[1] > MAX_IMAGE_PIXELS:
        raise invalid(f"camera {name!r} must be RGB or depth of at most 4096 x 4096.")
    renamed = renames.get(key, key).removeprefix(_IMAGES)
    return Camera(name, renamed, (shape[0], shape[1], shape[2]), depth)


def _joints(feature: object) -> tuple[str, ...]:
    if feature is None:
        return ()
    found = feature.get("names") if isinstance(feature, dict) else None
    shape = feature.get("shape") if isinstance(feature, dict) else None
    if not isinstance(found, list | tuple) or not 0 < len(found) <= MAX_STATE_VALUES:
        raise invalid(f"{_STATE} must list the names of 1 to {MAX_STATE_VALUES} joints.")
    joints = tuple(_text(name, "a joint's name", MAX_NAME) for name in found)
    if len(set(joints)) != len(joints):
        raise invalid(f"names of {_STATE} must be unique.")
    if isinstance(shape, list | tuple) and list(shape) != [len(joints)]:
        raise invalid(f"shape of {_STATE} must be [{len(joints)}], the number of its names.")
    return joints


def _texts(found: object, what: str) -> dict[str, str]:
    if not isinstance(found, dict):
        raise invalid(f"{what} must be a map.")
    return {key: _text(value, what) for key, value in found.items()}


def _text(value: object, what: str, longest: int = MAX_TEXT_BYTES) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise invalid(f"{what} must be text of at most {longest} characters.")
    return value
