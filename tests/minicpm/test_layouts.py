"""Robot contracts: golden states and actions, rotations, pieces, wording, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from phyai.errors import ConfigError, RequestError
from phyai.models.minicpm_robot.processing import rotations
from phyai.models.minicpm_robot.processing.contracts import CONTRACTS, RobotContract, find_contract
from phyai.models.minicpm_robot.processing.layouts import (
    columns,
    decode_actions,
    decode_arm,
    pack_state,
)
from tests.conftest import GOLDEN

CASES = json.loads((GOLDEN / "minicpm/case_robotwin_layout.json").read_text("utf-8"))["cases"]
ROBOTWIN, LIBERO, CALVIN = (find_contract(name) for name in ("robotwin", "libero", "calvin"))
RNG = np.random.default_rng(3)
IDENTITY = [1.0, 0.0, 0.0, 0.0]


def turns(count: int) -> Any:
    return rotations.from_quaternion(RNG.standard_normal((count, 4)))


def robotwin_pieces(case: dict[str, Any]) -> dict[str, Any]:
    joints = case["joint_state14"]
    pose = np.asarray(case["endpose16_xyz_wxyz_gripperopen"], np.float32)
    out = {}
    for arm, at in (("left", 0), ("right", 1)):
        out[arm] = {
            "joints": joints[7 * at : 7 * at + 6],
            "position": pose[8 * at : 8 * at + 3],
            "quaternion_wxyz": pose[8 * at + 3 : 8 * at + 7],
            "gripper_open": pose[8 * at + 7],
        }
    return out


# ---------------------------------------------------------------- golden


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_golden_states(case: dict[str, Any]) -> None:
    want = np.asarray(case["packed_state80"])
    got = pack_state(robotwin_pieces(case), ROBOTWIN, 80)
    np.testing.assert_allclose(got, want, atol=1e-6, rtol=0)
    assert got[[16, 33]].tolist() == want[[16, 33]].tolist()
    assert got.dtype == np.float32


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_golden_actions(case: dict[str, Any]) -> None:
    actions = np.asarray([case["predicted_action80"]] * 2, np.float32)
    commands = decode_actions(actions, ROBOTWIN)
    for at, arm in enumerate(("left", "right")):
        decoded = decode_arm(actions, arm, ROBOTWIN)  # type: ignore[arg-type]
        want = case["decoded"]
        np.testing.assert_allclose(decoded.position[1], want[f"{arm}_xyz"], atol=1e-6)
        np.testing.assert_allclose(decoded.rotation[1], want[f"{arm}_rotation_matrix"], atol=1e-6)
        assert float(not decoded.closed[1]) == want[f"{arm}_gripper_open"]
        own = commands[1, 8 * at : 8 * at + 8]
        np.testing.assert_allclose(own[:3], want[f"{arm}_xyz"], atol=1e-6)
        turn = rotations.from_quaternion(own[3:7])
        np.testing.assert_allclose(turn, want[f"{arm}_rotation_matrix"], atol=1e-6)
        assert own[7] == want[f"{arm}_gripper_open"]


# ---------------------------------------------------------------- rotations


@pytest.mark.parametrize("form", ["interleaved", "columns"])
def test_rotations_survive_every_form(form: Any) -> None:
    matrices = np.concatenate([turns(50), np.eye(3)[None], _half_turns()])
    for to, back in (
        (rotations.to_quaternion, rotations.from_quaternion),
        (rotations.to_euler, rotations.from_euler),
        (rotations.to_axis_angle, rotations.from_axis_angle),
    ):
        np.testing.assert_allclose(back(to(matrices)), matrices, atol=1e-7)
    six = rotations.to_rotation6d(matrices, form)
    np.testing.assert_allclose(rotations.from_rotation6d(six, form), matrices, atol=1e-12)
    np.testing.assert_allclose(rotations.from_rotation6d(3 * six, form), matrices, atol=1e-12)


def _half_turns() -> Any:
    return np.stack([np.diag(signs) for signs in ([1, -1, -1], [-1, 1, -1], [-1, -1, 1])]).astype(
        float
    )


def test_euler_angles_turn_about_fixed_axes_x_first() -> None:
    a, b, c = 0.3, -0.4, 1.1
    about = [
        rotations.from_axis_angle(angle * np.eye(3)[axis]) for axis, angle in enumerate((a, b, c))
    ]
    np.testing.assert_allclose(rotations.from_euler([a, b, c]), about[2] @ about[1] @ about[0])
    steep = rotations.from_euler([0.2, np.pi / 2, 0.5])
    np.testing.assert_allclose(rotations.from_euler(rotations.to_euler(steep)), steep, atol=1e-9)


def test_orders_of_the_six_numbers_differ() -> None:
    [matrix] = turns(1)
    inter = rotations.to_rotation6d(matrix, "interleaved")
    assert np.array_equal(inter, matrix[:, :2].reshape(6))
    assert np.array_equal(rotations.to_rotation6d(matrix, "columns"), matrix[:, :2].T.reshape(6))


# ---------------------------------------------------------------- states


def piece_state(matrix: Any, **changes: Any) -> dict[str, Any]:
    return {"position": [0.4, 0.1, 0.2], "rotation_matrix": matrix, "gripper_closed": 1, **changes}


@pytest.mark.parametrize("contract", [LIBERO, CALVIN])
def test_every_form_of_a_rotation_gives_the_same_state(contract: RobotContract) -> None:
    [matrix] = turns(1)
    want = pack_state(piece_state(matrix), contract, 80)
    assert want[:7].tolist() == [0] * 7
    assert not want[17:].any()
    six = rotations.to_rotation6d(matrix, contract.rotation6d)
    np.testing.assert_allclose(want[7:17], [0.4, 0.1, 0.2, *six, 1.0], atol=1e-6)
    wxyz = rotations.to_quaternion(matrix)
    for name, value in (
        ("rotation6d", six),
        ("quaternion_wxyz", 2.0 * wxyz),
        ("quaternion_xyzw", np.roll(wxyz, -1)),
        ("euler_xyz", rotations.to_euler(matrix)),
        ("axis_angle", torch.from_numpy(rotations.to_axis_angle(matrix))),
    ):
        pieces = piece_state(matrix)
        del pieces["rotation_matrix"]
        got = pack_state({**pieces, name: value}, contract, 80)
        np.testing.assert_allclose(got, want, atol=1e-6)
        prefixed = {f"left.{key}": piece for key, piece in pieces.items()}
        assert np.array_equal(pack_state({**prefixed, f"left.{name}": value}, contract, 80), got)
    assert np.array_equal(pack_state(want[7:17], contract, 80), want)
    assert np.array_equal(pack_state(list(map(float, want)), contract, 80), want)


def test_vectors_of_two_arms() -> None:
    values = RNG.standard_normal(20).astype(np.float32)
    got = pack_state(values, ROBOTWIN, 80)
    assert np.array_equal(got[7:17], values[:10])
    assert np.array_equal(got[24:34], values[10:])
    assert got[[*range(7), *range(17, 24), *range(34, 80)]].tolist() == [0] * 60


def test_states_share_no_memory_with_the_caller() -> None:
    values = np.ones(80, np.float32)
    got = pack_state(values, find_contract("raw"), 80)
    values[:] = 5
    assert got.max() == 1


@pytest.mark.parametrize(
    ("contract", "opening", "closed"),
    [
        ("robotwin", 0.4, 1.0),
        ("robotwin", np.float32(0.4), 1.0),
        ("robotwin", np.nextafter(np.float32(0.4), np.float32(1)), 0.0),
        ("robotwin", 0.0, 1.0),
        ("calvin", -1.0, 1.0),
        ("calvin", 0.0, 0.0),
        ("calvin", 1, 0.0),
    ],
)
def test_measured_openings(contract: str, opening: Any, closed: float) -> None:
    arm = {"position": [0, 0, 0], "quaternion_wxyz": IDENTITY, "gripper_open": opening}
    chosen = find_contract(contract)
    state = pack_state(dict.fromkeys(chosen.arms, arm), chosen, 80)
    assert state[16] == closed


def test_libero_leaves_the_gripper_channel_empty() -> None:
    pieces = {"position": [0, 0, 0], "quaternion_wxyz": IDENTITY}
    assert pack_state(pieces, LIBERO, 80)[16] == 0
    with pytest.raises(RequestError, match="gripper_open"):
        pack_state({**pieces, "gripper_open": 1.0}, LIBERO, 80)


@pytest.mark.parametrize("name", ["libero", "calvin", "robotwin", "raw"])
def test_a_missing_state_is_never_made_up(name: str) -> None:
    with pytest.raises(RequestError, match="state must be sent"):
        pack_state(None, find_contract(name), 80)


GOOD = {"position": [0.0, 0, 0], "quaternion_wxyz": IDENTITY, "gripper_closed": 0}


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (np.zeros(79), r"shape \[79\]"),
        (np.zeros((1, 80)), r"shape \[1, 80\]"),
        (np.full(80, np.nan), "finite"),
        (np.full(10, np.inf), "finite"),
        (["a"] * 80, "numbers"),
        ([[1.0], [2.0, 3.0]], "one shape"),
        (True, "numbers"),
        ({}, "one of rotation6d|hold position"),
        ({**GOOD, "position": [0, 0]}, "position"),
        ({**GOOD, "position": [0, 0, np.nan]}, "finite"),
        ({**GOOD, "postion": [0, 0, 0]}, "Did you mean 'position'"),
        ({**GOOD, "euler_xyz": [0, 0, 0]}, "quaternion_wxyz, euler_xyz"),
        ({**GOOD, "quaternion_wxyz": [0, 0, 0, 0]}, "without direction"),
        ({**GOOD, "gripper_closed": 2}, r"\[0, 1\]"),
        ({**GOOD, "gripper_open": 1}, "gripper_closed, gripper_open"),
        ({**GOOD, "joints": [0] * 7}, "joints"),
        ({**GOOD, "right.position": [0, 0, 0]}, "right.position"),
        ({"position": [0, 0, 0], "quaternion_wxyz": IDENTITY}, "neither"),
        ({"position": [0, 0, 0], "gripper_closed": 0}, "got none"),
        ({**GOOD, "left.position": [1, 1, 1]}, "position twice"),
        ({"left": GOOD, "left.position": [1, 1, 1]}, r"left\.position twice"),
    ],
)
def test_refused_states(state: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        pack_state(state, CALVIN, 80)


@pytest.mark.parametrize(
    "matrix", [2 * np.eye(3), np.diag([1.0, 1, -1]), np.eye(3) + 0.01, np.zeros((3, 3))]
)
def test_matrices_that_are_no_rotations_are_refused(matrix: Any) -> None:
    with pytest.raises(RequestError, match="must be a rotation"):
        pack_state(piece_state(matrix), CALVIN, 80)


def test_six_numbers_in_the_other_order_are_no_rotation() -> None:
    """They go in as measured, so nothing would put them right."""
    [matrix] = turns(1)
    for contract, other in ((LIBERO, "interleaved"), (CALVIN, "columns")):
        right = rotations.to_rotation6d(matrix, contract.rotation6d)
        for wrong in (rotations.to_rotation6d(matrix, other), 2 * right):  # type: ignore[arg-type]
            pieces = {"position": [0, 0, 0], "rotation6d": wrong, "gripper_closed": 0}
            with pytest.raises(RequestError, match="rotation6d of the left arm must be a rotation"):
                pack_state(pieces, contract, 80)


def test_one_arm_of_two_is_refused() -> None:
    with pytest.raises(RequestError, match="right arm"):
        pack_state({"left": GOOD}, ROBOTWIN, 80)
    with pytest.raises(RequestError, match=r"left\.NAME"):
        pack_state({"left": GOOD, "right": GOOD, "position": [0, 0, 0]}, ROBOTWIN, 80)


# ---------------------------------------------------------------- actions


def model_actions(contract: RobotContract, matrices: Any, closed: Any) -> Any:
    out = RNG.standard_normal((len(matrices), 80)).astype(np.float32)
    for arm in range(len(contract.arms)):
        out[:, 17 * arm + 10 : 17 * arm + 16] = rotations.to_rotation6d(
            matrices, contract.rotation6d
        )
        out[:, 17 * arm + 16] = closed
    return out


@pytest.mark.parametrize(
    ("name", "back", "values"),
    [
        ("libero", rotations.from_axis_angle, (-1.0, 1.0)),
        ("calvin", rotations.from_euler, (1.0, -1.0)),
        ("robotwin", rotations.from_quaternion, (1.0, 0.0)),
    ],
)
def test_commands_are_in_the_robots_own_form(name: str, back: Any, values: Any) -> None:
    contract, matrices = find_contract(name), turns(5)
    actions = model_actions(contract, matrices, [0.0, 0.4999, 0.5, 0.7, 1.0])
    commands = decode_actions(actions, contract)
    names = [column for column, _ in columns(contract)]
    assert commands.shape == (5, len(names))
    assert commands.dtype == np.float32
    width = len(names) // len(contract.arms)
    for arm in range(len(contract.arms)):
        own = commands[:, width * arm : width * (arm + 1)]
        np.testing.assert_array_equal(own[:, :3], actions[:, 17 * arm + 7 : 17 * arm + 10])
        np.testing.assert_allclose(back(own[:, 3:-1]), matrices, atol=1e-6)
        opened, closed = values
        assert own[:, -1].tolist() == [opened, opened, closed, closed, closed]


def test_a_prediction_without_rotation_is_nan_in_its_step_only() -> None:
    actions = model_actions(LIBERO, turns(3), 0.0)
    actions[1, 10:16] = 0
    commands = decode_actions(actions, LIBERO)
    assert np.isnan(commands[1, 3:6]).all()
    assert np.isfinite(commands[[0, 2]]).all()
    parallel = model_actions(LIBERO, turns(1), 0.0)
    parallel[0, 13:16] = 2 * parallel[0, 10:13]
    assert np.isnan(decode_actions(parallel, LIBERO)).any()


def test_raw_actions_are_all_channels() -> None:
    raw, actions = find_contract("raw"), RNG.standard_normal((2, 80)).astype(np.float32)
    assert np.array_equal(decode_actions(actions, raw), actions)
    named = columns(raw)
    assert len({name for name, _ in named}) == 80
    assert named[7] == ("left.x", "m")
    assert named[33] == ("right.gripper_closed", "")
    assert named[34] == ("reserved.34", "")
    assert columns(raw, 12)[11] == ("channel.11", "")


def test_column_names() -> None:
    assert [name for name, _ in columns(LIBERO)] == ["x", "y", "z", "rx", "ry", "rz", "gripper"]
    assert [name for name, _ in columns(CALVIN)][3:] == ["roll", "pitch", "yaw", "gripper"]
    assert [name for name, _ in columns(ROBOTWIN)][7:12] == [
        "left.gripper",
        "right.x",
        "right.y",
        "right.z",
        "right.qw",
    ]
    assert [unit for _, unit in columns(LIBERO)] == ["m"] * 3 + ["rad"] * 3 + [""]


# ---------------------------------------------------------------- wording


@pytest.mark.parametrize("name", ["libero", "calvin", "robotwin"])
def test_wording(name: str) -> None:
    contract = find_contract(name)
    made = contract.instruction("put {it} on %s {instruction}")
    assert made.endswith("Task: put {it} on %s {instruction}")
    assert f"action FPS is {contract.control_hz:g} Hz. Task: " in made
    assert "unified 80D layout" in made
    # a whole prompt passes, half of one does not
    assert contract.instruction(made) == made
    assert contract.instruction("Task: go").count("Task:") == 2
    assert find_contract("raw").instruction("put {it}") == "put {it}"


def test_published_wording() -> None:
    assert LIBERO.instruction("X") == (
        "The robot is LIBERO Franka, a simulated single-arm Franka manipulator. Its action control "
        "method is absolute single-arm end-effector pose in the unified 80D layout with gripper "
        "closed command, and its action FPS is 20 Hz. Task: X"
    )
    assert ROBOTWIN.instruction("X") == (
        "The robot is RoboTwin2 ALOHA-AgileX, a simulated dual-arm ALOHA-style manipulator. Its "
        "action control method is absolute dual-arm end-effector pose in the unified 80D layout "
        "with gripper closed commands, and its action FPS is 15 Hz. Task: X"
    )


def test_published_ids_and_rates() -> None:
    facts = {name: (c.embodiment_id, c.control_hz, c.cameras) for name, c in CONTRACTS.items()}
    assert facts == {
        "raw": (0, None, ()),
        "libero": (0, 20.0, ("agentview", "wrist")),
        "calvin": (1, 10.0, ("static", "gripper")),
        "robotwin": (4, 15.0, ("head", "left_wrist", "right_wrist")),
    }


def test_unknown_and_impossible_contracts() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'robotwin'"):
        find_contract("robotwn")
    with pytest.raises(ConfigError, match="contract must be one of"):
        find_contract(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="instruction"):
        replace(LIBERO, prompt="Task: none")
    with pytest.raises(ConfigError, match="arms"):
        replace(LIBERO, arms=("right",))
