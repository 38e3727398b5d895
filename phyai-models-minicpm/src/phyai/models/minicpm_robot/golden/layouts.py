"""Cases of a robot's layout: states into the unified channels, and actions out of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.golden import Comparison, GoldenRun, absolute, exact, unknown
from phyai.models.minicpm_robot.golden.cases import Case
from phyai.models.minicpm_robot.processing.contracts import find_contract
from phyai.models.minicpm_robot.processing.layouts import decode_arm, pack_state

TOLERANCE = 1e-6
CONTRACT = "robotwin"
ARMS = ("left", "right")
JOINTS, POSE, PACKED = "joint_state14", "endpose16_xyz_wxyz_gripperopen", "packed_state80"
ACTION, DECODED = "predicted_action80", "decoded"
INPUTS = frozenset({JOINTS, POSE, ACTION})


def layout_runs(case: Case) -> list[GoldenRun]:
    """Return the run of a layout case; needs no engine."""
    return [GoldenRun(case.path.name, lambda *_: _compare(case))]


def _compare(case: Case) -> list[Comparison]:
    rows = []
    for number, record in enumerate(case.data["cases"]):
        if not isinstance(record, Mapping):
            raise CheckpointError(
                f"golden case {case.path.name} must hold objects in cases; got {record!r}."
            )
        found = {PACKED: _packed(record), **_decoded(record)}
        wanted = {key: value for key, value in record.items() if key not in (*INPUTS, DECODED)}
        wanted.update({f"{DECODED}.{key}": v for key, v in record.get(DECODED, {}).items()})
        rows += [
            _row(f"cases.{number}.{key}", found.get(key), value) for key, value in wanted.items()
        ]
    return rows


def _row(name: str, got: Tensor | None, want: Any) -> Comparison:
    if got is None:
        return unknown(name)
    expected = torch.tensor(want, dtype=torch.float64)
    if "gripper" in name:  # a decision
        return exact(name, got.double(), expected)
    return absolute(name, got.double(), expected, TOLERANCE)


def _packed(record: Mapping[str, Any]) -> Tensor:
    """Return the state of measured poses; joints and gripper of an arm are 7 numbers."""
    state: dict[str, Any] = {}
    for i, arm in enumerate(ARMS):
        pose = record[POSE][8 * i : 8 * i + 8]
        state[arm] = {
            "position": pose[:3],
            "quaternion_wxyz": pose[3:7],
            "gripper_open": pose[7],
            "joints": record[JOINTS][7 * i : 7 * i + 6],
        }
    width = len(record[PACKED]) if PACKED in record else len(record[ACTION])
    return torch.from_numpy(pack_state(state, find_contract(CONTRACT), width))


def _decoded(record: Mapping[str, Any]) -> dict[str, Tensor]:
    actions = np.asarray([record[ACTION]], dtype=np.float32)
    found: dict[str, Tensor] = {}
    for arm in ("left", "right"):
        side: Any = arm
        decoded = decode_arm(actions, side, find_contract(CONTRACT))
        found[f"{DECODED}.{arm}_xyz"] = torch.from_numpy(decoded.position[0])
        found[f"{DECODED}.{arm}_rotation_matrix"] = torch.from_numpy(decoded.rotation[0])
        found[f"{DECODED}.{arm}_gripper_open"] = torch.tensor(float(not decoded.closed[0]))
    return found
