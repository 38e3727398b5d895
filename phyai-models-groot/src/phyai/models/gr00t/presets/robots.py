"""The robots of the presets: modality configs and statistics of three unlike embodiments.

A single arm with absolute commands, an arm with two frames per camera and poses relative to its
own, and a humanoid whose joint angles are seen as sines and cosines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LIBERO = "libero_sim"
DROID = "oxe_droid_relative_eef_relative_joint"
GR1 = "robocasa_gr1_tabletop"
TAGS = (LIBERO, DROID, GR1)
IDS = {LIBERO: 2, DROID: 24, GR1: 10}
HORIZON = 16
CONTROL_STEPS = {LIBERO: 16, DROID: 16, GR1: 8}

_POSE = ("x", "y", "z", "roll", "pitch", "yaw")
_LIMBS = {"left_arm": 7, "left_hand": 6, "right_arm": 7, "right_hand": 6, "waist": 3}
_DROID = {"eef_9d": 9, "gripper_position": 1, "joint_position": 7}
# (lowest, highest) value of a key in the data, per value or for all.
_STATE: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]] = {
    LIBERO: {
        "x": ([-0.48], [0.21]),
        "y": ([-0.31], [0.39]),
        "z": ([0.01], [1.37]),
        "roll": ([0.35], [3.72]),
        "pitch": ([-3.64], [3.56]),
        "yaw": ([-1.84], [1.39]),
        "gripper": ([-0.001, -0.042], [0.042, 0.001]),
    },
    DROID: {
        "eef_9d": (
            [0.25, -0.40, 0.02, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0],
            [0.75, 0.40, 0.70, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        ),
        "gripper_position": ([0.0], [1.0]),
        "joint_position": (
            [-0.9, -1.0, -0.9, -2.7, -1.2, 0.4, -1.9],
            [0.9, 1.1, 0.9, -0.8, 1.2, 3.4, 2.1],
        ),
    },
    GR1: {limb: ([-1.6] * dim, [1.6] * dim) for limb, dim in _LIMBS.items()},
}
_ACTION: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]] = {
    LIBERO: {
        **{key: ([-0.94], [0.94]) for key in _POSE[:3]},
        **{key: ([-0.37], [0.37]) for key in _POSE[3:]},
        "gripper": ([-1.0], [1.0]),
    },
    DROID: _STATE[DROID],
    GR1: _STATE[GR1],
}
# Largest offset of a relative key one step ahead, and the mean pose it is an offset from.
_REACH = {
    DROID: {"eef_9d": 0.02, "joint_position": 0.03},
    GR1: dict.fromkeys(("left_arm", "left_hand", "right_arm", "right_hand"), 0.05),
}
_SAME_POSE = {"eef_9d": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]}
_VIDEO = {
    LIBERO: ("image", "wrist_image"),
    DROID: ("exterior_image_1_left", "wrist_image_left"),
    GR1: ("ego_view_bg_crop_pad_res256_freq20",),
}
_LANGUAGE = {
    LIBERO: "annotation.human.action.task_description",
    DROID: "annotation.language.language_instruction",
    GR1: "task",
}


def modality_configs() -> dict[str, Any]:
    """Return ``modality_configs`` of the three robots."""
    return {tag: _modalities(tag) for tag in TAGS}


def statistics() -> dict[str, Any]:
    """Return the content of ``statistics.json``."""
    return {
        tag: {
            "state": {key: _table(*limits) for key, limits in _STATE[tag].items()},
            "action": {key: _table(*limits) for key, limits in _ACTION[tag].items()},
            "relative_action": {
                key: _steps(tag, key, reach) for key, reach in _REACH.get(tag, {}).items()
            },
        }
        for tag in TAGS
    }


def mean_state(tag: str) -> dict[str, list[float]]:
    """Return a state in the middle of the training data, with an upright end-effector pose."""
    table = statistics()[tag]["state"]
    state = {key: list(entry["mean"]) for key, entry in table.items()}
    for key, pose in _SAME_POSE.items():
        if key in state:
            state[key][3:] = pose[3:]
    return state


def _modalities(tag: str) -> dict[str, Any]:
    relative = _REACH.get(tag)
    configs = None
    if relative is not None:
        configs = [
            {
                "rep": "RELATIVE" if key in relative else "ABSOLUTE",
                "type": "EEF" if key in _SAME_POSE else "NON_EEF",
                "format": "XYZ_ROT6D" if key in _SAME_POSE else "DEFAULT",
                "state_key": None,
            }
            for key in _ACTION[tag]
        ]
    sines = list(_STATE[tag]) if tag == GR1 else None
    return {
        "video": _entry([-15, 0] if tag == DROID else [0], _VIDEO[tag]),
        "state": _entry([0], _STATE[tag], sin_cos_embedding_keys=sines),
        "action": _entry(range(CONTROL_STEPS[tag]), _ACTION[tag], action_configs=configs),
        "language": _entry([0], [_LANGUAGE[tag]]),
    }


def _entry(steps: Sequence[int], keys: Any, **more: Any) -> dict[str, Any]:
    return {
        "delta_indices": list(steps),
        "modality_keys": list(keys),
        "sin_cos_embedding_keys": None,
        "mean_std_embedding_keys": None,
        "action_configs": None,
        **more,
    }


def _table(low: Any, high: Any) -> dict[str, Any]:
    """Return the six statistics of values spread evenly over a range; [D] or [H, D]."""
    low, high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
    middle, span = (low + high) / 2, high - low
    values = {
        "min": low,
        "max": high,
        "mean": middle,
        "std": span / np.sqrt(12),
        "q01": low + 0.01 * span,
        "q99": high - 0.01 * span,
    }
    return {name: np.round(value, 6).tolist() for name, value in values.items()}


def _steps(tag: str, key: str, reach: float) -> dict[str, Any]:
    """Return the statistics of offsets that grow step by step."""
    dim = len(_STATE[tag][key][0])
    middle = np.asarray(_SAME_POSE.get(key, [0.0] * dim))
    reaches = reach * np.arange(1, CONTROL_STEPS[tag] + 1)[:, None]
    return _table(middle - reaches, middle + reaches)
