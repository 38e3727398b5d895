"""`phyai bench`, `phyai profile`, `phyai roofline`: tables, JSON, pictures, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phyai.cli import measuring
from phyai.cli.app import main
from phyai.cli.run_setup import RunOptions
from phyai.cost import Workload
from phyai.errors import ConfigError
from phyai.profile import probe as probing
from phyai.profile.roofline import Machine
from tests.native_cache import share_native

SMALL = ("--plugin", "pi05", "--cameras", "1", "--tokens", "4", "--steps", "1")


@pytest.fixture(autouse=True)
def small(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path_factory.getbasetemp() / "phyai-cache"
    share_native(cache)
    monkeypatch.setenv("PHYAI_CACHE", str(cache))
    monkeypatch.setenv("PHYAI_DEVICE", "cpu")

    def machines(device: Any, dtypes: Any) -> list[Machine]:
        return [Machine("made up", name, 1e11, 1e10) for name in dtypes]

    monkeypatch.setattr(probing, "probe", machines)


def ok(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


def test_bench_prints_saves_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "bench.json"
    out = ok(
        capsys, "bench", *SMALL, "--batch", "1,2", "--repeat", "2", "--warmup", "0", "--probe",
        "--published", "--plots", str(tmp_path / "plots"), "--save", str(saved),
    )  # fmt: skip
    for word in ("total ms", "min..max", "vision", "prefix", "solve", "rows/s", "ridge", "load"):
        assert word in out
    assert "published by others, not measured here" in out
    assert "published ms" in out
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"shares.png", "throughput.png", "roofline.png"}
    data = json.loads(saved.read_text())
    assert data["format"] == "phyai-bench/1"
    assert [one["workload"]["rows"] for one in data["measured"]] == [1, 2]
    one = data["measured"][0]
    assert one["stages_ms"]["encode/vision"]["count"] == 2
    assert sum(one["latency_shares"].values()) == pytest.approx(1.0)
    assert [stage["stage"] for stage in one["computed"]] == ["vision", "prefix", "loop"]
    assert data["conditions"]["threads"] == 1
    assert data["machine"][0]["name"] == "made up"
    rate = ok(capsys, "roofline", "--bench", str(saved), "--environment-ms", "20", "--json")
    assert json.loads(rate)["inference_ms"] == one["stages_ms"]["total"]["median"]


def test_bench_refuses_what_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cameras" in refused(capsys, "bench", "--plugin", "pi05", "--cameras", "9")
    assert "--batch" in refused(capsys, "bench", "--plugin", "pi05", "--batch", "x")
    assert "rows" in refused(capsys, "bench", "--plugin", "pi05", "--batch", "0,1")


def test_profile_sets_time_beside_work(capsys: pytest.CaptureFixture[str]) -> None:
    out = ok(
        capsys, "profile", *SMALL, "--repeat", "1", "--warmup", "0", "--probe", "--counted"
    )  # fmt: skip
    for word in ("published", "computed", "measured", "least", "bound", "counted in solve"):
        assert word in out


@pytest.mark.slow
def test_profile_draws_and_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, trace = tmp_path / "shares.png", tmp_path / "trace.json"
    out = ok(
        capsys, "profile", *SMALL, "--repeat", "1", "--warmup", "0", "--plot", str(picture),
        "--trace", str(trace), "--operators", "3",
    )  # fmt: skip
    assert "aten::" in out
    assert picture.stat().st_size > 1000
    assert json.loads(trace.read_text())["traceEvents"]


def test_profile_of_shapes_runs_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "open_engine", None)
    text = ok(
        capsys, "profile", "--plugin", "pi05", "--preset", "full-random", "--flops", "--cameras",
        "3", "--tokens", "16", "--steps", "10", "--json",
    )  # fmt: skip
    account = {stage["stage"]: stage for stage in json.loads(text)["published_account"]}
    assert account["prefix"]["flops"] / 1e12 == pytest.approx(3.1981, abs=1e-3)
    assert account["loop"]["flop_share"] == pytest.approx(0.0881, abs=1e-4)
    assert "--flops" in refused(capsys, "profile", "--plugin", "pi05", "--flops", "--counted")


def test_roofline_of_a_control_loop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "control.png"
    times = ("--inference-ms", "3.79", "--environment-ms", "23.42")
    out = ok(capsys, "roofline", *times, "--plot", str(picture))
    assert "36.75 Hz" in out
    assert "environment-bound; faster inference can bring at most 16%" in out
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "--inference-ms"),
        (("--inference-ms", "3"), "--environment-ms"),
        (("--inference-ms", "-3", "--environment-ms", "1"), "inference_ms"),
        (("--bench", "nowhere.json", "--environment-ms", "1"), "nowhere.json"),
        (("--machine", "--inference-ms", "3"), "--machine"),
        (("--inference-ms", "3", "--environment-ms", "1", "--plot", "x.gif"), "x.gif"),
    ],
)
def test_roofline_refusals(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], word: str
) -> None:
    assert word in refused(capsys, "roofline", *arguments)


def test_help_and_control_roofline_import_no_torch() -> None:
    code = (
        "import sys\nfrom phyai.cli.app import main\n"
        "for name in ('bench', 'profile', 'roofline'): assert main([name, '--help']) == 0\n"
        "assert main(['roofline', '--inference-ms', '1', '--environment-ms', '2']) == 0\n"
        "print([m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")


def test_a_plugin_without_a_cost_model_is_measured_on_its_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = measuring.subject(RunOptions(plugin="pi05"), rows=2)
    assert subject.setup.args.max_batch_size == 2
    bare = measuring.Subject(subject.setup, None)
    assert len(measuring.request_of(bare, Workload(rows=2, steps=3), 0)) == 2
    assert measuring.request_of(bare, Workload(steps=3), 0).options["num_steps"] == 3
    with pytest.raises(ConfigError, match="--cameras"):
        measuring.request_of(bare, Workload(cameras=2), 0)
    with pytest.raises(ConfigError, match="--published"):
        measuring.require_cost(bare, "--published")
