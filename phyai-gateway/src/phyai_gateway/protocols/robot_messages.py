"""Sensor data of ``robot.RobotInference`` to a request, and a reply to an action command."""

from __future__ import annotations

import struct
from math import isfinite
from typing import Any

from google.protobuf.message import DecodeError as WireError

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.arrays import pack_float32
from phyai_gateway.decode.limits import MIB, DecodeError
from phyai_gateway.messages import Fault, ImageData, InferReply, InferRequest, TensorData
from phyai_gateway.proto import robot_v1_pb2 as pb
from phyai_gateway.protocols import observation

HEIGHT, WIDTH = 480, 640
IMAGE_BYTES = HEIGHT * WIDTH * 3
MAX_BYTES = 4 * MIB  # a stream may take its time, and many may be open: room for both pictures
MAX_JOINTS = 256
FRONT = "front"
STATES = ("all", "joints")
_POSE = ("x", "y", "z", "roll", "pitch", "yaw")


def read(data: bytes) -> Any:
    """Return the SensorData in the bytes, checked for itself; raises DecodeError."""
    try:
        found = pb.SensorData.FromString(data)
    except WireError:
        raise DecodeError("message must be a SensorData; it cannot be parsed.") from None
    if len(found.image_rgb) != IMAGE_BYTES:
        raise DecodeError(
            f"image_rgb must be uint8 [{HEIGHT}, {WIDTH}, 3], {IMAGE_BYTES} bytes; got "
            f"{len(found.image_rgb)}."
        )
    joints, speeds = len(found.state.joint_angles), len(found.state.joint_velocities)
    if not 1 <= joints <= MAX_JOINTS or speeds > MAX_JOINTS:
        raise DecodeError(
            f"state must have 1 to {MAX_JOINTS} joint_angles and at most {MAX_JOINTS} "
            f"joint_velocities; got {joints} and {speeds}."
        )
    return found


def request_of(
    sensed: Any, contract: ModelContract, camera: str | None, state: str, request_id: str
) -> InferRequest:
    """Return the request for sensor data.

    camera: name for the picture; None = ``front`` or the model's only camera.  state: one of
    STATES.  Raises: Fault when the model takes something else.
    """
    name = camera or _camera(contract)
    if contract.cameras:
        if name not in contract.cameras:
            raise observation.invalid(
                f"camera must be of {observation.names(contract.cameras)}; got {name!r:.80}. "
                "Start the listener with option camera."
            )
        observation.check_size(name, (HEIGHT, WIDTH, 3), contract)
        observation.check_cameras((name,), contract)
    values = list(sensed.state.joint_angles)
    if state == "all":
        values += [*sensed.state.joint_velocities, *(getattr(sensed.state, n) for n in _POSE)]
    if contract.state_dim and len(values) != contract.state_dim:
        raise observation.invalid(
            f"state of model {contract.name!r} must have {contract.state_dim} values; the robot's "
            f"has {len(values)}. Option state of the listener says which are sent."
        )
    counts = {
        "joint_angle_count": len(sensed.state.joint_angles),
        "joint_velocity_count": len(sensed.state.joint_velocities),
    }
    picture = ImageData(name, memoryview(sensed.image_rgb), (HEIGHT, WIDTH, 3))
    packed = TensorData(pack_float32(values, "state"), (len(values),), "float32")
    return InferRequest(
        request_id,
        contract.name,
        images=(picture,),
        state=packed,
        instruction=observation.prompt(sensed.language_instruction or None, contract),
        horizon=1,
        extensions={"robot": counts},
        timestamp_ns=sensed.timestamp_ns,
    )


def _camera(contract: ModelContract) -> str:
    if FRONT not in contract.cameras and len(contract.cameras) == 1:
        return next(iter(contract.cameras))
    return FRONT


def command(reply: InferReply, sensed: Any) -> bytes:
    """Return the serialised ActionCmd of a reply: joint targets, then the gripper's opening.

    Raises: Fault(data_loss) for actions that are not [1, joints + 1], finite, the gripper's in
    [0, 1].
    """
    joints = len(sensed.state.joint_angles)
    actions = reply.actions
    shape = () if actions is None else actions.shape[-2:]
    good = actions is not None and actions.dtype == "float32" and len(actions.shape) in (2, 3)
    if not good or shape != (1, joints + 1) or (actions and actions.nbytes != 4 * (joints + 1)):
        raise Fault(
            "data_loss",
            f"model must give float32 actions [1, {joints + 1}] for {joints} joints; got "
            f"{list(actions.shape) if actions else 'none'}. Serve a model of this robot.",
            started=True,
        )
    assert actions is not None
    values = struct.unpack(f"<{joints + 1}f", actions.data)
    if not all(map(isfinite, values)) or not 0.0 <= values[-1] <= 1.0:
        raise Fault(
            "data_loss",
            "model must give finite targets and a gripper opening from 0 to 1; it did not, and "
            "nothing was sent.",
            started=True,
        )
    found = pb.ActionCmd(
        target_joint_angles=values[:-1],
        gripper_opening=values[-1],
        timestamp_ns=sensed.timestamp_ns,
        inference_time=reply.inference_time_us,
    )
    return bytes(found.SerializeToString())
