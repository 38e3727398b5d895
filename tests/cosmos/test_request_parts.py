"""Domains, action modes, scaling, generation sizes and the scheduler file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from phyai.errors import CheckpointError, ConfigError, RequestError
from phyai.models.cosmos3.processing.actions import (
    action_plan,
    check_mode,
    given_actions,
    known_actions,
)
from phyai.models.cosmos3.processing.domains import DOMAINS, domain_of
from phyai.models.cosmos3.processing.generation import (
    DEFAULTS,
    check_frames,
    check_size,
    latent_shape,
    mode_of,
    named_size,
    sound_frames,
    sound_samples,
)
from phyai.models.cosmos3.processing.normalizers import Normalizer
from phyai.models.cosmos3.scheduler_files import SchedulerFile, check_shift, read_scheduler
from phyai.unipc import sigmas_of, timestep

GOLDEN = Path(__file__).parents[1] / "golden/cosmos3"


def facts(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


PIPES = [path for path in sorted(GOLDEN.glob("case_*.safetensors")) if "karras" in facts(path)]


# ---------------------------------------------------------------- domains


@pytest.mark.parametrize(
    ("name", "number", "width"),
    [
        ("av", 1, 9),
        ("hand_pose", 3, 57),
        ("umi", 6, 10),
        ("bridge_orig_lerobot", 7, 10),
        ("droid_lerobot", 8, 10),
        ("robomind-franka", 8, 10),
        ("galbot", 9, 30),
        ("agibot_gear_gripper_ext", 15, 29),
        ("fractal", 20, 10),
        ("maniparena", 23, 20),
    ],
)
def test_known_domains(name: str, number: int, width: int) -> None:
    domain = domain_of(name, 32)
    assert (domain.id, domain.raw_dim) == (number, width)
    assert domain_of(f" {name.upper()} ", 32) == domain
    assert domain_of(number, 32, raw_dim=width).id == number


def test_every_domain_is_named_once() -> None:
    assert all(0 <= domain.id < 32 for domain in DOMAINS.values())
    assert all(name == domain.name for name, domain in DOMAINS.items())


@pytest.mark.parametrize(
    ("value", "width", "match"),
    [
        ("droid_robot", None, r"droid_lerobot \(8\).*Did you mean 'droid_lerobot'"),
        ("", None, "domain must be an id or one of no_action"),
        (None, None, "domain must be an id or one of no_action"),
        (8.0, None, "domain must be an id or one of no_action"),
        (True, None, "domain must be an id or one of no_action"),
        (-1, 8, r"id in \[0, 12\)"),
        (12, 8, r"id in \[0, 12\).*droid_lerobot"),
        ("fractal", None, r"id in \[0, 12\)"),
        (8, None, "raw_action_dim must be given for domain 8"),
        ("libero", None, "raw_action_dim must be given for libero"),
        ("av", 0, "raw_action_dim must be an integer"),
        ("av", 9.0, "raw_action_dim must be an integer"),
    ],
)
def test_bad_domains_are_refused(value: Any, width: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        domain_of(value, 12, width)


# ---------------------------------------------------------------- modes


def test_plans_of_every_mode() -> None:
    policy = action_plan("policy", chunk=16, raw_dim=10)
    assert (policy.rows, policy.clean_rows, policy.clean_frames, policy.start) == (16, (), (0,), 1)
    forward = action_plan("forward_dynamics", chunk=8, raw_dim=9)
    assert forward.clean_rows == tuple(range(8))
    assert forward.clean_frames == (0,)
    inverse = action_plan("inverse_dynamics", chunk=8, raw_dim=10)
    assert inverse.clean_rows == ()
    assert inverse.clean_frames == (0, 1, 2)
    assert inverse.latent_frames == 3
    assert inverse.frames == 9


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mode": "polcy"}, "forward_dynamics, inverse_dynamics; got 'polcy'.*Did you mean"),
        ({"mode": None}, "mode must be one of"),
        ({"mode": ["policy"]}, "mode must be one of"),
        ({"chunk": 0}, "action_chunk must be in"),
        ({"chunk": 30}, "multiple of 4.*Take 32"),
        ({"chunk": 1}, "multiple of 4.*Take 4"),
        ({"chunk": 4100}, "action_chunk must be in"),
        ({"chunk": "32"}, "action_chunk must be an integer"),
        ({"mode": "inverse_dynamics", "history": 1}, "Only a policy sees a state"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, Any], match: str) -> None:
    values: dict[str, Any] = {"mode": "policy", "chunk": 32, "raw_dim": 8, **changes}
    with pytest.raises(RequestError, match=match):
        action_plan(values.pop("mode"), **values)


def test_given_actions_are_repeated_or_cut() -> None:
    plan = action_plan("forward_dynamics", chunk=4, raw_dim=2)
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    assert np.array_equal(given_actions(rows, plan), rows[:4])
    assert np.array_equal(given_actions(rows[:2], plan), rows[[0, 1, 1, 1]])
    assert np.array_equal(given_actions(rows[0], plan), rows[[0, 0, 0, 0]])
    for bad in (None, rows[:, :1], rows[:0], rows * np.nan, "up"):
        with pytest.raises(RequestError, match="raw_actions"):
            given_actions(bad, plan)


def test_recorded_forward_dynamics_state() -> None:
    path = GOLDEN / "case_pipe_act_forward_dynamics.safetensors"
    with safe_open(path, "pt") as file:
        raw, init = file.get_tensor("in_raw_actions"), file.get_tensor("init_action")
    plan = action_plan("forward_dynamics", chunk=8, raw_dim=raw.shape[1])
    given = given_actions(raw, plan)
    mask, values = known_actions(plan.rows, plan.raw_dim, init.shape[1], plan.clean_rows, given)
    assert mask.all()
    assert torch.equal(values, init)


def test_known_elements_of_a_policy_without_a_state() -> None:
    plan = action_plan("policy", chunk=4, raw_dim=3)
    mask, values = known_actions(plan.rows, plan.raw_dim, 5, plan.clean_rows)
    assert not mask[:, :3].any()
    assert mask[:, 3:].all()
    assert not values.any()


def test_given_rows_stand_where_they_are_named_in_every_row_of_a_batch() -> None:
    given = torch.arange(12.0).view(2, 2, 3)  # the third channel is not in use
    mask, values = known_actions(4, 2, 5, (1, 3), given)
    assert mask[:, :2].tolist() == [[False] * 2, [True] * 2, [False] * 2, [True] * 2]
    assert mask[:, 2:].all()
    assert torch.equal(values[:, [1, 3], :2], given[..., :2])
    assert not values[..., 2:].any()
    assert not values[:, [0, 2]].any()


def test_modes_are_text() -> None:
    assert check_mode("policy") == "policy"


# ---------------------------------------------------------------- scaling

STATISTICS = {
    "mean": [1.0, 2.0, 0.0],
    "std": [2.0, 0.0, 1.0],
    "min": [-1.0, 0.0, 5.0],
    "max": [3.0, 0.5, 5.0],
    "q01": [-1.0, 0.0, 5.0],
    "q99": [3.0, 0.5, 5.0],
}


@pytest.mark.parametrize("method", ["meanstd", "minmax", "quantile", "quantile_rot"])
def test_scaling_comes_back(method: str) -> None:
    scaling = Normalizer.of(method, STATISTICS, rotation=[1])
    rows = np.array([[0.5, 0.1, 5.0], [2.0, 2.0, 5.0]], np.float32)
    scaled = scaling.normalize(rows)
    assert scaled.dtype == np.float32
    assert np.isfinite(scaled).all()
    assert np.allclose(scaling.denormalize(scaled), rows, atol=1e-6)


def test_scaling_values() -> None:
    ends = np.array([[-1.0, 0.0, 5.0], [3.0, 0.5, 5.0]], np.float32)
    assert Normalizer.of("minmax", STATISTICS).normalize(ends).tolist() == [
        [-1.0, -1.0, 0.0],
        [1.0, 1.0, 0.0],
    ]
    kept = Normalizer.of("quantile_rot", STATISTICS, rotation=[1]).normalize(ends)
    assert kept[:, 1].tolist() == [0.0, 0.5]
    assert kept[:, 0].tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("method", "statistics", "match"),
    [
        ("quantil", STATISTICS, "Did you mean 'quantile'"),
        ("quantile", {}, "must hold q01; got none"),
        ("minmax", {"min": [0.0], "max": [0.0, 1.0]}, "one length"),
        ("minmax", {"min": [[0.0]], "max": [1.0]}, "one finite row"),
        ("minmax", {"min": [float("nan")], "max": [1.0]}, "one finite row"),
        ("minmax", {"min": [], "max": []}, "one finite row"),
        ("minmax", {"min": ["a"], "max": [1.0]}, "must hold numbers"),
    ],
)
def test_bad_statistics_are_refused(method: str, statistics: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Normalizer.of(method, statistics)


# ---------------------------------------------------------------- generation


def test_published_defaults() -> None:
    for mode in ("t2v", "i2v", "v2v"):
        found = DEFAULTS[mode]
        assert (found.num_steps, found.guidance_scale, found.flow_shift) == (35, 6.0, 10.0)
        assert (found.frames, found.fps, found.size) == (189, 24.0, (720, 1280))
    still = DEFAULTS["t2i"]
    assert (still.num_steps, still.guidance_scale, still.flow_shift) == (50, 4.0, 3.0)
    assert (still.frames, still.size) == (1, (960, 960))


def test_modes_by_what_a_request_holds() -> None:
    assert mode_of(frames=1, image=False, video=False) == "t2i"
    assert mode_of(frames=9, image=False, video=False) == "t2v"
    assert mode_of(frames=9, image=False, video=True) == "v2v"
    with pytest.raises(RequestError, match="got both"):
        mode_of(frames=9, image=True, video=True)
    for image, video in ((True, False), (False, True)):
        with pytest.raises(RequestError, match="num_frames must be above 1"):
            mode_of(frames=1, image=image, video=video)


def test_shapes_and_lengths() -> None:
    assert latent_shape(189, 720, 1280) == (48, 45, 80)
    assert latent_shape(1, 960, 960) == (1, 60, 60)
    assert latent_shape(9, 48, 64) == (3, 3, 4)
    assert sound_frames(13, 24, sampling_rate=1000, hop=40) == 14  # the recorded sound
    assert sound_frames(48, 24.0) == 50
    assert sound_frames(1, 1000.0) == 1
    assert sound_samples(41, 5.0, 48_000) == 393_600  # as numbers are written, not as floats round
    assert sound_samples(5, 29.97, 48_000) == 8008  # 8008.008: cut
    assert named_size(720) == (720, 1280)
    assert named_size("256", "9,16") == (320, 192)


def test_bad_sizes_are_refused() -> None:
    assert check_frames(189) == 189
    assert check_size(48, 64) == (48, 64)
    for frames, match in (
        (0, "num_frames must be in"),
        (190, "Take 189 or 193"),
        (8, "Take 5 or 9"),
        (2, "Take 1 or 5"),
        (2.0, "integer"),
        (5001, "num_frames must be in"),
    ):
        with pytest.raises(RequestError, match=match):
            check_frames(frames)
    for size, match in (
        ((50, 64), "height must be a multiple of 16 pixels; got 50. Take 48"),
        ((48, 8), "width must be in"),
        ((48, 4112), "width must be in"),
        (("48", 64), "height must be an integer"),
    ):
        with pytest.raises(RequestError, match=match):
            check_size(*size)
    for aspect in ("21,9", None, 1.0):
        with pytest.raises(RequestError, match="aspect_ratio must be one of 1,1"):
            named_size(480, aspect)


# ---------------------------------------------------------------- scheduler file


@pytest.mark.parametrize("path", PIPES, ids=lambda path: path.stem)
def test_recorded_pipelines_use_the_named_schedule(path: Path) -> None:
    case = facts(path)
    file = read_scheduler(GOLDEN)
    schedule = "karras" if json.loads(case["karras"]) else "diffusers_flow"
    grid = file.grid(schedule, json.loads(case["flow_shift"]))
    sigmas = sigmas_of(grid, json.loads(case["num_inference_steps"]))
    with safe_open(path, "pt") as tensors:
        want = tensors.get_tensor("timesteps").tolist()
        assert [timestep(sigma) for sigma in sigmas[:-1]] == want
        made = torch.tensor(sigmas, dtype=torch.float32)
        torch.testing.assert_close(made, tensors.get_tensor("sigmas"), atol=1e-6, rtol=0)


def written(folder: Path, **changes: Any) -> Path:
    data = json.loads((GOLDEN / "scheduler/scheduler_config.json").read_text())
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps({**data, **changes}))
    return folder


def test_the_released_file_and_a_missing_one_are_karras(tmp_path: Path) -> None:
    assert read_scheduler(GOLDEN) == read_scheduler(tmp_path) == SchedulerFile()
    assert read_scheduler(GOLDEN).grid() == "karras:0.147:200.0:7.0"
    assert read_scheduler(GOLDEN).schedule(False) == "native"
    assert read_scheduler(GOLDEN).schedule(None) == "karras"


def test_a_distilled_checkpoint_is_not_sampled_with_unipc(tmp_path: Path) -> None:
    folder = written(tmp_path, _class_name="FlowMatchEulerDiscreteScheduler")
    with pytest.raises(CheckpointError, match="must have _class_name 'UniPCMultistepScheduler'"):
        read_scheduler(folder)
    written(folder)
    for name in ("model_index.json", "modular_model_index.json"):
        (folder / name).write_text('{"is_distilled": true}')
        with pytest.raises(CheckpointError, match=f"{name} must not set is_distilled"):
            read_scheduler(folder)
        (folder / name).write_text('{"is_distilled": false}')
    assert read_scheduler(folder) == SchedulerFile()


def test_a_file_without_karras_asks_for_its_flow_schedule(tmp_path: Path) -> None:
    folder = written(tmp_path, use_karras_sigmas=False, flow_shift=5.0)
    assert read_scheduler(folder).grid() == "diffusers_flow:5.0"
    (folder / "model_index.json").write_text('{"use_native_flow_schedule": true}')
    assert read_scheduler(folder).grid() == "native:5.0"
    assert read_scheduler(folder).grid("karras") == "karras:0.147:200.0:7.0"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"solver_order": 3}, "must have solver_order 2; got 3"),
        ({"solver_type": "bh1"}, "solver_type"),
        ({"prediction_type": "epsilon"}, "prediction_type"),
        ({"use_flow_sigmas": False}, "use_flow_sigmas"),
        ({"use_dynamic_shifting": True}, "must not set use_dynamic_shifting"),
        ({"disable_corrector": [0]}, "must not set disable_corrector"),
        ({"shift_terminal": 0.1}, "must not set shift_terminal"),
        ({"use_karras_sigmas": "yes"}, "use_karras_sigmas true or false"),
        ({"sigma_max": -1}, "sigma_max must be in"),
        ({"sigma_min": "0.1"}, "sigma_min must be a number"),
        ({"sigma_min": 300.0}, "sigma_min below sigma_max"),
        ({"flow_shift": float("nan")}, "flow_shift must be in"),
    ],
)
def test_other_samplers_and_broken_files_are_refused(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=match):
        read_scheduler(written(tmp_path, **changes))


def test_bad_schedules_of_a_request_are_refused() -> None:
    with pytest.raises(RequestError, match="native, diffusers_flow, karras; got 'euler'"):
        SchedulerFile().grid("euler", 5)
    for shift in (0, -1, float("nan"), "5", 1e9):
        with pytest.raises(RequestError, match="flow_shift"):
            SchedulerFile().grid("native", shift)
        with pytest.raises(ConfigError, match="flow_shift"):
            check_shift(shift)
