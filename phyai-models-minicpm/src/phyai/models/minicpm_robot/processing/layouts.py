"""The 80 channels: robot states into them, and the model's actions out of them.

Each arm has 17 channels, left first: 7 joint angles (rad), position (m), six rotation numbers, and
1 for a closed gripper. The other channels are 0 and mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from phyai.errors import RequestError, did_you_mean
from phyai.models.minicpm_robot.processing import rotations
from phyai.models.minicpm_robot.processing.contracts import CHANNELS, RobotContract, Side, Turn
from phyai.request_values import host_tensor

ARM_CHANNELS = 17
CLOSED_FROM = np.float32(0.5)
"""A predicted gripper channel from this value on is a closed gripper."""
_JOINTS, _POSITION, _ROTATION, _GRIPPER = slice(0, 7), slice(7, 10), slice(10, 16), 16
_OFFSET: dict[Side, int] = {"left": 0, "right": ARM_CHANNELS}
_NOT_ORTHOGONAL = 1e-3
_ROTATION_PIECES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "rotation_matrix": ((3, 3), lambda values: values),
    "quaternion_wxyz": ((4,), rotations.from_quaternion),
    "quaternion_xyzw": ((4,), lambda values: rotations.from_quaternion(np.roll(values, 1))),
    "euler_xyz": ((3,), rotations.from_euler),
    "axis_angle": ((3,), rotations.from_axis_angle),
}
_TURN_COLUMNS: dict[Turn, tuple[tuple[str, str], ...]] = {
    "axis_angle": (("rx", "rad"), ("ry", "rad"), ("rz", "rad")),
    "euler_xyz": (("roll", "rad"), ("pitch", "rad"), ("yaw", "rad")),
    "quaternion_wxyz": (("qw", ""), ("qx", ""), ("qy", ""), ("qz", "")),
}
_TURN: dict[Turn, Callable[[Any], Any]] = {
    "axis_angle": rotations.to_axis_angle,
    "euler_xyz": rotations.to_euler,
    "quaternion_wxyz": rotations.to_quaternion,
}


@dataclass(frozen=True, slots=True)
class ArmActions:
    """Decoded actions of one arm.

    position: float32 [H, 3] m.  rotation: float32 [H, 3, 3], NaN where the prediction is none.
    closed: bool [H].
    """

    position: NDArray[np.float32]
    rotation: NDArray[np.float32]
    closed: NDArray[np.bool_]


_CONTRACT_HINT = "For a robot's own numbers choose its contract, such as contract='libero'."

# ---------------------------------------------------------------- robot -> model


def pack_state(state: Any, contract: RobotContract, width: int) -> NDArray[np.float32]:
    """Return the model's state, float32 [width].

    state: all channels as they are; the 10 numbers of every arm in order (position, six rotation
        numbers, gripper closed); or a mapping of pieces, see ``expected_state``.
    Raises: RequestError, also for None: no robot's state is made up.
    """
    if state is None:
        raise RequestError(
            f"state must be sent for contract {contract.name!r}; got none. Send "
            f"{expected_state(contract)}."
        )
    if isinstance(state, Mapping) and not contract.raw:
        return _from_pieces(_flat(state), contract, width)
    values = _numbers("state", state)
    if values.shape == (width,):
        return values
    arms = flat_width(contract, width)
    if contract.raw or values.shape != (arms,):
        raise RequestError(
            f"state must be {expected_state(contract, width)}; got shape {list(values.shape)}. "
            f"{_CONTRACT_HINT if contract.raw else 'Send the state the checkpoint was trained on.'}"
        )
    out = np.zeros(width, dtype=np.float32)
    for number, arm in enumerate(contract.arms):
        at = _OFFSET[arm] + _POSITION.start
        out[at : at + 10] = values[10 * number : 10 * number + 10]
    return out


def expected_state(contract: RobotContract, width: int = CHANNELS) -> str:
    """Return in words what a state must be."""
    if contract.raw:
        return f"{width} values"
    pieces = ["position (3)", f"one of {', '.join(('rotation6d', *_ROTATION_PIECES))}"]
    opening = "" if contract.open_threshold is None else " or gripper_open"
    pieces.append(f"gripper_closed{opening}")
    if contract.joints:
        pieces.append(f"joints ({contract.joints}, optional)")
    prefix = "" if len(contract.arms) == 1 else ", each as left.NAME and right.NAME"
    return (
        f"{width} values, {flat_width(contract, width)} values, or pieces: "
        f"{', '.join(pieces)}{prefix}"
    )


def flat_width(contract: RobotContract, width: int = CHANNELS) -> int:
    """Return how many numbers the shortest flat state has: all channels, or 10 per arm.

    >>> from phyai.models.minicpm_robot.processing.contracts import CONTRACTS
    >>> [flat_width(CONTRACTS[name]) for name in ("raw", "libero", "robotwin")]
    [80, 10, 20]
    """
    return width if contract.raw else 10 * len(contract.arms)


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested pieces under dotted names.  Raises: RequestError for one sent twice."""
    out: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            for inner, piece in value.items():
                _add(out, f"{name}.{inner}", piece)
        else:
            _add(out, str(name), value)
    return out


def _add(pieces: dict[str, Any], name: str, value: Any) -> None:
    if name in pieces:
        raise RequestError(f"state must hold each piece once; got {name} twice. Drop one of them.")
    pieces[name] = value


def _from_pieces(
    pieces: dict[str, Any], contract: RobotContract, width: int
) -> NDArray[np.float32]:
    out = np.zeros(width, dtype=np.float32)
    left_over = dict(pieces)
    for arm in contract.arms:
        own: dict[str, Any] = {}
        for name in list(left_over):
            side, dot, piece = name.partition(".")
            if dot and side == arm:
                _add(own, piece, left_over.pop(name))
            elif not dot and len(contract.arms) == 1:  # a single arm needs no prefix
                _add(own, name, left_over.pop(name))
        channels = out[_OFFSET[arm] : _OFFSET[arm] + ARM_CHANNELS]
        _arm_channels(own, arm, contract, channels)
    if left_over:
        raise RequestError(
            f"state pieces of contract {contract.name!r} must be {expected_state(contract)}; got "
            f"{sorted(left_over)}. Rename or drop them."
        )
    return out


def _arm_channels(
    own: dict[str, Any], arm: Side, contract: RobotContract, out: NDArray[np.float32]
) -> None:
    """Fill the 17 channels of one arm from its pieces."""
    known = ["position", "rotation6d", *_ROTATION_PIECES, "gripper_closed"]
    known += ["joints"] * bool(contract.joints)
    known += ["gripper_open"] * (contract.open_threshold is not None)
    if unknown := sorted(set(own) - set(known)):
        raise RequestError(
            f"state pieces of the {arm} arm must be among {', '.join(known)}; got {unknown[0]!r}."
            f"{did_you_mean(unknown[0], known)} Rename or drop it."
        )
    out[_POSITION] = _piece(own, arm, "position", (3,))
    out[_ROTATION] = _rotation(own, arm, contract)
    out[_GRIPPER] = _gripper(own, arm, contract)
    if "joints" in own:
        out[: contract.joints] = _piece(own, arm, "joints", (contract.joints,))


def _rotation(own: dict[str, Any], arm: Side, contract: RobotContract) -> Any:
    given = [name for name in ("rotation6d", *_ROTATION_PIECES) if name in own]
    if len(given) != 1:
        raise RequestError(
            f"state of the {arm} arm must hold one of rotation6d, {', '.join(_ROTATION_PIECES)}; "
            f"got {', '.join(given) or 'none'}. Send one."
        )
    name = given[0]
    if name == "rotation6d":
        values = _piece(own, arm, name, (6,))
        matrix = rotations.from_rotation6d(values, contract.rotation6d)
    else:
        shape, convert = _ROTATION_PIECES[name]
        matrix = values = convert(_piece(own, arm, name, shape).astype(np.float64))
    if not np.isfinite(matrix).all():
        raise RequestError(
            f"{name} of the {arm} arm must be a rotation; got vectors without direction. "
            "Check the robot's sensors."
        )
    if name == "rotation6d":
        off = abs(rotations.to_rotation6d(matrix, contract.rotation6d) - values).max()
    else:
        off = abs(matrix.T @ matrix - np.eye(3)).max()
    if off > _NOT_ORTHOGONAL or np.linalg.det(matrix) < 0:
        raise RequestError(
            f"{name} of the {arm} arm must be a rotation: orthogonal to {_NOT_ORTHOGONAL} and "
            f"right-handed; got numbers {off:.2g} off. Check its order of numbers."
        )
    # Six numbers go in as they were measured.
    return values if name == "rotation6d" else rotations.to_rotation6d(matrix, contract.rotation6d)


def _gripper(own: dict[str, Any], arm: Side, contract: RobotContract) -> float:
    given = [name for name in ("gripper_closed", "gripper_open") if name in own]
    if not given and contract.open_threshold is None:
        return 0.0  # this robot's data leaves the channel empty
    if len(given) != 1:
        raise RequestError(
            f"state of the {arm} arm must hold gripper_closed or gripper_open; got "
            f"{', '.join(given) or 'neither'}. Send one."
        )
    value = _piece(own, arm, given[0], ())
    if given[0] == "gripper_closed":
        if not 0.0 <= value <= 1.0:
            raise RequestError(
                f"gripper_closed of the {arm} arm must lie in [0, 1]; got {float(value):g}. "
                "Send 1 for closed."
            )
        return float(value)
    assert contract.open_threshold is not None
    # In float32: a measured 0.4 is the threshold itself, in float64 it would be above it.
    threshold = np.float32(contract.open_threshold)
    is_open = value >= threshold if contract.open_inclusive else value > threshold
    return 0.0 if is_open else 1.0


def _piece(own: dict[str, Any], arm: Side, name: str, shape: tuple[int, ...]) -> Any:
    if name not in own:
        raise RequestError(
            f"state of the {arm} arm must hold {name}; got {', '.join(sorted(own)) or 'nothing'}. "
            "Send it."
        )
    values = _numbers(f"{name} of the {arm} arm", own[name])
    if shape == () and values.shape == (1,):
        values = values[0]
    if values.shape != shape:
        raise RequestError(
            f"{name} of the {arm} arm must have shape {list(shape)}; got {list(values.shape)}. "
            "Send the measured values."
        )
    return values


def _numbers(name: str, value: Any) -> NDArray[np.float32]:
    """Return finite float32 numbers, sharing no memory with the caller."""
    if isinstance(value, Tensor):
        value = host_tensor(name, value)
        value = (value.float() if value.is_floating_point() else value).numpy()
    try:
        array = np.array(value)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"dtype {array.dtype}")
    except Exception as error:  # anything an array-like's own conversion raises
        raise RequestError(
            f"{name} must be numbers of one shape; got {type(value).__name__}: {error}. Convert it."
        ) from error
    with np.errstate(over="ignore"):  # an overflow is infinite, which is refused below
        out = array.astype(np.float32)
    if not np.isfinite(out).all():
        raise RequestError(
            f"{name} must be finite; got NaN or infinity. Check the robot's sensors."
        )
    return out


# ---------------------------------------------------------------- model -> robot


def decode_arm(actions: NDArray[np.float32], arm: Side, contract: RobotContract) -> ArmActions:
    """Return one arm's actions; actions [H, channels], model space."""
    own = actions[:, _OFFSET[arm] : _OFFSET[arm] + ARM_CHANNELS]
    rotation = rotations.from_rotation6d(own[:, _ROTATION], contract.rotation6d)
    return ArmActions(
        own[:, _POSITION].astype(np.float32),
        rotation.astype(np.float32),
        own[:, _GRIPPER] >= CLOSED_FROM,
    )


def decode_actions(actions: NDArray[np.float32], contract: RobotContract) -> NDArray[np.float32]:
    """Return robot commands; actions [H, channels], model space -> float32 [H, A].

    The columns are those of ``columns``. A step whose prediction is no rotation holds NaN.
    """
    if contract.raw:
        return actions.astype(np.float32)
    opened, closed = contract.gripper_command
    out = []
    for arm in contract.arms:
        decoded = decode_arm(actions, arm, contract)
        # In float64 from the prediction on, rounded once.
        own = actions[:, _OFFSET[arm] :][:, _ROTATION]
        turn = _TURN[contract.action_rotation](rotations.from_rotation6d(own, contract.rotation6d))
        gripper = np.where(decoded.closed, closed, opened)[:, None]
        out += [decoded.position, turn, gripper]
    return np.concatenate(out, axis=1).astype(np.float32)


def columns(contract: RobotContract, width: int = CHANNELS) -> tuple[tuple[str, str], ...]:
    """Return the (name, unit) of every column of decoded actions."""
    if contract.raw:
        return _channel_names(width)
    arm_columns = [(axis, "m") for axis in "xyz"]
    arm_columns += [*_TURN_COLUMNS[contract.action_rotation], ("gripper", "")]
    prefix = {arm: f"{arm}." if len(contract.arms) > 1 else "" for arm in contract.arms}
    return tuple((prefix[arm] + name, unit) for arm in contract.arms for name, unit in arm_columns)


def _channel_names(width: int) -> tuple[tuple[str, str], ...]:
    if width != CHANNELS:
        return tuple((f"channel.{index}", "") for index in range(width))
    arm_columns = [(f"joint.{i}", "rad") for i in range(7)]
    arm_columns += [(axis, "m") for axis in "xyz"]
    arm_columns += [(f"rotation6d.{i}", "") for i in range(6)]
    arm_columns.append(("gripper_closed", ""))
    named = [(f"{arm}.{name}", unit) for arm in _OFFSET for name, unit in arm_columns]
    return (*named, *((f"reserved.{index}", "") for index in range(len(named), width)))
