"""DROID requests: recorded pixels and rows exactly, states, noise, decoding, refusals."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from phyai.errors import RequestError
from phyai.models.cosmos3.processing.actions import ActionPlan, action_plan, known_actions
from phyai.models.cosmos3.processing.canvas import canvas_of, fit
from phyai.models.cosmos3.processing.droid import (
    PREFIX,
    compose,
    joint_actions,
    joint_rows,
    observed_image,
    resize_truncated,
    state_rows,
)
from phyai.models.cosmos3.processing.midtrain import (
    DROID_STATISTICS,
    EefState,
    eef_actions,
    eef_rows,
)
from phyai.models.cosmos3.processing.noise import modality_noise
from phyai.models.cosmos3.processing.normalizers import Normalizer
from phyai.models.cosmos3.processing.poses import poses_of, quaternions_of, steps_between, walk

GOLDEN = Path(__file__).parents[1] / "golden/cosmos3"
READY = [0.1, -0.5, 0.2, -2.1, 0.05, 1.7, 0.8]


def case(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(GOLDEN / f"case_{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        raw = file.metadata()
    return tensors, {key: _value(text) for key, text in raw.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def drawn(height: int, width: int, k: int) -> np.ndarray:
    """Return the recorded cases' synthetic image."""
    y, x, c = np.mgrid[:height, :width, :3]
    return ((3 * x + 7 * y + 50 * c + 31 * k + (x * y) // 97) % 256).astype(np.uint8)


def official_views() -> dict[str, np.ndarray]:
    return {
        "wrist_image_left": drawn(360, 640, 0),
        "exterior_image_1_left": drawn(360, 640, 1),
        "exterior_image_2_left": drawn(720, 1280, 2),
    }


def known_rows(plan: ActionPlan, like: Tensor, clean: Any) -> tuple[Tensor, Tensor]:
    """Return what a plan's request knows of actions as wide as ``like``."""
    return known_actions(plan.rows, plan.raw_dim, like.shape[1], plan.clean_rows, clean)


def sha256(pixels: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()


# ---------------------------------------------------------------- recorded


def test_recorded_composition_and_canvas() -> None:
    tensors, facts = case("droid_preprocess")
    image = observed_image(official_views())
    assert sha256(image) == facts["composed_sha256"]
    assert image.sum(axis=(1, 2), dtype=np.int64).tolist() == (
        tensors["composed_540x640_sum_per_row"].tolist()
    )
    canvas = canvas_of(*image.shape[:2], 480)
    assert list(canvas.image_size) == tensors["image_size"].tolist()
    assert canvas.latent_size() == (33, 40)
    placed = fit(image, canvas)
    assert sha256(placed.transpose(2, 0, 1)) == facts["canvas0_sha256"]
    prefixed = {PREFIX + name: view for name, view in official_views().items()}
    assert np.array_equal(observed_image(prefixed), image)


def test_recorded_state_row_and_plan() -> None:
    tensors, facts = case("droid_preprocess")
    rows = joint_rows(facts["joint"], facts["gripper"])
    assert np.array_equal(state_rows([*facts["joint"], *facts["gripper"]]), rows)
    plan = action_plan("policy", chunk=32, raw_dim=8, history=1)
    mask, values = known_rows(plan, tensors["action_model"], rows)
    assert torch.equal(values, tensors["action_model"])
    assert mask[0].all()
    assert not mask[1:, :8].any()
    assert mask[:, 8:].all()
    recorded = facts["plan"]
    assert list(plan.clean_frames) == recorded["vision"]
    assert list(plan.clean_rows) == recorded["action"]
    assert plan.start == recorded["action_start_frame_offset"]
    assert (plan.frames, plan.latent_frames, plan.rows) == (33, 9, 33)


def test_recorded_tiny_request() -> None:
    tensors, facts = case("droid_e2e_tiny")
    height, width = facts["image_hw"]
    image = observed_image({"image": drawn(height, width, 5)}, size=None)
    canvas = canvas_of(height, width, "256")
    assert list(canvas.image_size) == tensors["image_size"].tolist()
    assert np.array_equal(fit(image, canvas).transpose(2, 0, 1), tensors["canvas0"].numpy())
    frames, tall, wide = facts["grid"]
    assert canvas.latent_size() == (tall, wide)
    plan = action_plan("policy", chunk=facts["chunk"], raw_dim=8, history=1)
    assert plan.latent_frames == frames
    rows = joint_rows(facts["joint"], facts["gripper"])
    mask, values = known_rows(plan, tensors["action_model_in"], rows)
    assert torch.equal(values, tensors["action_model_in"])
    noise = modality_noise(mask.shape, facts["seed"])
    assert torch.equal(torch.where(mask, values, noise), tensors["init_action"])
    video = modality_noise((1, *tensors["init_video"].shape), facts["seed"])[0]
    assert torch.equal(video[:, 1:], tensors["init_video"][:, 1:])
    served = joint_actions(tensors["final_action_model"].numpy())
    assert np.array_equal(served, tensors["server_action"].numpy())


@pytest.mark.parametrize("name", ["policy_denoise_state_cfg", "policy_denoise_nostate_nocfg"])
def test_recorded_initial_states_and_served_actions(name: str) -> None:
    tensors, facts = case(name)
    history = int(facts["use_state"])
    raw = facts["raw_action_dim"]
    plan = action_plan("policy", chunk=facts["action_len"] - history, raw_dim=raw, history=history)
    clean = tensors["state_action"][:history, :raw].numpy() if history else None
    mask, values = known_rows(plan, tensors["init_action"], clean)
    noise = modality_noise(mask.shape, facts["seed"])
    assert torch.equal(torch.where(mask, values, noise), tensors["init_action"])
    video = modality_noise((1, *tensors["init_video"].shape), facts["seed"])[0]
    assert torch.equal(video[:, 1:], tensors["init_video"][:, 1:])
    served = joint_actions(tensors["final_action_model"].numpy(), history)
    assert np.array_equal(served, tensors["server_action"].numpy())


def test_a_ready_canvas_of_another_aspect_is_told_once_per_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told(height: int, width: int, size: tuple[int, int] | None = (54, 64)) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "phyai"):
            observed_image({"image": np.zeros((height, width, 3), np.uint8)}, size)
        return caplog.text

    assert "of 54 x 64 within 2 %; got 37 x 64, which is stretched. Send" in told(37, 64)
    assert not told(37, 64)
    assert "got 64 x 37" in told(64, 37)
    assert not told(108, 128)
    assert not told(36, 64, None)  # kept as large as it is


# ---------------------------------------------------------------- images


def test_a_composed_image_wins_and_other_sizes_are_resized() -> None:
    whole = drawn(540, 640, 4)
    assert np.array_equal(observed_image({"image": whole, **official_views()}), whole)
    assert observed_image({"image": drawn(270, 320, 4)}).shape == (540, 640, 3)
    assert observed_image({"image": drawn(270, 320, 4)}, size=None).shape == (270, 320, 3)
    quarter = {name: view[::4, ::4] for name, view in official_views().items()}
    assert observed_image(quarter).shape == (540, 640, 3)


def test_resizing_cuts_levels_and_does_not_round_them() -> None:
    image = np.array([[[0, 0, 0], [3, 3, 3]]], np.uint8)
    # Between the two pixels lie 0.75 and 2.25.
    assert resize_truncated(image, (1, 4))[0, :, 0].tolist() == [0, 0, 2, 3]


def test_resizing_does_not_depend_on_the_number_of_threads() -> None:
    """The official bytes are those of several threads; a rank or a test has one."""
    image, threads = drawn(480, 640, 5), torch.get_num_threads()
    found = set()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.add(hashlib.sha256(resize_truncated(image, (180, 320)).tobytes()).hexdigest())
    finally:
        torch.set_num_threads(threads)
    assert found == {"f3d493aec7f2e8ed9cf65768a419807849bfe1fe93e8ebd977d86dcfe88d4c71"}


def test_the_composition_places_every_view() -> None:
    views = [np.full((4, 6, 3), level, np.uint8) for level in (10, 20, 30)]
    made = compose(*views)
    assert made.shape == (6, 6, 3)
    assert (made[:4] == 10).all()
    assert (made[4:, :3] == 20).all()
    assert (made[4:, 3:] == 30).all()


@pytest.mark.parametrize(
    ("images", "match"),
    [
        (None, "images must be a mapping"),
        ([drawn(4, 4, 0)], "images must be a mapping"),
        ({}, "got no wrist_image_left, exterior_image_1_left, exterior_image_2_left"),
        (
            {"wrist_image_left": drawn(4, 4, 0)},
            "got no exterior_image_1_left, exterior_image_2_left",
        ),
        ({"wrist_image": drawn(4, 4, 0)}, "Did you mean 'wrist_image_left'"),
        ({7: drawn(4, 4, 0)}, "camera must be image, or one of"),
        ({"image": drawn(4, 4, 0)[..., 0]}, r"must be \[height, width, 3\]"),
        ({"image": drawn(4, 4, 0)[None]}, r"must be \[height, width, 3\]"),
        ({"image": np.zeros((4, 4, 4), np.uint8)}, "drop alpha"),
        ({"image": np.zeros((3, 4, 4), np.uint8)}, "channels last"),
        ({"image": np.zeros((4, 4, 3), np.int64)}, "must be uint8, or float"),
        ({"image": np.zeros((4, 4, 3), np.complex64)}, "must be uint8, or float"),
        ({"image": np.full((4, 4, 3), 255.0)}, r"must lie in \[0, 1\]"),
        ({"image": np.full((4, 4, 3), np.nan)}, "must be finite"),
        ({"image": np.zeros((0, 4, 3), np.uint8)}, "sides in"),
        ({"image": np.zeros((1, 8193, 3), np.uint8)}, "sides in"),
        ({"image": "camera.png"}, "must be uint8, or float"),
        ({"image": [[1, 2], [3]]}, "array of one shape"),
        ({"image": torch.zeros(4, 4, 3).to_sparse()}, "dense tensor"),
        ({**official_views(), "wrist_image_left": drawn(4, 5, 0)}, "even width"),
        ({**official_views(), "wrist_image_left": drawn(1, 4, 0)}, "two lines"),
    ],
)
def test_bad_images_are_refused(images: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        observed_image(images)


def test_float_and_tensor_images_are_the_same_pixels() -> None:
    image = drawn(6, 8, 3)
    as_float = image.astype(np.float32) / 255
    want = observed_image({"image": image}, size=None)
    for other in (
        as_float,
        as_float.transpose(2, 0, 1),
        torch.from_numpy(image),
        image[::-1][::-1],
        torch.from_numpy(as_float).to(torch.float64),
    ):
        assert np.array_equal(observed_image({"image": other}, size=None), want)


def test_results_share_no_memory_with_the_caller() -> None:
    image = drawn(540, 640, 1)
    made = observed_image({"image": image})
    image[:] = 0
    assert made.any()


# ---------------------------------------------------------------- states


def test_the_gripper_is_inverted_both_ways() -> None:
    row = state_rows([*READY, 0.25])
    assert row.dtype == np.float32
    assert row.shape == (1, 8)
    assert row[0, :7] == pytest.approx(READY)
    assert row[0, 7] == np.float32(0.75)
    back = joint_actions(np.concatenate([row, row]))
    assert back[0, 7] == np.float32(0.25)
    assert len(back) == 1


def test_gripper_forms() -> None:
    want = joint_rows(READY, [0.25])
    for form in (0.25, np.float32(0.25), [[0.25]], torch.tensor(0.25), np.array([0.25])):
        assert np.array_equal(joint_rows(READY, form), want)


def test_history_is_the_last_ticks_with_the_state_last() -> None:
    joints = np.arange(35, dtype=np.float32).reshape(5, 7) / 100
    gripper = np.linspace(0, 1, 5)
    rows = joint_rows(joints, gripper, history=3)
    assert rows.shape == (3, 8)
    assert np.array_equal(rows[:, :7], joints[2:])
    assert rows[:, 7] == pytest.approx([0.5, 0.25, 0.0])
    assert joint_rows(joints, gripper, history=0).shape == (0, 8)
    plan = action_plan("policy", chunk=32, raw_dim=8, history=3)
    assert (plan.rows, plan.clean_rows, plan.start, plan.history) == (35, (0, 1, 2), -2, 3)
    made = np.arange(35 * 16, dtype=np.float32).reshape(35, 16)
    assert joint_actions(made, 3).shape == (32, 8)
    assert joint_actions(made, 3)[0, 0] == 3 * 16


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (None, "state must be sent; got none. Send joint_0"),
        (READY, r"\[8\] or \[T, 8\]"),
        ([[[0.0] * 8]], r"\[8\] or \[T, 8\]"),
        (np.zeros((0, 8)), r"\[8\] or \[T, 8\]"),
        ([*READY, float("nan")], "must be finite"),
        ([*READY, float("inf")], "must be finite"),
        ([*READY, 1e300], "must be finite"),
        (["a"] * 8, "must be numbers"),
        (np.zeros(8, bool), "must be numbers"),
        (np.zeros(8, complex), "must be numbers"),
        ({"joint_position": READY}, "must have shape|must be numbers"),
    ],
)
def test_bad_states_are_refused(state: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        state_rows(state)


def test_bad_histories_are_refused() -> None:
    with pytest.raises(RequestError, match="state must have 2 rows"):
        state_rows([*READY, 0.0], history=2)
    with pytest.raises(RequestError, match="as many rows; got 2 and 1"):
        joint_rows([READY, READY], [0.1])
    for history in (-1, 65, 1.0, None):
        with pytest.raises(RequestError, match="history_length"):
            state_rows([*READY, 0.0], history=history)  # type: ignore[arg-type]


# ---------------------------------------------------------------- noise


def test_noise_is_drawn_per_modality_from_one_seed() -> None:
    generator = np.random.RandomState(42)
    want = generator.standard_normal((4, 6)).astype(np.float32)
    assert np.array_equal(modality_noise((4, 6), 42).numpy(), want)
    assert torch.equal(modality_noise((4, 6), 42), modality_noise((4, 6), np.int64(42)))
    assert not torch.equal(modality_noise((4, 6), 42), modality_noise((4, 6), 43))
    assert not torch.equal(modality_noise((4, 6), None), modality_noise((4, 6), None))


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "0", True, [1, 2]])
def test_bad_seeds_are_refused(seed: Any) -> None:
    with pytest.raises(RequestError, match="seed must be an integer"):
        modality_noise((2,), seed)


# ---------------------------------------------------------------- end-effector space


def random_state(ticks: int) -> EefState:
    generator = np.random.default_rng(3)
    return EefState.of(
        generator.normal(size=(ticks, 3)),
        generator.normal(size=(ticks, 4)),
        generator.uniform(size=(ticks, 1)),
    )


def test_steps_and_poses_are_inverse() -> None:
    state = random_state(9)
    poses = poses_of(state.position, state.quaternion)
    assert np.allclose(walk(poses[0], steps_between(poses)), poses[1:], atol=1e-12)
    turns = quaternions_of(poses[:, :3, :3])
    again = poses_of(state.position, turns)
    assert np.allclose(again, poses, atol=1e-12)
    assert (turns[:, 3] >= 0).all()
    unit = state.quaternion / np.linalg.norm(state.quaternion, axis=-1, keepdims=True)
    assert np.allclose(np.abs((turns * unit).sum(-1)), 1.0, atol=1e-6)


def test_half_turns_have_a_quaternion() -> None:
    turns = np.diag([1.0, -1.0, -1.0]), np.diag([-1.0, 1.0, -1.0]), np.diag([-1.0, -1.0, 1.0])
    found = quaternions_of(np.stack(turns))
    assert np.allclose(np.abs(found), np.eye(4)[:3])


def test_a_turned_hand_moves_in_its_own_frame() -> None:
    # A quarter turn about z: a step along the hand's x goes along the world's y.
    state = EefState.of([[1.0, 0.0, 0.0]], [[0.0, 0.0, np.sqrt(0.5), np.sqrt(0.5)]], [0.0])
    step = np.array([[0.1, 0, 0, 1, 0, 0, 0, 1, 0, 0.25]], np.float32)
    rows = np.concatenate([np.zeros((1, 10), np.float32), step, step])
    made = eef_actions(rows, state)
    assert made.shape == (2, 8)
    assert made[:, :3] == pytest.approx(np.array([[1.0, 0.1, 0], [1.0, 0.2, 0]]), abs=1e-6)
    assert made[:, 3:7] == pytest.approx(np.array([[0, 0, 0.70710678, 0.70710678]] * 2))
    assert made[:, 7].tolist() == [0.75, 0.75]


def test_state_rows_of_the_end_effector() -> None:
    state = random_state(4)
    rows = eef_rows(state, history=3)
    poses = poses_of(state.position, state.quaternion)
    assert rows.shape == (3, 10)
    assert np.allclose(rows[:2, :9], steps_between(poses[1:]), atol=1e-6)
    assert np.allclose(rows[2, :3], state.position[-1])
    assert np.allclose(rows[2, 3:9], poses[-1, :3, :2].T.ravel(), atol=1e-6)
    assert np.allclose(rows[:, 9], 1 - state.gripper[[2, 3, 3], 0])
    assert eef_rows(state, history=0).shape == (0, 10)
    assert eef_rows(state).shape == (1, 10)


def test_scaled_steps_come_back() -> None:
    scaling = Normalizer.of("quantile", DROID_STATISTICS)
    state = random_state(3)
    rows = eef_rows(state, 3)
    scaled = eef_rows(state, 3, scaling)
    assert np.allclose(scaling.denormalize(scaled[:2]), rows[:2], atol=1e-6)
    assert np.array_equal(scaled[2], rows[2])
    steps = np.tile(np.array([[0.01, 0, 0, 1, 0, 0, 0, 1, 0, 1]], np.float32), (4, 1))
    wide = np.concatenate([rows[2:], scaling.normalize(steps)])
    plain = np.concatenate([rows[2:], steps])
    a, b = eef_actions(wide, state, 1, scaling), eef_actions(plain, state, 1)
    assert np.allclose(a, b, atol=1e-5)


def test_predicted_rotations_need_not_be_orthogonal() -> None:
    state = random_state(1)
    rows = np.random.default_rng(5).normal(size=(65, 10)).astype(np.float32)
    made = eef_actions(rows, state)
    assert np.isfinite(made).all()
    assert np.linalg.norm(made[:, 3:7], axis=1) == pytest.approx(np.ones(64))
    nothing = eef_actions(np.zeros((3, 10), np.float32), state)
    assert np.isfinite(nothing).all()


def test_bad_end_effector_states_are_refused() -> None:
    with pytest.raises(RequestError, match="length above zero"):
        eef_rows(EefState.of([0, 0, 0], [0, 0, 0, 0], 0.5))
    with pytest.raises(RequestError, match="as many rows"):
        EefState.of(np.zeros((2, 3)), np.ones((1, 4)), 0.5)
    with pytest.raises(RequestError, match=r"\[4\] or \[T, 4\]"):
        EefState.of([0, 0, 0], [0, 0, 0], 0.5)
    with pytest.raises(RequestError, match="must have 2 rows"):
        eef_rows(random_state(1), 2)
