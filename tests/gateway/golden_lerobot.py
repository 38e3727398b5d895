"""Golden payloads of LeRobot: setups, observations, chunk streams, recorded replies."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.npy import read_npy
from phyai_gateway.decode.pickle_reader import read_pickle
from tests.gateway import golden_clients as clients
from tests.gateway import lerobot_robot as robot
from tests.gateway.golden_serving import Payload, plain
from tests.gateway.golden_world import (
    World,
    fits_text,
    harmless,
    hashed,
    numpy_of,
    outcome,
)

OK, BAD = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT


def check_setup(world: World, payload: Payload) -> None:
    model = "policy"
    if payload.decoded:
        made = clients.recorded_setup(payload)
        assert plain(read_pickle(payload.data)) == payload.decoded
        world.offer(made.contract())
        model = made.model
    elif payload.entry.get("level") == "semantic" and payload.entry.get("status") != "NOT_FOUND":
        world.offer(*(made.contract() for made in world.recorded))
    else:
        world.offer(ModelContract(model))
    with robot.Robot(world.ports["lerobot"]) as client:
        assert client.ready() is OK
        code, text = client.set_up(payload.data)
        if outcome(payload, code is OK):
            if payload.decoded:
                send_fitting(client, world, made)
            return
    assert code.name == payload.entry["status"], text
    fits_text(text)


def send_fitting(client: robot.Robot, world: World, made: clients.Candidate) -> None:
    """Send an observation as a setup declares it: it was understood if the model gets it."""
    joints = tuple(sorted(k for k in made.keys if k.endswith(".pos")))
    shapes = clients_shapes(made)
    assert client.send(robot.observation(found=robot.values(joints, shapes)))[0] is OK
    assert len(client.actions()) > 0
    assert {image.name for image in world.last().images} == set(made.cameras)


def clients_shapes(made: clients.Candidate) -> dict[str, tuple[int, ...]]:
    state: Any = plain(read_pickle(made.payload))
    prefix = "observation.images."
    return {
        key.removeprefix(prefix): tuple(feature["shape"]["tuple"])
        for key, feature in state["lerobot_features"].items()
        if key.startswith(prefix)
    }


def check_observation(world: World, payload: Payload) -> None:
    messages = robot.chunks(payload.data)
    if payload.kind == "lerobot_stream":
        messages = robot.split_stream(payload.data)
    made = world.setup_for(payload)
    world.offer(made.contract())
    with robot.Robot(world.ports["lerobot"]) as client:
        assert client.ready() is OK
        assert client.set_up(made.payload)[0] is OK
        code, text = client.send_messages(messages)
        if not outcome(payload, code is OK):
            assert code.name == payload.entry.get("status", "INVALID_ARGUMENT"), text
            fits_text(text)
            return
        actions = client.actions()
    assert len(actions) == min(10, 12)
    if payload.decoded:
        compare_observation(world, payload, made, actions)


def compare_observation(
    world: World, payload: Payload, made: clients.Candidate, actions: list[robot.TimedAction]
) -> None:
    decoded, request = payload.decoded, world.last()
    assert plain(read_pickle(payload.data)) == decoded
    assert [a.timestep for a in actions] == [decoded["timestep"] + i for i in range(len(actions))]
    wanted = [decoded["timestamp"] + index / 30.0 for index in range(len(actions))]
    assert [a.timestamp for a in actions] == wanted
    entries = decoded["observation"]
    assert request.instruction == entries["task"]
    assert {image.name for image in request.images} == set(made.cameras)
    for image in request.images:
        assert hashed(image.data) == entries[image.name]["sha256"]
        assert list(image.shape) == entries[image.name]["shape"]
    joints = [value for value in entries.values() if clients._is_number(value)]
    numbers = [v["scalar"] if isinstance(v, dict) else v for v in joints]
    assert sorted(numpy_of(request.state)) == sorted(np.float32(numbers))


def check_reply(world: World, payload: Payload) -> None:
    """The original server's reply is no observation: it names torch's loader."""
    world.offer(ModelContract("policy"))
    with robot.Robot(world.ports["lerobot"]) as client, harmless(len(payload.data)):
        assert client.ready() is OK
        assert client.set_up(robot.setup())[0] is OK
        assert client.send(payload.data)[0] is BAD


def check_matrix(world: World, payload: Payload) -> None:
    """Actions of a recorded reply reach the client bit for bit."""
    array = read_npy(payload.data)
    matrix = np.frombuffer(array.row_major(), array.dtype).reshape(array.shape)
    world.offer(ModelContract("policy", action_dim=array.shape[1]))
    world.router.actions = matrix.astype(np.float32)
    with robot.Robot(world.ports["lerobot"]) as client:
        assert client.ready() is OK
        assert client.set_up(robot.setup(actions_per_chunk=array.shape[0]))[0] is OK
        assert client.send(robot.observation())[0] is OK
        found = np.stack([action.action for action in client.actions()])
    assert np.array_equal(found, matrix.astype(np.float32))


def genuine_lerobot(world: World) -> None:
    world.offer(ModelContract("policy"))
    with robot.Robot(world.ports["lerobot"]) as client:
        assert client.ready() is OK
        assert client.set_up(robot.setup())[0] is OK
        assert client.send(robot.observation())[0] is OK
        assert len(client.actions()) == 10
