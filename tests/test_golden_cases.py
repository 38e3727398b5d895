"""Discovery of golden cases, and that nothing in a golden folder can go unnoticed."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden_cases import UNKNOWN, discover, outputs

ROOT = Path(__file__).parents[1]
PLAIN = ("in.images", "in.tokens", "in.noise", "actions", "steps.v_t")


def write_case(path: Path, names: tuple[str, ...] = (), **metadata: str) -> Path:
    """Write a .safetensors file of one-element float32 tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    for index, name in enumerate(names):
        offsets = [4 * index, 4 * index + 4]
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": offsets}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(names)))
    return path


@pytest.mark.parametrize(
    ("kind", "names", "metadata"),
    [
        ("base", PLAIN, {"dtype": "float32"}),
        ("base", PLAIN, {}),
        ("bf16", (*PLAIN, "fp32.actions"), {"dtype": "bfloat16 language, float32 vision"}),
        ("policy", ("in.observation.images.top", "in.noise", "actions"), {"camera_order": "[]"}),
        ("e2e", ("raw.observation.state", "noise", "post.actions"), {"task": "x"}),
        ("rtc_guided", (*PLAIN, "in.prev_chunk_left_over"), {"schedule": "EXP"}),
        ("rtc_guided", (*PLAIN, "in.prev_chunk_left_over"), {"mode": "guided"}),
        ("rtc_trained", (*PLAIN, "in.prev_chunk_left_over"), {"mode": "trained"}),
        ("rl", (*PLAIN, "in.step_noise"), {"modes": "{}"}),
        (UNKNOWN, (*PLAIN, "in.prev_chunk_left_over"), {"mode": "other"}),
        (UNKNOWN, PLAIN, {"dtype": "float64"}),
        (UNKNOWN, PLAIN, {"kind": "another_family"}),
        (UNKNOWN, ("in.images",), {}),
        (UNKNOWN, (), {}),
    ],
)
def test_kind_comes_from_the_content_not_the_name(
    tmp_path: Path, kind: str, names: tuple[str, ...], metadata: dict[str, str]
) -> None:
    for name in ("case_bf16_policy_b9.safetensors", "case_x.safetensors"):
        write_case(tmp_path / name, names, **metadata)
    assert [case.kind for case in discover(tmp_path)] == [kind, kind]


MINICPM_PROMPT = ("input_ids", "pixel_values", "target_sizes")


@pytest.mark.parametrize(
    ("kind", "prefix", "names"),
    [
        ("minicpm_gdn_op", "case_", ("q", "k", "v", "g", "beta", "out_zero_init")),
        ("minicpm_text_layers", "case_", ("x", "y", "attn_layer_index", "attn_y")),
        ("minicpm_vision", "case_", ("pixel_values", "target_sizes", "image_features")),
        ("minicpm_vlm", "case_", (*MINICPM_PROMPT, "last_hidden_state")),
        ("minicpm_action", "case_", ("vl_embs", "state", "noise", "actions")),
        ("minicpm_e2e", "case_", (*MINICPM_PROMPT, "state", "noise", "actions")),
        ("minicpm_preprocess", "case_", ("0.resized_corner_uint8", "12.pixel_values_x")),
        ("minicpm_track_policy", "track_case_", ("coarse_tokens", "fine_tokens", "trajectory")),
        ("minicpm_track_pool", "track_case_", ("dino_tokens", "siglip_tokens", "coarse")),
        (UNKNOWN, "case_", ("coarse_tokens", "fine_tokens", "trajectory")),
        (UNKNOWN, "track_case_", ("vl_embs", "state", "noise", "actions")),
        (UNKNOWN, "case_", (*MINICPM_PROMPT, "q", "k", "v", "g", "beta")),
    ],
)
def test_kind_of_minicpm_tensors(
    tmp_path: Path, kind: str, prefix: str, names: tuple[str, ...]
) -> None:
    for name in ("b7_seed3", "action_e2e_vision"):
        write_case(tmp_path / f"{prefix}{name}.safetensors", names)
    assert [case.kind for case in discover(tmp_path)] == [kind, kind]


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("minicpm_preprocess_facts", {"images": []}),
        ("minicpm_layout", {"note": "", "cases": []}),
        (UNKNOWN, {"images": [], "cases": []}),
        (UNKNOWN, {"prompt": "a"}),
    ],
)
def test_kind_of_minicpm_records(tmp_path: Path, kind: str, content: object) -> None:
    (tmp_path / "case_b.json").write_text(json.dumps(content))
    assert [case.kind for case in discover(tmp_path)] == [kind]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("preprocess_lerobot", ("img7.in_uint8_chw", "img7.model_input_chw")),
        ("preprocess_lerobot", ("norm.in_state", "norm.MIN_MAX.state")),
        ("preprocess_lerobot", ("rel.in_state", "rel.relative")),
        ("preprocess_images_openpi", ("img0.in_uint8", "img0.openpi_client_pil_uint8")),
        ("preprocess_norm_openpi", ("in.state", "stats.quantile.norm_state")),
        ("preprocess_robot_openpi", ("in.state", "droid.state")),
        (UNKNOWN, ("rel.in_state", "droid.state")),
        (UNKNOWN, ("in.state",)),
    ],
)
def test_kind_of_preprocessing_tensors(tmp_path: Path, kind: str, names: tuple[str, ...]) -> None:
    write_case(tmp_path / "preprocess_a.safetensors", names)
    assert [case.kind for case in discover(tmp_path)] == [kind]


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("prompts_lerobot", [{"prompt": "a", "hf_tokens_64": [1]}]),
        ("prompts_openpi", [{"prompt": "a", "pi0_tokens_48": [1], "pi0_encode_calls": ["a"]}]),
        (UNKNOWN, [{"prompt": "a"}]),
        (UNKNOWN, [1, 2]),
        (UNKNOWN, {}),
    ],
)
def test_kind_of_prompts(tmp_path: Path, kind: str, content: object) -> None:
    (tmp_path / "preprocess_b.json").write_text(json.dumps(content))
    assert [case.kind for case in discover(tmp_path)] == [kind]


def test_finds_every_prefix_and_suffix_also_in_sub_folders(tmp_path: Path) -> None:
    write_case(tmp_path / "case_a.safetensors", PLAIN)
    write_case(tmp_path / "model.safetensors", PLAIN)
    write_case(tmp_path / "deep/er/track_case_b.safetensors", PLAIN)
    (tmp_path / "deep/case_c.json").write_text("[]")
    (tmp_path / "deep/preprocess_d.json").write_text("[]")
    (tmp_path / "deep/case_e.txt").write_text("")
    (tmp_path / "deep/loop").symlink_to(tmp_path)
    found = [case.path.relative_to(tmp_path).as_posix() for case in discover(tmp_path)]
    assert found == [
        "case_a.safetensors",
        "deep/case_c.json",
        "deep/er/track_case_b.safetensors",
        "deep/preprocess_d.json",
    ]


def test_set_root_is_the_nearest_config_within_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # above the folder: not looked at
    folder = tmp_path / "folder"
    paths = ["case_a.safetensors", "one/case_b.safetensors", "one/sub/case_c.safetensors"]
    for path in paths:
        write_case(folder / path, PLAIN)
    (folder / "one/config.json").write_text("{}")
    roots = [case.set_root for case in discover(folder)]
    assert roots == [None, folder / "one", folder / "one"]
    assert discover(folder / "one/sub")[0].set_root is None


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 7, struct.pack("<Q", 2**40), struct.pack("<Q", 4) + b"nope"]
)
def test_unreadable_file_is_of_unknown_kind(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "case_a.safetensors").write_bytes(content)
    (case,) = discover(tmp_path)
    assert case.kind == UNKNOWN
    assert "cannot be read" in case.problem


def test_outputs_are_what_is_not_an_input(tmp_path: Path) -> None:
    names = ("in.images", "raw.observation.state", "noise", "post.actions", "prefix.k.0")
    (case,) = discover(write_case(tmp_path / "case_a.safetensors", names).parent)
    assert outputs(case) == ("post.actions", "prefix.k.0")


def test_outputs_of_preprocessing(tmp_path: Path) -> None:
    names = ("norm.in_state", "norm.stats.action.q01", "norm.MIN_MAX.state", "rel.mask")
    (case,) = discover(write_case(tmp_path / "preprocess_a.safetensors", names).parent)
    assert outputs(case) == ("norm.MIN_MAX.state", "rel.mask")
    (tmp_path / "preprocess_a.safetensors").unlink()
    records = [{"prompt": "a", "state_f32": [0.0], "hf_tokens_64": [1]}]
    (tmp_path / "preprocess_b.json").write_text(json.dumps(records))
    (case,) = discover(tmp_path)
    assert outputs(case) == ("hf_tokens_64",)


def run_golden(folder: Path | str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the pi golden tests on ``folder`` in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(ROOT / "tests/pi/test_golden.py"), "--rootdir", str(ROOT)]
    command += ["-c", str(ROOT / "pyproject.toml"), "--golden-dir", str(folder)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_folder_without_cases_fails(tmp_path: Path) -> None:
    result = run_golden(tmp_path)
    assert result.returncode == 1
    assert "holds no case file" in result.stdout
    assert "2 failed" in result.stdout


@pytest.mark.slow
def test_unknown_kind_fails_with_relative_folder(tmp_path: Path) -> None:
    write_case(tmp_path / "set/case_a.safetensors", ("something",))
    result = run_golden("set", cwd=tmp_path)
    assert result.returncode == 1
    assert "set/case_a.safetensors: unknown kind: fits no kind" in result.stdout
    assert "2 failed" in result.stdout


@pytest.mark.slow
def test_not_built_kind_is_listed_and_nothing_else_of_the_repository_runs(tmp_path: Path) -> None:
    write_case(tmp_path / "case_a.safetensors", (*PLAIN, "in.step_noise"), kind="pi05")
    result = run_golden(tmp_path)
    assert "case_a.safetensors: reinforcement-learning rollout is not built yet" in result.stdout
    assert "1 failed, 1 passed" in result.stdout  # no case is left to run: that fails


def test_missing_folder_is_a_usage_error(tmp_path: Path) -> None:
    result = run_golden(tmp_path / "absent")
    assert result.returncode == 4
    assert "--golden-dir must name a folder" in result.stderr


def test_golden_test_may_not_be_skipped(tmp_path: Path) -> None:
    test = tmp_path / "test_skips.py"
    test.write_text(
        "import pytest\n"
        "GOLDEN_SETS, NOT_BUILT = ('pi05',), {}\n"
        "def test_skip(golden_case):\n    pytest.skip('no')\n"
        "@pytest.mark.xfail\ndef test_xfail(golden_case):\n    assert False\n"
    )
    write_case(tmp_path / "case_a.safetensors", PLAIN)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.conftest",
    ]
    command += [str(test), "--golden-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "2 failed" in result.stdout
    assert "must not be skipped" in result.stdout
