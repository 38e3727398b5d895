"""Hold a LeRobot setup against a model's contract, and make requests of its observations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import ImageData, InferRequest
from phyai_gateway.protocols import lerobot_objects as objects
from phyai_gateway.protocols import observation as checks


@dataclass(frozen=True, slots=True)
class Plan:
    """How one robot's observations become the model's: its joints in the model's order, and which
    of its cameras fills which of the model's."""

    model: str
    joints: tuple[str, ...]
    cameras: tuple[tuple[objects.Camera, str], ...]


def plan(setup: objects.Setup, contract: ModelContract, renames: Mapping[str, str]) -> Plan:
    """Return the plan of a setup.

    renames: robot's camera -> the model's, for clients that can't rename them.
    Raises: Fault naming what the model needs and the robot has.
    """
    cameras = _cameras(setup, contract, renames)
    checks.check_cameras([name for _, name in cameras], contract)
    for camera, name in cameras:
        checks.check_size(name, camera.shape, contract)
    joints = _joint_order(setup.joints, contract)
    return Plan(contract.name, joints, cameras)


def request_of(
    observation: objects.TimedObservation,
    setup: objects.Setup,
    made: Plan,
    contract: ModelContract,
    request_id: str,
) -> InferRequest:
    """Return the request of one observation; every declared joint and camera is checked.

    Raises: Fault.
    """
    values = objects.joint_values(observation, setup)
    arrays = {c.key: objects.camera_pixels(observation, c) for c in setup.cameras}
    by_joint = dict(zip(setup.joints, values, strict=True))
    ordered = [by_joint[joint] for joint in made.joints]
    images = tuple(
        ImageData(
            name,
            arrays[camera.key].row_major(),
            camera.shape,
            "uint16" if camera.depth else "uint8",
        )
        for camera, name in made.cameras
    )
    return InferRequest(
        request_id,
        made.model,
        images=images,
        state=checks.state_vector(ordered, contract),
        instruction=checks.prompt(objects.task_of(observation), contract),
        horizon=0,
    )


def _joint_order(joints: tuple[str, ...], contract: ModelContract) -> tuple[str, ...]:
    if contract.state_dim and len(joints) != contract.state_dim:
        raise checks.invalid(
            f"model {contract.name!r} needs a state of {contract.state_dim} values; the robot has "
            f"the joints {checks.names(joints)}."
        )
    wanted = contract.state_names
    if not wanted:
        return joints
    if set(wanted) != set(joints):
        raise checks.invalid(
            f"model {contract.name!r} needs the joints {checks.names(wanted)}; the robot has "
            f"{checks.names(joints)}."
        )
    return wanted


def _cameras(
    setup: objects.Setup, contract: ModelContract, renames: Mapping[str, str]
) -> tuple[tuple[objects.Camera, str], ...]:
    found: dict[str, objects.Camera] = {}
    for camera in setup.cameras:
        name = _camera_name(camera, contract, renames.get(camera.name, camera.name))
        if name is None:
            continue  # not one of the model's: it is checked, but not sent on
        if name in found:
            raise checks.invalid(f"camera {name!r} of the model is filled by two of the robot's.")
        found[name] = camera
    return tuple((camera, name) for name, camera in found.items())


def _camera_name(camera: objects.Camera, contract: ModelContract, sent: str) -> str | None:
    if not contract.cameras:
        return None if camera.depth else sent
    for name in contract.cameras:
        last = name.replace("/", ".").rpartition(".")[2]
        if sent in (name, last):
            return name
    return None
