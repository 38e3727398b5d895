"""`phyai run` and `phyai verify` on the presets and golden sets of the installed plugins."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from phyai.cli import plots, record
from phyai.cli.app import main
from phyai.cli.verify import case_root
from phyai.errors import MissingDependency
from phyai.types import ActionChunk, Observation
from tests.native_cache import share_native

GOLDEN = Path(__file__).parents[1] / "golden" / "pi05"
PLUGIN = "pi05"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "phyai-cache"
    share_native(folder)
    monkeypatch.setenv("PHYAI_CACHE", str(folder))
    monkeypatch.setenv("PHYAI_DEVICE", "cpu")
    return folder


def ok(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(list(arguments)) == code
    out, err = capsys.readouterr()
    assert out.strip() == "" or arguments[-1] != "--json"
    assert "Traceback" not in err
    return err


def own_checkpoint(*more: str) -> tuple[str, ...]:
    return (
        "run", "--checkpoint", str(GOLDEN), "--tokenizer", str(GOLDEN / "tokenizer"),
        "--arg", f"processor_dir={GOLDEN / 'processors_abs'}", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "view.png"
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


# ---------------------------------------------------------------- presets


def test_run_alone_prints_header_timing_and_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    out = ok(capsys, "run", "--plugin", PLUGIN)
    for word in ("plugin", "preset", "device", "dtype", "tokenizer", "parameters", "cameras",
                 "state", "prompt", "seed"):  # fmt: skip
        assert f"\n{word} " in f"\n{out}"
    assert "base_0_rgb 256 x 256" in out
    assert "tokenizer.json of the checkpoint" in out
    for stage in ("prepare", "encode", "solve", "output", "total", "rate"):
        assert f" {stage} " in out
    assert "step 0" in out or "0.00 s" in out
    assert "peak memory of the process (RSS): " in out


def test_json_is_one_object_and_repeats_with_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("run", "--plugin", PLUGIN, "--steps", "2", "--json")
    first = json.loads(ok(capsys, *arguments))
    again = json.loads(ok(capsys, *arguments, "--repeat", "3"))
    other = json.loads(ok(capsys, *arguments, "--seed", "1"))
    assert first["actions"] == again["actions"]
    assert first["actions"] != other["actions"]
    assert first["plugin"] == PLUGIN
    assert first["preset"]
    assert (first["seed"], other["seed"]) == (0, 1)
    assert first["device"] == "cpu"
    assert first["dtype"] == "fp32"
    assert len(first["names"]) == len(first["actions"][0])
    assert len(first["model_actions"]) == len(first["actions"])
    assert first["peak_rss_bytes"] > 2**20
    assert first["timing"]["total"] > 0
    assert len(again["timings"]) == 3
    assert {"phyai-core", "torch", "python"} <= set(first["versions"])


def test_options_replace_the_sample(capsys: pytest.CaptureFixture[str], picture: Path) -> None:
    base = json.loads(ok(capsys, "run", "--plugin", PLUGIN, "--steps", "1", "--json"))
    for option in (["--image", f"base_0_rgb={picture}"], ["--prompt", "open the drawer"],
                   ["--state", "0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5"]):  # fmt: skip
        changed = ok(capsys, "run", "--plugin", PLUGIN, "--steps", "1", "--json", *option)
        assert json.loads(changed)["actions"] != base["actions"], option


def test_dtype_goes_through_the_plugins_names(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("run", "--plugin", PLUGIN, "--steps", "1", "--json", "--dtype")
    assert json.loads(ok(capsys, *arguments, "bf16"))["dtype"] == "bf16_openpi"
    assert json.loads(ok(capsys, *arguments, "float32"))["dtype"] == "fp32"
    err = refused(capsys, *arguments, "bf61")
    assert "must be one of bf16, bf16_lerobot" in err
    assert "Did you mean 'bf16'?" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--preset", "tinny"), "Did you mean 'tiny'?"),
        (("--arg", "interpolaton=openpi"), "Did you mean 'interpolation'?"),
        (("--arg", "max_batch_size=many"), "--arg max_batch_size must be int; got 'many'"),
        (("--arg", "max_batch_size=0"), "max_batch_size must be at least 1"),
        (("--arg", "novalue"), "--arg must look like key=value"),
        (("--set", "device.targt=cpu"), "config.device.targt must be a known key"),
        (("--set", "runtime.max_live_caches=x"), "config.runtime.max_live_caches must be int"),
        (("--image", "front=PICTURE"), "base_0_rgb"),
        (("--state", "1,2"), "state must"),
        (("--prompt", " "), "prompt must not be empty"),
        (("--session", "demo"), "'session_id' needs a plugin that keeps sessions"),
    ],
)
def test_wrong_values_are_refused(
    arguments: tuple[str, ...],
    text: str,
    capsys: pytest.CaptureFixture[str],
    picture: Path,
) -> None:
    given = [item.replace("PICTURE", str(picture)) for item in arguments]
    assert text in refused(capsys, "run", "--plugin", PLUGIN, *given, "--json")


def test_settings_reach_the_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ok(capsys, "run", "--plugin", PLUGIN, "--steps", "1", "--record", str(tmp_path / "r"),
       "--set", "config.runtime.max_live_caches=3", "--arg", "max_batch_size=2")  # fmt: skip
    text = (tmp_path / "r/config.yaml").read_text()
    assert "max_live_caches: 3" in text
    assert "max_batch_size: 2" in text


# ---------------------------------------------------------------- own checkpoints


def test_a_checkpoint_is_recognised_and_says_what_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    err = refused(capsys, *own_checkpoint())
    assert "at least one camera must be sent" in err
    assert "--image base_0_rgb=FILE" in err
    assert "--state with 5 numbers" in err
    assert '--prompt "..."' in err
    assert "horizon" not in err  # the manifest's 50 is not this checkpoint's


def test_a_checkpoint_runs_on_own_inputs(capsys: pytest.CaptureFixture[str], picture: Path) -> None:
    out = ok(
        capsys,
        *own_checkpoint("--image", f"base_0_rgb={picture}", "--state", "-0.1,0.2,0,0,1"),
        "--prompt", "pick up the cup", "--json",
    )  # fmt: skip
    data = json.loads(out)
    assert data["plugin"] == PLUGIN
    assert data["checkpoint"] == str(GOLDEN)
    assert data["preset"] is None
    assert np.isfinite(data["actions"]).all()


def test_the_state_length_is_named(capsys: pytest.CaptureFixture[str], picture: Path) -> None:
    err = refused(capsys, *own_checkpoint("--image", f"base_0_rgb={picture}", "--state", "1,2"))
    assert "state must have 5 values; got 2" in err


def test_a_checkpoint_nobody_recognises(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"type": "unheard_of"}')
    err = refused(capsys, "run", "--checkpoint", str(tmp_path), code=2)
    assert "safetensors" in err or "unheard_of" in err
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(1, np.float32)}, str(tmp_path / "model.safetensors"))
    err = refused(capsys, "run", "--checkpoint", str(tmp_path), code=1)
    assert "type 'unheard_of'" in err
    assert "--plugin" in err


def test_a_file_that_is_no_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "view.png"
    bad.write_text("no picture")
    err = refused(capsys, "run", "--plugin", PLUGIN, "--image", f"base_0_rgb={bad}")
    assert "must be a picture Pillow can read" in err


# ---------------------------------------------------------------- plot and record


def test_plot_writes_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "chunk.png"
    out = ok(capsys, "run", "--plugin", PLUGIN, "--steps", "1", "--plot", str(path))
    assert f"picture: {path}" in out
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert min(image.size) > 300


@pytest.mark.parametrize("dims", [1, 7, 32])
def test_panels_carry_names_units_and_seconds(
    dims: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: seen.append(self))
    mask = np.arange(10) < 8
    chunk = ActionChunk(
        np.random.default_rng(0).normal(size=(10, dims)).astype(np.float32),
        tuple(f"joint {i}" for i in range(dims)),
        mask,
        np.zeros((10, dims), np.float32),
        control_hz=20.0,
        units=("rad",) * dims,
    )
    plots.plot_chunk(chunk, tmp_path / "a.svg", "title")
    panels = [panel for panel in seen[0].axes if panel.get_visible()]
    assert len(panels) == dims
    assert panels[0].get_title(loc="left") == "joint 0"
    assert panels[0].get_ylabel() == "rad"
    assert panels[0].lines[0].get_xdata()[-1] == pytest.approx(9 / 20)
    assert len(panels[0].patches) == 2  # the masked steps
    assert {panel.get_xlabel() for panel in panels} - {""} == {"time (s)"}


def test_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match=r"pip install 'phyai-core\[plots\]'"):
        plots.check_plot(Path("a.png"))


def test_record_holds_the_run_and_is_not_written_over_other_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    arguments = ("run", "--plugin", PLUGIN, "--steps", "1", "--record", str(folder))
    data = json.loads(ok(capsys, *arguments, "--json"))
    seen = json.loads((folder / "observation.json").read_text())
    assert seen["options"] == {"seed": 0, "num_steps": 1}
    for file in seen["images"].values():
        with Image.open(folder / file) as image:
            assert image.mode == "RGB"
    result = np.load(folder / "result.npz", allow_pickle=False)
    assert result["actions"].tolist() == data["actions"]
    assert json.loads((folder / "result.json").read_text())["names"] == data["names"]
    assert json.loads((folder / "timing.json").read_text())["total"] > 0
    assert ok(capsys, "config", str(folder / "config.yaml"), "--check").startswith("Configuration")
    ok(capsys, *arguments)  # a record may be replaced

    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("keep")
    arguments = (*arguments[:-1], str(other))
    assert "holds other files" in refused(capsys, *arguments)
    ok(capsys, *arguments, "--force")
    assert (other / "mine.txt").read_text() == "keep"
    assert record.is_record(other)


def test_float_images_are_recorded_as_pictures(tmp_path: Path) -> None:
    chw = np.zeros((3, 4, 6), np.float32)
    chw[0] = 1.0
    seen = record._observation(Observation(images={"a/b c": chw}), tmp_path / "images")
    with Image.open(tmp_path / seen["images"]["a/b c"]) as image:
        assert image.size == (6, 4)
        assert image.getpixel((0, 0)) == (255, 0, 0)


# ---------------------------------------------------------------- verify


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder above a golden set of one case."""
    folder = tmp_path_factory.mktemp("golden") / "set"
    folder.mkdir()
    for name in ("model.safetensors", "config.json", "arch.json", "case_b2_c2_s1.safetensors"):
        shutil.copy(GOLDEN / name, folder / name)
    return folder


def break_case(path: Path, tensor: str) -> None:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    changed = tensors[tensor].copy()
    changed.flat[-1] += 0.01
    save_file({**tensors, tensor: changed}, str(path), metadata=metadata)


def test_verify_passes(capsys: pytest.CaptureFixture[str], golden: Path) -> None:
    out = ok(capsys, "verify", "--plugin", PLUGIN, "--golden", str(golden.parent))
    assert "case_b2_c2_s1: ok" in out
    assert " actions " in out
    assert "OVER" not in out
    assert out.splitlines()[-1].startswith("1 run: 1 ok; 0 of ")


def test_verify_names_the_tensor_that_is_over(
    capsys: pytest.CaptureFixture[str], golden: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    shutil.copytree(golden, folder)
    break_case(folder / "case_b2_c2_s1.safetensors", "steps.v_t")
    assert main(["verify", "--plugin", PLUGIN, "--golden", str(folder)]) == 1
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "OVER" in line] == ["steps.v_t"]
    assert "1 over; 1 of " in out
    assert main(["verify", "--plugin", PLUGIN, "--golden", str(folder), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is False
    over = [t["name"] for case in data["cases"] for t in case["tensors"] if not t["ok"]]
    assert over == ["steps.v_t"]


def test_verify_goes_on_after_a_case_it_cannot_read(
    capsys: pytest.CaptureFixture[str], golden: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    shutil.copytree(golden, folder)
    (folder / "case_a.safetensors").write_bytes(b"\x01\x02")
    assert main(["verify", "--plugin", PLUGIN, "--golden", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert "case_a: error" in out
    assert "case_b2_c2_s1: ok" in out
    assert "Traceback" not in out + err


def test_verify_lists_what_the_plugin_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    out = ok(capsys, "verify", "--plugin", PLUGIN, "--golden", str(GOLDEN), "--case", "case_rl_*")
    assert "case_rl_rollout: not run by this plugin" in out
    assert "1 not run by this plugin" in out


def test_verify_without_cases_is_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("verify", "--plugin", PLUGIN, "--golden")
    assert "got none" in refused(capsys, *arguments, str(tmp_path))
    assert "must name a folder" in refused(capsys, *arguments, str(tmp_path / "x"))
    assert "none of which match" in refused(capsys, *arguments, str(GOLDEN), "--case", "zzz*")


def test_root_of_a_case_is_the_nearest_folder_with_a_config(tmp_path: Path) -> None:
    case = tmp_path / "a" / "b" / "c" / "case_x.safetensors"
    case.parent.mkdir(parents=True)
    assert case_root(case, tmp_path) == tmp_path
    (tmp_path / "a" / "config.json").touch()
    assert case_root(case, tmp_path) == tmp_path / "a"
    (case.parent / "config.json").touch()
    assert case_root(case, tmp_path) == case.parent


@pytest.mark.slow
def test_the_installed_command_runs(cache: Path) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("phyai")), "run", "--plugin", PLUGIN, "--json"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.load(io.StringIO(done.stdout))["plugin"] == PLUGIN
