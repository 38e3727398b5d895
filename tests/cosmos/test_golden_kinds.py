"""Golden cases are told by what they hold, and a wrong tensor is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.models.cosmos3.args import Cosmos3PolicyArgs
from phyai.models.cosmos3.checkpoint_files import text_tokenizer
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.golden import droid, generation_runs, policy_runs
from phyai.models.cosmos3.golden.cases import Case, read_case
from phyai.models.cosmos3.policy import Cosmos3PolicyProcessor
from phyai.models.cosmos3.processing.canvas import canvas_of, fit
from phyai.models.cosmos3.processing.droid import compose
from phyai.types import Observation
from phyai.unipc import timestep
from tests.cosmos.cosmos_engines import ROOT
from tests.cosmos.test_golden import FACTS, INPUTS, outputs, plugin_of
from tests.golden_cases import discover

CASES = discover(ROOT)


def changed(
    path: Path, into: Path, edit: Callable[[dict[str, Tensor]], object], **facts: Any
) -> Path:
    """Write a case with other tensors and facts, and another name."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    edit(tensors)
    metadata.update({n: v if isinstance(v, str) else json.dumps(v) for n, v in facts.items()})
    target = into / "case_0.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, metadata)
    return target


def run_of(case: str, into: Path, edit: Callable[..., object] = id, **facts: Any) -> Any:
    """Return the first run of a changed case."""
    path = changed(ROOT / f"case_{case}.safetensors", into, edit, **facts)
    return (policy_runs(path, ROOT) or generation_runs(path, ROOT))[0]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.path.stem)
def test_both_ways_to_tell_a_case_agree(case: object, tmp_path: Path) -> None:
    """The package's own kinds, from a file of another name in a folder below."""
    path = case.path  # type: ignore[attr-defined]
    below = tmp_path / "more"
    below.mkdir()
    shutil.copy(path, below / "case_x.safetensors")
    (moved,) = discover(tmp_path)
    assert moved.kind == case.kind  # type: ignore[attr-defined]
    read = read_case(moved.path, ROOT)
    assert f"cosmos_{read.kind}" == moved.kind
    assert read.of_policy == (plugin_of(moved) == "cosmos3_policy")
    assert outputs(moved)
    own, other = (
        (policy_runs, generation_runs) if read.of_policy else (generation_runs, policy_runs)
    )
    assert other(moved.path, ROOT) == []
    if read.kind in ("sampler", "sound", "droid_preprocess"):  # need no engine
        assert own(moved.path, ROOT)


def test_every_kind_has_a_case() -> None:
    assert {case.kind for case in CASES} == set(INPUTS)
    assert set(FACTS) < set(INPUTS)


def _failed(path: Path, runs: Callable[[Path, Path], list]) -> set[str]:  # type: ignore[type-arg]
    found = [c for run in runs(path, ROOT) for c in run.compare(None, None, {})]
    return {c.name.split(" ")[0] for c in found if not c.ok}


@pytest.mark.parametrize(
    ("name", "tensor", "change"),
    [
        ("case_sampler", "df_karras_n4.traj", 1e-4),
        ("case_sampler", "nv_flow_n4_s5.sigmas", 1e-5),
        ("case_sampler", "nv_flow_n4_s5.timesteps", 1),
        ("case_sound_decode", "waveform_unclamped", 1.0),
    ],
)
def test_a_wrong_result_fails_and_no_other(
    name: str, tensor: str, change: float, tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[tensor] = tensors[tensor] + torch.as_tensor(change).to(tensors[tensor].dtype)

    path = changed(ROOT / f"{name}.safetensors", tmp_path, spoil)
    assert _failed(path, generation_runs) == {tensor}


def test_a_result_that_nothing_computes_fails(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["waveform_of_something"] = torch.zeros(2)

    path = changed(ROOT / "case_sound_decode.safetensors", tmp_path, add)
    assert _failed(path, generation_runs) == {"waveform_of_something"}


@pytest.mark.parametrize("edit", ["empty", "two kinds"])
def test_files_of_no_one_kind_are_refused(edit: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        if edit == "empty":
            tensors.clear()
        tensors["x_init" if edit != "empty" else "y"] = torch.zeros(1)

    path = changed(ROOT / "case_sound_decode.safetensors", tmp_path, change)
    with pytest.raises(CheckpointError, match="must be of one known kind"):
        generation_runs(path, ROOT)
    (case,) = discover(tmp_path)
    assert case.kind == "unknown"


# ---------------------------------------------------------------- other legal cases


def test_a_text_that_reads_like_json_is_a_text(tmp_path: Path) -> None:
    run = run_of("pipe_t2v", tmp_path, prompt="12", negative_prompt="[0]")
    written = read_case(tmp_path / "case_0.safetensors", ROOT)
    assert (written.text("prompt"), written.text("negative_prompt")) == ("12", "[0]")
    assert run.request.text_ids.shape[1] == 203 - len("A red cube rolls.") + len("12.")


def test_positions_before_the_first_frame_do_not_move_the_others(tmp_path: Path) -> None:
    """The time of row j at 30 Hz: (j + offset) / 30 * 24 / 4, behind the text."""

    def add(tensors: dict[str, Tensor]) -> None:
        behind = float(tensors["ids.image"][0, 0])
        for name, offset in (("ids.action_off-1", -1), ("ids.action_off-3", -3)):
            rows = torch.arange(6, dtype=torch.float32)
            time = (rows + offset) / 30.0 * 6.0 + behind
            tensors[name] = torch.stack([time, torch.zeros(6), torch.zeros(6)])
        for name in ("ids.action_off0", "ids.action_off1", "ids.video"):  # of 15 Hz
            del tensors[name]

    run = run_of("rope_time", tmp_path, add, fps=30)
    network = SimpleNamespace(time=lambda steps: torch.zeros(len(steps), 64))
    found = {c.name: c.ok for c in run.compare(SimpleNamespace(network=network), None, {})}
    assert not found.pop("time.embed")  # which only an engine has
    assert all(found.values()), found
    assert {"ids.action_off-1", "ids.action_off-3", "ids.sound"} <= set(found)


def test_timestep_zero_and_sound_beside_actions_can_be_asked(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["timestep"] = torch.zeros(1)
        tensors["sound"], tensors["velocity_sound"] = torch.zeros(6, 5), torch.zeros(6, 5)

    run = run_of("tr_policy_state", tmp_path, add)
    assert [timestep(sigma) for sigma in run.request.sigmas] == [0]
    assert run.request.sigmas[0] > 0
    assert run.request.sound_frames == 5
    assert run.args.load_sound
    assert set(run.request.noise) == {"video", "action", "sound"}


def test_history_rows_of_a_denoise_case(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"action_condition_rows": [0, 1, 2], "action_start_frame_offset": -2}
    run = run_of("policy_denoise_state_cfg", tmp_path, **facts)
    request = run.request
    assert request.cond_action.shape == (1, 3, 16)
    assert list(request.cond_action_indexes) == [
        0,
        1,
        2,
    ]
    assert request.action_start_frame_offset == -2
    other = run_of("policy_denoise_state_cfg", tmp_path, history_length=2)
    assert other.request.action_start_frame_offset == -1


def test_a_guided_case_without_the_other_branch(tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "uncond" in name]:
            del tensors[name]

    path = changed(ROOT / "case_policy_denoise_nostate_nocfg.safetensors", tmp_path, drop)
    (run,) = policy_runs(path, ROOT)
    assert run.request.neg_text_ids is None


@pytest.mark.parametrize("case", ["pipe_act_policy", "pipe_v2v_sound"])
def test_a_pipeline_may_store_its_rows_with_or_without_their_axis(
    case: str, tmp_path: Path
) -> None:
    """What the engine records, made of the case itself."""
    raw: dict[str, Tensor] = {}

    def other(tensors: dict[str, Tensor]) -> None:
        raw.update(tensors)
        leaf = "action" if "init_action" in tensors else "sound"
        states = torch.randn(2, *tensors[f"init_{leaf}"].shape)
        raw[f"step_{leaf}"], raw[f"final_{leaf}_latents"] = states, states[-1]
        tensors[f"step_{leaf}"] = states
        tensors["final_video"] = tensors["final_video"][0]
        tensors["step_video"] = tensors["step_video"][:, 0]
        if leaf == "sound":
            tensors["waveform"], tensors["final_sound"] = tensors["waveform"][None], states[-1:] + 0

    run = run_of(case, tmp_path, other)
    loop: dict[str, list[Tensor]] = {}
    for leaf in ("video", "action", "sound"):
        if f"step_{leaf}" not in raw:
            continue
        steps = raw[f"step_{leaf}"]
        rows = steps if leaf == "video" else steps[:, None]
        first = raw[f"init_{leaf}"]
        states = [first if leaf == "video" else first[None], *rows[:-1]]
        loop[f"steps.{leaf}.x"], loop[f"result.{leaf}"] = states, [rows[-1]]
    final = raw.get("final_action")
    result: dict[str, Any] = {} if final is None else {"action": final[None]}
    if "waveform" in raw:
        result["sound"] = raw["waveform"][None]
    assert {c.name: c.error for c in run.compare(None, result, loop) if not c.ok} == {}
    loop["steps.video.x"][1] = loop["steps.video.x"][1] + 1.0
    assert [c.name for c in run.compare(None, result, loop) if not c.ok] == ["step_video"]


def test_an_action_pipeline_of_a_domain_whose_data_set_decides(tmp_path: Path) -> None:
    action = {
        "mode": "policy",
        "chunk_size": 8,
        "domain_name": "libero",
        "resolution_tier": 256,
        "view_point": "ego_view",
    }
    run = run_of("pipe_act_policy", tmp_path, action=action, negative_prompt="drop it")
    assert (run.request.raw_action_dim, run.request.domain_id) == (10, 5)
    usual = run_of("pipe_act_policy", tmp_path)
    assert run.request.neg_text_ids.shape[1] == usual.request.neg_text_ids.shape[1] + len("drop it")
    assert not run.args.decode_video


def test_an_action_pipeline_may_store_pixels(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["pixels_decoded"] = torch.zeros(1, 3, 9, 48, 64)

    run = run_of("pipe_act_inverse_dynamics", tmp_path, add)
    assert run.args.decode_video
    compare = run.compare
    half = {"action": torch.zeros(1, 8, 10), "pixels": torch.full((1, 3, 9, 48, 64), 0.5)}
    x = torch.zeros(1, 8, 3, 3, 4)
    records = {"steps.video.x": [x] * 4, "result.video": [x]}
    found = {c.name: c.ok for c in compare(None, half, records)}
    assert found["pixels_decoded"]


def test_the_schedule_is_that_of_the_checkpoints_index(tmp_path: Path) -> None:
    root = tmp_path / "set"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns("case_*", "README.md"))
    index = root / "model_index.json"
    index.chmod(0o644)
    index.write_text(
        json.dumps({**json.loads(index.read_text()), "use_native_flow_schedule": True})
    )
    schedules = {}
    for name in ("pipe_t2v", "pipe_i2v_karras"):
        (run,) = generation_runs(changed(ROOT / f"case_{name}.safetensors", tmp_path, id), root)
        schedules[name] = run.request.schedule
    assert schedules == {"pipe_t2v": "native", "pipe_i2v_karras": "karras"}
    assert run_of("pipe_t2v", tmp_path).request.schedule == "diffusers_flow"


# ---------------------------------------------------------------- DROID


def test_every_fact_of_a_droid_request_is_used(tmp_path: Path) -> None:
    facts: dict[str, Any] = {
        "shift": 10.0,
        "fps": 10,
        "domain_id": 7,
        "guidance_interval": [400, 1000],
    }
    run = run_of("droid_e2e_tiny", tmp_path, **facts, desc="k=5", tier="480")
    args = run.args
    assert (args.robot_shift, args.fps, args.domain, args.resolution) == (10.0, 10.0, 7, "480")
    assert (args.chunk_size, args.history_length) == (8, 1)
    assert list(run.request.options["guidance_interval"]) == [400, 1000]
    assert run_of("droid_e2e_tiny", tmp_path, use_state=False).args.history_length == 0
    several = run_of(
        "droid_e2e_tiny", tmp_path, history_length=2, joint=[[0.0] * 7] * 2, gripper=[0, 1]
    )
    assert several.request.state.shape == (2, 8)
    assert several.args.history_length == 2


@pytest.mark.parametrize(
    ("size", "tier", "passes"), [((300, 340), "256", True), ((96, 128), "256", False)]
)
def test_levels_of_a_resized_canvas_may_be_off_by_one(
    size: tuple[int, int], tier: str, passes: bool
) -> None:
    args = Cosmos3PolicyArgs(str(ROOT), resolution=tier, resize_image=False, chunk_size=8)
    config = Cosmos3Config.from_folder(ROOT)
    processor = Cosmos3PolicyProcessor(config, text_tokenizer(ROOT, config, 4096), args)
    seen = Observation({"image": droid.pattern(*size, 5)}, np.zeros(8, np.float32), "go")
    made = droid._made(processor, seen, args)
    case = Case(Path("case_x"), ROOT, {"canvas0": made.canvas.int() + 1}, {}, {})
    loop: Any = None
    near = droid._requested(case, "canvas0", made, loop, None, {})
    assert near.ok == passes
    far = Case(Path("case_x"), ROOT, {"canvas0": made.canvas.int() + 2}, {}, {})
    assert not droid._requested(far, "canvas0", made, loop, None, {}).ok


def test_a_strip_is_found_wherever_it_lies(tmp_path: Path) -> None:
    def move(tensors: dict[str, Tensor]) -> None:
        views = [droid.pattern(*v) for v in ((360, 640, 0), (360, 640, 1), (720, 1280, 2))]
        canvas = fit(compose(*views)[None], canvas_of(540, 640, "480"))[0]
        pixels = torch.from_numpy(canvas).permute(2, 0, 1)
        tensors["canvas0_bottom_strip"] = pixels[:, -10:, 640:670]
        tensors["canvas0_right_strip"] = pixels[:, 11:19, -104:] + 1

    run = run_of("droid_preprocess", tmp_path, move)
    assert [c.name for c in run.compare(None, None, {}) if not c.ok] == ["canvas0_right_strip"]
