"""openpi's observations and results: LIBERO, DROID and ALOHA layouts, and any named cameras.

``contract.extra["openpi"]`` may say more: ``cameras`` (client key -> camera of the model),
``state`` (keys whose values make up the state, in order), ``ignored`` (camera keys that may be
sent but are not used) and ``metadata`` (what the client is told first, such as ``reset_pose``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.arrays import Array, make_array
from phyai_gateway.decode.limits import MAX_CAMERAS, MAX_TEXT_BYTES
from phyai_gateway.messages import ImageData, InferRequest, TensorData
from phyai_gateway.protocols import observation as checks

_STATE_KEYS = (
    ("observation/state",),
    ("state",),
    ("observation/joint_position", "observation/gripper_position"),
)
_SLOTS = {
    "observation/image": "base_0_rgb",
    "observation/wrist_image": "left_wrist_0_rgb",
    "observation/exterior_image_1_left": "base_0_rgb",
    "observation/wrist_image_left": "left_wrist_0_rgb",
    "cam_high": "base_0_rgb",
    "cam_left_wrist": "left_wrist_0_rgb",
    "cam_right_wrist": "right_wrist_0_rgb",
}
"""Cameras of openpi's robots -> inputs of openpi's base checkpoints."""
_UNUSED = ("cam_low",)
_QUICK_ELEMENTS = 4096


def request_of(
    found: Mapping[str, Any],
    contract: ModelContract,
    request_id: str,
    max_prompt_bytes: int = MAX_TEXT_BYTES,
) -> InferRequest:
    """Return the request that one observation map makes.

    Raises: Fault naming what the model needs and what was sent.
    """
    images: dict[str, ImageData] = {}
    for key, value in _pictures(found, contract):
        camera = camera_of(key, contract)
        if camera is None:
            continue
        if camera in images:
            raise checks.invalid(f"camera {camera!r} must be sent once; {key!r} repeats it.")
        images[camera] = checks.picture(camera, value, contract)
    if len(images) > MAX_CAMERAS:
        raise checks.invalid(f"at most {MAX_CAMERAS} cameras may be sent; got {len(images)}.")
    checks.check_cameras(images, contract)
    return InferRequest(
        request_id,
        contract.name,
        images=tuple(images.values()),
        state=checks.state_vector(_state(found, contract), contract),
        instruction=checks.prompt(found.get("prompt"), contract, max_prompt_bytes),
    )


def is_slow(found: Mapping[str, Any]) -> bool:
    """Return whether an observation's images must be converted: milliseconds, so off the loop."""
    nested = found.get("images")
    values = [*found.values(), *(nested.values() if isinstance(nested, Mapping) else ())]
    arrays = [value for value in values if isinstance(value, Array)]
    return any(array.size > _QUICK_ELEMENTS and array.code != "u1" for array in arrays)


def camera_of(key: str, contract: ModelContract) -> str | None:
    """Return the model's camera that a client's key means; None = not a camera of this model."""
    named = checks.own_settings(contract, "openpi").get("cameras")
    if isinstance(named, Mapping) and key in named:
        return str(named[key])
    last = key.rpartition("/")[2]
    if not contract.cameras:
        return last
    for camera in contract.cameras:
        if camera in (key, last) or _last(camera) == last:
            return camera
    slot = _SLOTS.get(key)
    return slot if slot in contract.cameras else None


def _last(camera: str) -> str:
    return camera.replace("/", ".").rpartition(".")[2]


def _pictures(found: Mapping[str, Any], contract: ModelContract) -> Iterator[tuple[str, Any]]:
    states = {key for keys in _state_keys(contract) for key in keys}
    for key, value in found.items():
        if not isinstance(key, str) or key in states or key == "images":
            continue
        if contract.cameras or (isinstance(value, Array) and len(value.shape) == 3):
            yield key, value
    nested = found.get("images")
    if nested is None:
        return
    if not isinstance(nested, Mapping):
        raise checks.invalid(f"images must be a map of cameras; got {type(nested).__name__}.")
    ignored = checks.own_settings(contract, "openpi").get("ignored", _UNUSED)
    for key, value in nested.items():
        if not isinstance(key, str):
            raise checks.invalid("names of images must be text.")
        if camera_of(key, contract) is not None:
            yield key, value
        elif key not in ignored:
            raise checks.invalid(
                f"images must be of {checks.names(contract.cameras)}; got {checks.names([key])}."
            )


def _state_keys(contract: ModelContract) -> tuple[tuple[str, ...], ...]:
    named = checks.own_settings(contract, "openpi").get("state")
    return (tuple(named),) if isinstance(named, list | tuple) else _STATE_KEYS


def _state(found: Mapping[str, Any], contract: ModelContract) -> list[float]:
    for keys in _state_keys(contract):
        if all(key in found for key in keys):
            return [v for key in keys for v in checks.numbers(found[key], f"state {key!r}")]
    return []


def metadata_of(contract: ModelContract) -> dict[str, Any]:
    """Return what the first frame of a connection says about the model."""
    plain: dict[str, Any] = {
        "model": contract.name,
        "action_horizon": contract.horizon,
        "action_dim": contract.action_dim,
    }
    if contract.control_hz is not None:
        plain["control_hz"] = contract.control_hz
    told = checks.own_settings(contract, "openpi").get("metadata", {})
    return plain | (dict(told) if isinstance(told, Mapping) else {})


def result_of(actions: TensorData, timing: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the result map of actions float32 [1, H, A]; timing in milliseconds."""
    return {"actions": make_array("<f4", actions.shape[1:], actions.data), **timing}
