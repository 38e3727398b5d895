"""Golden payloads of openpi and GR00T: requests, and replies of the original servers."""

from __future__ import annotations

from typing import Any

import numpy as np

from phyai_gateway.decode import numpy_msgpack as codec
from tests.gateway import golden_clients as clients
from tests.gateway.golden_serving import Payload, plain
from tests.gateway.golden_world import (
    World,
    array_of,
    fits_text,
    hashed,
    numpy_array,
    numpy_of,
    outcome,
)

# ---------------------------------------------------------------- openpi


def check_openpi(world: World, payload: Payload) -> None:
    decoded = payload.decoded
    contract = clients.LIBERO if not decoded else clients.openpi_contract("libero", decoded)
    world.offer(contract)
    frame: bytes | str = payload.data
    if payload.name.endswith(".txt"):
        frame = payload.data.decode()
    answer = clients.ask_openpi(world.ports["openpi"], frame)
    if outcome(payload, answer.result is not None):
        assert answer.result is not None
        assert answer.result["actions"].shape == (12, 7)
        if decoded:
            compare_openpi(world, payload)
        return
    assert answer.code == (1003 if isinstance(frame, str) else 1011)
    fits_text(answer.text)


def compare_openpi(world: World, payload: Payload) -> None:
    found = codec.unpack(payload.data, codec.openpi_hook)
    shown = plain(found)
    assert shown == payload.decoded
    request = world.last()
    sent = clients.openpi_images(found)
    assert {image.name for image in request.images} == set(sent)
    for image in request.images:
        pixels = numpy_array(sent[image.name])
        if pixels.dtype != np.uint8:
            pixels = (255 * pixels).astype(np.uint8)
        assert bytes(image.data) == pixels.tobytes()
        assert image.shape == pixels.shape
        assert image.layout == ("chw" if pixels.shape[0] == 3 else "hwc")
    parts = [np.ravel(numpy_array(found[key])) for key in clients.state_keys(found)]
    assert np.array_equal(numpy_of(request.state), np.concatenate(parts).astype(np.float32))
    prompt = payload.decoded.get("prompt")
    assert request.instruction == prompt


def check_openpi_reply(world: World, payload: Payload) -> None:
    """What the original server sends is what we would write for the same content."""
    found = codec.unpack(payload.data, codec.openpi_hook)
    assert plain(found) == payload.decoded
    assert codec.pack_openpi(found) == payload.data


def genuine_openpi(world: World) -> None:
    world.offer(clients.LIBERO)
    pixels = codec.pack_openpi(
        {
            "observation/image": array_of(np.zeros((4, 4, 3), np.uint8)),
            "observation/wrist_image": array_of(np.ones((4, 4, 3), np.uint8)),
            "observation/state": array_of(np.arange(8.0)),
            "prompt": "pick up the bowl",
        }
    )
    answer = clients.ask_openpi(world.ports["openpi"], pixels)
    assert answer.result is not None, answer.text


# ---------------------------------------------------------------- GR00T


def check_groot(world: World, payload: Payload) -> None:
    decoded = payload.decoded or {}
    world.offer(clients.groot_contract("groot", decoded))
    port = world.ports["groot+token" if payload.needs_token else "groot"]
    with clients.GrootClient(port) as client:
        reply, form = client.ask(payload.data)
        if not outcome(payload, not (isinstance(reply, dict) and "error" in reply)):
            fits_text(reply["error"])
            return
    hook = clients.ClientHook()
    shown = plain(codec.unpack(payload.data, hook))
    assert shown == decoded
    endpoint = decoded.get("endpoint", "get_action")
    if endpoint == "get_action":
        assert form == hook.form, "the reply must have the request's array form"
        compare_groot(world, decoded["data"], reply)
    else:
        assert plain(reply) == groot_reply(world, endpoint)


def groot_reply(world: World, endpoint: str) -> Any:
    if endpoint == "ping":
        return {"status": "ok", "message": "Server is running"}
    if endpoint == "get_modality_config":
        both = dict.fromkeys(("__ModalityConfig__", "__ModalityConfig_class__"), True)
        return {
            name: {**both, "as_json": record} for name, record in clients_records(world).items()
        }
    assert endpoint in ("kill", "reset")
    return {}


def clients_records(world: World) -> dict[str, Any]:
    contract = world.router.contract("groot")
    keys = {
        "video": list(contract.cameras),
        "state": list(contract.extra["gr00t"]["state"]),
        "action": list(contract.extra["gr00t"]["actions"]),
        "language": ["annotation.human.task_description"],
    }
    empty = dict.fromkeys(["sin_cos_embedding_keys", "mean_std_embedding_keys", "action_configs"])
    return {n: {"delta_indices": [0], "modality_keys": found} | empty for n, found in keys.items()}


def compare_groot(world: World, data: Any, reply: Any) -> None:
    groups, request = clients.groot_groups(data), world.last()
    nested, old = "video" in data.get("observation", {}), "observation" not in data
    for image in request.images:
        sent = groups["video"][image.name]
        assert hashed(image.data) == sent["sha256"]
        assert list(image.shape) == sent["shape"][-3:]
    assert request.state is not None
    keys = list(world.router.contract("groot").extra["gr00t"]["state"])
    widths = [groups["state"][key]["shape"][-1] for key in keys]
    parts = np.split(numpy_of(request.state), np.cumsum(widths)[:-1])
    for key, part in zip(keys, parts, strict=True):
        sent = groups["state"][key]
        if sent["dtype"] == "<f4":
            assert hashed(part.tobytes()) == sent["sha256"]
        assert part.size == sent["shape"][-1]
    (text,) = groups["language"].values()
    while isinstance(text, list):
        (text,) = text
    assert request.instruction == text
    actions = reply if old else reply[0]
    prefix = "" if nested else "action."
    assert {k: v.shape for k, v in actions.items()} == {
        f"{prefix}{key}": (12, width) if old else (1, 12, width)
        for key, width in {"single_arm": 5, "gripper": 1}.items()
    }
    columns = [numpy_array(value).reshape(12, -1) for value in actions.values()]
    wanted = np.frombuffer(world.router.answer(request).actions.data, "<f4").reshape(12, 6)  # type: ignore[union-attr]
    assert np.array_equal(np.concatenate(columns, axis=1), wanted)


def check_groot_reply(world: World, payload: Payload) -> None:
    """What the original servers send is what we would write for the same content."""
    hook = clients.ClientHook()
    found = codec.unpack(payload.data, hook)
    assert plain(found) == payload.decoded
    pack = codec.pack_npy_form if hook.form == "npy" else codec.pack_nd_form
    assert pack(found) == payload.data


def genuine_groot(world: World) -> None:
    world.offer(clients.groot_contract("groot", None))
    observation = {
        "video": {n: array_of(np.zeros((1, 1, 4, 4, 3), np.uint8)) for n in ("front", "wrist")},
        "state": {"single_arm": array_of(np.zeros((1, 1, 5), np.float32))},
        "language": {"annotation.human.task_description": [["go"]]},
    }
    body = codec.pack_nd_form({"data": {"observation": observation, "options": None}})
    with clients.GrootClient(world.ports["groot"]) as client:
        reply, form = client.ask(body)
    assert isinstance(reply, list), reply
    assert form == "nd"
