"""Robot contracts: slots, state, actions and the errors of a raw observation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phyai.errors import ConfigError, RequestError
from phyai.models.pi.processing.openpi_configs import OPENPI_CONFIGS, get_openpi_config
from phyai.models.pi.processing.robots import (
    ALOHA,
    ALOHA_SIM,
    DROID,
    LIBERO,
    ROBOTS,
    axis_angle,
    droid_client_action,
    get_robot,
    libero_state,
    rotate_180,
)

FRAME = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


@pytest.mark.parametrize("name", sorted(ROBOTS))
def test_contracts_are_consistent(name: str) -> None:
    robot = get_robot(name)
    assert len(robot.units) == robot.action_dim == len(set(robot.action_names))
    assert set(robot.required_cameras) <= set(robot.cameras)
    assert robot.control_hz > 0
    assert hash(robot) is not None


def test_unknown_robot() -> None:
    with pytest.raises(ConfigError, match="'libero'"):
        get_robot("libera")


def test_libero_helpers() -> None:
    assert np.array_equal(rotate_180(FRAME), np.rot90(FRAME, 2))
    assert axis_angle(np.array([0, 0, 0, 1.0])).tolist() == [0, 0, 0]
    assert axis_angle(np.array([0, 0, 0, 1.5])).tolist() == [0, 0, 0]
    half = np.sqrt(0.5)
    assert np.allclose(axis_angle(np.array([half, 0, 0, half])), [np.pi / 2, 0, 0])
    state = libero_state(np.ones(3), np.array([0, 0, 0, 1.0]), np.array([0.1, -0.1]))
    assert state.tolist() == [1, 1, 1, 0, 0, 0, 0.1, -0.1]


def test_libero_slots_and_slice() -> None:
    inputs = LIBERO.to_model(
        {
            "observation/image": FRAME,
            "observation/wrist_image": (FRAME / 255).astype(np.float32).transpose(2, 0, 1),
            "observation/state": np.arange(8.0),
            "prompt": np.array("open the drawer"),
        }
    )
    assert set(inputs.images) == {"base_0_rgb", "left_wrist_0_rgb"}
    assert inputs.images["left_wrist_0_rgb"].dtype == np.uint8
    assert inputs.images["left_wrist_0_rgb"].shape == FRAME.shape
    assert inputs.prompt == "open the drawer"
    assert np.array_equal(LIBERO.from_model(np.arange(32.0)), np.arange(7.0))


def test_droid_state_scalar_gripper_and_client() -> None:
    base: dict[str, Any] = {
        "observation/exterior_image_1_left": FRAME,
        "observation/wrist_image_left": FRAME,
        "observation/joint_position": np.arange(7.0),
        "observation/gripper_position": 0.5,
        "prompt": b"go",
    }
    inputs = DROID.to_model(base)
    assert inputs.state.tolist() == [0, 1, 2, 3, 4, 5, 6, 0.5]
    assert inputs.prompt == "go"
    sent = droid_client_action(np.array([[2.0, -3.0, 0, 0, 0, 0, 0.1, 0.4], [0.0] * 7 + [0.6]]))
    assert sent[:, -1].tolist() == [0.0, 1.0]
    assert sent[0, :2].tolist() == [1.0, -1.0]
    del base["observation/joint_position"]
    with pytest.raises(RequestError, match="joint_position"):
        DROID.to_model(base)


def test_aloha_actions_invert_and_sim_passes_through() -> None:
    commands = np.random.default_rng(0).normal(size=(5, 14))
    assert np.allclose(ALOHA.from_model(ALOHA.encode_actions(commands)), commands, atol=1e-12)
    assert np.array_equal(ALOHA_SIM.from_model(commands), commands)
    assert np.array_equal(ALOHA_SIM.encode_state(commands[0]), commands[0])
    assert np.isfinite(ALOHA.encode_state(np.full(14, 0.5))).all()


def test_aloha_cameras() -> None:
    chw = FRAME.transpose(2, 0, 1)
    state = np.zeros(14)
    inputs = ALOHA.to_model(
        {"images": {"cam_high": chw, "cam_low": chw, "cam_right_wrist": chw}, "state": state}
    )
    assert set(inputs.images) == {"base_0_rgb", "right_wrist_0_rgb"}
    assert np.array_equal(inputs.images["base_0_rgb"], FRAME)
    assert inputs.prompt is None
    for images, word in (
        ({"cam_low": chw}, "cam_high"),
        ({"cam_top": chw}, "cam_top"),
        (None, "images"),
    ):
        with pytest.raises(RequestError, match=word):
            ALOHA.to_model({"images": images, "state": state})
    with pytest.raises(RequestError, match="14 values"):
        ALOHA.to_model({"images": {"cam_high": chw}, "state": np.zeros(7)})


def test_too_few_action_dims() -> None:
    with pytest.raises(ConfigError, match="14 action dims"):
        ALOHA.from_model(np.zeros((3, 7)))


@pytest.mark.parametrize(
    ("name", "horizon", "in_prompt", "mask", "robot"),
    [
        ("pi0_aloha_towel", 50, False, (6, -1, 6, -1), "aloha"),
        ("pi05_aloha", 50, True, (6, -1, 6, -1), "aloha"),
        ("pi0_aloha_sim", 50, False, None, "aloha_sim"),
        ("pi0_droid", 10, False, None, "droid"),
        ("pi05_droid", 15, True, None, "droid"),
        ("pi05_full_droid_finetune", 16, True, (7, -1), "droid_joint_position"),
        ("pi0_libero", 50, False, (6, -1), "libero"),
        ("pi05_libero", 10, False, None, "libero"),
    ],
)
def test_openpi_config_table(
    name: str, horizon: int, in_prompt: bool, mask: Any, robot: str
) -> None:
    config = get_openpi_config(name, "pi05" if name.startswith("pi05") else "pi0")
    assert (config.horizon, config.state_in_prompt) == (horizon, in_prompt)
    assert (config.delta_mask, config.robot) == (mask, robot)


def test_openpi_config_errors_and_masks_fit_their_robots() -> None:
    with pytest.raises(ConfigError, match="pi05_libero"):
        get_openpi_config("pi0_libero", "pi05")
    with pytest.raises(ConfigError, match="Did you mean 'pi0_droid'"):
        get_openpi_config("pi0_droit", "pi0")
    for config in OPENPI_CONFIGS.values():
        assert config.robot is not None
        if config.delta_mask is not None:
            assert sum(abs(run) for run in config.delta_mask) <= get_robot(config.robot).action_dim
