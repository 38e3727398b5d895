"""Normalisation modes, relative actions and pose formats, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from phyai.errors import CheckpointError
from phyai.models.gr00t.processing.modality import EmbodimentModalities
from phyai.models.gr00t.processing.normalize import (
    Scaling,
    action_parts,
    references,
    state_scalings,
)
from phyai.models.gr00t.processing.poses import WIDTHS, from_matrix, inverse, to_matrix
from phyai.models.gr00t.processing.statistics import parse_statistics

ONE = {"min": [0.0], "max": [4.0], "mean": [1.0], "std": [2.0], "q01": [1.0], "q99": [3.0]}


def _array(*values: Any) -> Any:
    return np.array(values, dtype=np.float64)


def _robot(**changes: Any) -> tuple[EmbodimentModalities, Any]:
    """Return one robot: a joint, a gripper and a pose, all relative but the gripper."""
    keys = ["joint", "gripper", "pose"]
    pose = {name: [value] * 6 for name, (value,) in ONE.items()}
    entry: dict[str, Any] = {
        "video": {"delta_indices": [0], "modality_keys": ["camera"]},
        "state": {"delta_indices": [0], "modality_keys": keys},
        "action": {
            "delta_indices": [0, 1],
            "modality_keys": keys,
            "action_configs": [
                {"rep": "RELATIVE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None},
                {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT"},
                {"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROTVEC", "state_key": "pose"},
            ],
        },
        "language": {"delta_indices": [0], "modality_keys": ["task"]},
    }
    stats: dict[str, Any] = {
        "state": {"joint": {**ONE}, "gripper": {**ONE}, "pose": pose},
        "action": {"joint": {**ONE}, "gripper": {**ONE}, "pose": {**pose}},
        "relative_action": {
            # the quantiles are traps: relative keys go by min and max of their step
            "joint": {
                "min": [[-1.0], [-2.0]],
                "max": [[1.0], [2.0]],
                "q01": [[-9.0], [-9.0]],
                "q99": [[9.0], [9.0]],
            },
            "pose": {"min": [[-1.0] * 6] * 2, "max": [[1.0] * 6] * 2},
        },
    }
    for path, value in changes.items():
        place: Any = {"entry": entry, "stats": stats}
        *way, last = path.split("__")
        for step in way:
            place = place[int(step) if step.isdigit() else step]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return EmbodimentModalities.from_json("bot", entry), parse_statistics({"bot": stats})["bot"]


# ---------------------------------------------------------------- scaling


def test_range() -> None:
    scaling = Scaling("range", 2, _array(0, 5), _array(4, 5))
    values = _array([1, 5], [5, 7])
    assert scaling.normalize(values, clip=True).tolist() == [[-0.5, 0], [1, 0]]
    assert scaling.normalize(values, clip=False).tolist() == [[-0.5, 0], [1.5, 0]]
    assert scaling.restore(_array([-0.5, 3], [9, -9])).tolist() == [[1, 5], [4, 5]]


def test_ranges_that_are_nearly_empty_are_constant() -> None:
    # As numpy's isclose says: a hundred-thousandth of the upper end.
    scaling = Scaling("range", 1, _array(100.0), _array(100.0009))
    assert scaling.normalize(_array([100.0009]), clip=False).item() == 0.0


def test_mean_std() -> None:
    scaling = Scaling("mean_std", 2, _array(1, 1), _array(2, 0))
    assert scaling.normalize(_array([9, 9]), clip=True).tolist() == [[4, 9]]  # never clipped
    assert scaling.restore(_array([4, 9])).tolist() == [[9, 9]]


def test_sin_cos_is_twice_as_wide() -> None:
    scaling = Scaling("sin_cos", 2)
    assert scaling.width == 4
    out = scaling.normalize(_array([0, math.pi / 2]), clip=True)
    assert np.allclose(out, [[0, 1, 1, 0]])


def test_one_row_of_statistics_per_step() -> None:
    scaling = Scaling("range", 1, _array([0], [0], [0]), _array([1], [2], [4]))
    assert scaling.restore(_array([1], [1])).tolist() == [[1], [2]]
    assert scaling.normalize(_array([1], [1], [1]), clip=True).tolist() == [[1], [0], [-0.5]]


@pytest.mark.parametrize(("quantiles", "low", "high"), [(True, 1.0, 3.0), (False, 0.0, 4.0)])
def test_state_scalings(quantiles: bool, low: float, high: float) -> None:
    modalities, stats = _robot(
        entry__state__sin_cos_embedding_keys=["joint"],
        entry__state__mean_std_embedding_keys=["joint", "gripper"],
    )
    on = state_scalings(modalities, stats, use_percentiles=quantiles, sin_cos=True)
    assert [s.kind for s in on.values()] == ["sin_cos", "mean_std", "range"]
    pose = on["pose"]
    assert pose.low is not None
    assert pose.high is not None
    assert (pose.low[0], pose.high[0]) == (low, high)
    off = state_scalings(modalities, stats, use_percentiles=quantiles, sin_cos=False)
    assert off["joint"].kind == "mean_std"  # the key list alone does nothing


# ---------------------------------------------------------------- relative actions


def _parts(use_relative: bool = True, **changes: Any) -> Any:
    modalities, stats = _robot(**changes)
    return action_parts(modalities, stats, use_percentiles=True, use_relative=use_relative)


def test_relative_joints_add_the_last_state() -> None:
    parts = _parts()
    state = {"joint": _array([99], [10]), "gripper": _array([0], [0]), "pose": np.zeros((2, 6))}
    joint, gripper, _ = references(parts, state)
    assert gripper is None
    assert joint is not None
    assert joint.tolist() == [10]
    assert parts[0].to_robot(_array([0.5], [0.5]), joint).tolist() == [[10.5], [11]]
    back = parts[0].to_model(_array([10.5], [11]), joint, clip=True)
    assert back.tolist() == [[0.5], [0.5]]
    # absolute keys go by the quantiles
    assert parts[1].to_robot(_array([1.0], [-1.0]), None).tolist() == [[3], [1]]


def test_nothing_is_relative_without_the_flag() -> None:
    parts = _parts(use_relative=False)
    assert not any(part.relative for part in parts)
    assert parts[0].to_robot(_array([1.0], [0.0]), None).tolist() == [[3], [2]]


def test_delta_actions_pass_through() -> None:
    parts = _parts(entry__action__action_configs__0__rep="DELTA")
    assert not parts[0].relative


def test_relative_poses_compose_as_matrices() -> None:
    """A quarter turn about z at (1, 2, 3): a step along its own x is one along the world's y."""
    part = _parts()[2]
    reference = _array(1, 2, 3, 0, 0, math.pi / 2)
    out = part.to_robot(_array([1, 0, 0, 0, 0, 0.5], [0] * 6), reference)
    assert np.allclose(out[0], [1, 3, 3, 0, 0, math.pi / 2 + 0.5])
    assert np.allclose(out[1], reference)
    assert np.allclose(part.to_model(out, reference, clip=True)[0], [1, 0, 0, 0, 0, 0.5])


def test_state_keys_may_have_another_name() -> None:
    parts = _parts(entry__action__action_configs__0__state_key="gripper")
    state = {"joint": _array([1]), "gripper": _array([5]), "pose": np.zeros((1, 6))}
    assert references(parts, state)[0].tolist() == [5]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"stats__relative_action__joint": None}, "relative_action/joint/min"),
        ({"stats__state__joint": None}, "state/joint/min"),
        ({"stats__action__gripper": {"min": [0.0], "max": [1.0]}}, "action/gripper/q01"),
        ({"stats__relative_action__joint__min": [[0.0]]}, "of one shape"),
        ({"stats__relative_action__joint": {"min": [[0.0]], "max": [[1.0]]}}, "2 steps"),
        ({"entry__action__action_configs__0__state_key": "elbow"}, "'elbow'"),
        ({"entry__action__action_configs__2__format": "XYZ_ROT6D"}, "must have 9 values"),
        ({"entry__action__action_configs__0__state_key": "pose"}, "must have 1 values"),
        ({"stats__action__gripper__q99": [1.0, 2.0]}, "of one shape"),
        ({"stats__action__gripper": {**ONE, "q01": [[1.0]], "q99": [[2.0]]}}, "one row"),
    ],
)
def test_statistics_that_do_not_fit_are_named(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        _states_and_actions(**changes)


def _states_and_actions(**changes: Any) -> None:
    modalities, stats = _robot(**changes)
    state_scalings(modalities, stats, use_percentiles=True, sin_cos=False)
    action_parts(modalities, stats, use_percentiles=True, use_relative=True)


# ---------------------------------------------------------------- poses


def _rotations() -> Any:
    """Return rotations about many axes, by none, small, and up to half a turn."""
    axes = np.random.default_rng(3).standard_normal((40, 3))
    axes = np.concatenate(
        [axes / np.linalg.norm(axes, axis=1, keepdims=True), np.eye(3), -np.eye(3)]
    )
    angles = np.resize([0.0, 1e-9, 1e-4, 0.7, 2.5, math.pi - 1e-7, math.pi], len(axes))
    return axes * angles[:, None]


def test_rotation_vectors_are_right_handed() -> None:
    turn = to_matrix(_array(0, 0, 0, 0, 0, math.pi / 2), "XYZ_ROTVEC")[:3, :3]
    assert np.allclose(turn, [[0, -1, 0], [1, 0, 0], [0, 0, 1]])


def test_rot6d_is_the_first_two_rows() -> None:
    pose = _array(1, 2, 3, 0, -1, 0, 1, 0, 0)
    matrix = to_matrix(pose, "XYZ_ROT6D")
    assert np.allclose(matrix, [[0, -1, 0, 1], [1, 0, 0, 2], [0, 0, 1, 3], [0, 0, 0, 1]])
    assert np.allclose(from_matrix(matrix, "XYZ_ROT6D"), pose)


def test_rot6d_rows_are_made_orthogonal() -> None:
    """The first row's direction stays; the second loses its share along it."""
    matrix = to_matrix(_array(0, 0, 0, 2, 0, 0, 5, 3, 0), "XYZ_ROT6D")
    assert np.allclose(matrix, np.eye(4))


def test_null_rows_give_finite_poses() -> None:
    assert np.isfinite(to_matrix(np.zeros(9), "XYZ_ROT6D")).all()


@pytest.mark.parametrize("form", WIDTHS)
def test_pose_formats_round_trip(form: str) -> None:
    vectors = _rotations()
    poses = np.concatenate([np.random.default_rng(4).standard_normal(vectors.shape), vectors], 1)
    matrices = to_matrix(poses, "XYZ_ROTVEC")
    rows = from_matrix(matrices, form)
    assert rows.shape == (len(poses), WIDTHS[form])
    assert np.allclose(to_matrix(rows, form), matrices, atol=1e-8)
    assert np.allclose(inverse(matrices) @ matrices, np.eye(4), atol=1e-12)
    assert np.allclose(np.linalg.det(matrices[:, :3, :3]), 1.0)


def test_angles_end_at_half_a_turn() -> None:
    vectors = _rotations()
    turned = from_matrix(to_matrix(np.pad(vectors, ((0, 0), (3, 0))), "XYZ_ROTVEC"), "XYZ_ROTVEC")
    assert np.allclose(
        np.linalg.norm(turned[:, 3:], axis=1), np.linalg.norm(vectors, axis=1), atol=1e-7
    )
    longer = from_matrix(to_matrix(_array(0, 0, 0, 0, 0, 4.0), "XYZ_ROTVEC"), "XYZ_ROTVEC")
    assert np.allclose(longer[3:], [0, 0, 4.0 - 2 * math.pi])


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ([float("nan")], "bot/state/x/min; got NaN"),
        ([float("inf")], "NaN or infinity"),
        (["a"], "numbers at bot/state/x/min"),
        ([[1.0], [1.0, 2.0]], "numbers at"),
        ([], "shape"),
        ([[[1.0]]], "shape"),
    ],
)
def test_broken_statistics_are_refused(value: Any, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        parse_statistics({"bot": {"state": {"x": {"min": value}}}})


def test_side_entries_are_left_out() -> None:
    data = {"__fingerprints__": {"bot": "ab"}, "bot": {"state": {"__hash__": {"min": "x"}}}}
    assert parse_statistics(data) == {"bot": {"state": {}}}
