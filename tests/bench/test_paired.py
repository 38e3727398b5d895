"""benchmarks/paired.py from its command line, with workers that only pretend to compute."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import paired
from benchmarks.peers import cli, machine, sides
from benchmarks.peers.models import MODELS
from benchmarks.peers.pairing import Probe
from benchmarks.peers.pi.sizes import Decoder, PiSizes, Vision
from benchmarks.peers.weights import write_checkpoint

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_worker.py")
STEADY = {"matrix_flops_per_s": 1e11, "memory_bytes_per_s": 1e10}

Run = Callable[..., int]


def tiny_sizes() -> PiSizes:
    decoder = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 64}
    return PiSizes(
        vision=Vision(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
            image_size=56,
        ),
        text=Decoder(hidden_size=48, intermediate_size=64, **decoder),
        expert=Decoder(hidden_size=32, intermediate_size=64, **decoder),
        chunk=6, action_dim=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tiny_sizes(), seed=3)
    return folder


def fake(name: str, **options: object) -> str:
    words = [
        sys.executable,
        "-I",
        "-S",
        str(FAKE),
        name,
        *(f"{key}={v}" for key, v in options.items()),
    ]
    return "command:" + shlex.join(words)


def steady(threads: int) -> Probe:
    return lambda: STEADY


@pytest.fixture
def run(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run paired.py on two fake sides; ours and peer are options of the fake worker."""
    clock = itertools.count()
    alone = lambda sessions: machine.CpuSample(float(next(clock)), 0.0, 0.0)  # noqa: E731
    monkeypatch.setattr(machine, "cpu_sample", alone)

    def run(
        *words: str, ours: dict[str, Any] | None = None, peer: dict[str, Any] | None = None,
        probe: Callable[[int], Probe] = steady,
    ) -> int:  # fmt: skip
        sides = ["--ours", fake("ours", **(ours or {})), "--peer", fake("peer", **(peer or {}))]
        fixed = ["--checkpoint", str(checkpoint), "--threads", "1", "--dtype", "fp32"]
        fixed += ["--weights-cache", str(tmp_path / "cache")]
        return paired.run([*sides, *fixed, *words], probe)

    return run


def test_ratio_and_report(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, page = tmp_path / "out/report.json", tmp_path / "out/report.md"
    code = run(
        "--pairs", "3", "--save", str(saved), "--markdown", str(page),
        ours={"seconds": 0.5}, peer={"seconds": 1.25},
    )  # fmt: skip
    assert code == 0
    report = json.loads(saved.read_text())
    result = report["result"]
    assert result["ratio"] == {"median": 2.5, "min": 2.5, "max": 2.5}
    assert result["ours_s"]["median"] == 0.5
    assert result["peer_stages_s"] == {"vision": 1.25 / 4}
    assert (result["pairs"], result["dropped"]) == (3, {})
    assert report["ours"]["peak_rss_bytes"] == 2_000_000
    assert report["peer"]["first_call_s"] == 1.5
    assert report["equality"]["relative"] == 0.0
    assert {"date", "cpu", "cores", "load_1min", "cpu_features"} <= set(report["conditions"])
    assert page.read_text() == capsys.readouterr().out.removesuffix("\n")
    assert "**Ratio 2.50x** (2.50 to 2.50), median of 3 pairs." in page.read_text()


def test_sides_alternate_strictly_and_agree_before_any_pair(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run("--pairs", "3", ours={"log": log}, peer={"log": log}) == 0
    lines = log.read_text().splitlines()
    first_result = lines.index("ours result")
    assert lines[:first_result].count("ours run") == 1
    runs = [line for line in lines[first_result:] if line.endswith(" run")]
    assert runs[-6:] == ["ours run", "peer run"] * 3
    assert lines[-4:] == ["ours result", "peer result", "ours quit", "peer quit"]


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ({"shift": 0.01}, "relative norm of 0.0001 in fp32; got"),
        ({"shift": "nan"}, "those of the peer are not"),
    ],
)
def test_unequal_outputs_are_refused_before_any_pair(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], peer: dict[str, Any], words: str
) -> None:
    log = tmp_path / "log"
    assert run(ours={"log": log}, peer=peer) == paired.DIFFER
    assert words in capsys.readouterr().err
    assert log.read_text().split().count("run") == 1


def test_outputs_that_are_the_noise_prove_nothing(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(ours={"scale": 1.001}, peer={"scale": 1.001}) == paired.DIFFER
    assert "prove nothing; got 1.00e-03" in capsys.readouterr().err


def test_bf16_may_differ_more(run: Run) -> None:
    assert run("--dtype", "bf16", "--pairs", "1", peer={"scale": 2.04}) == 0
    assert run("--dtype", "bf16", "--pairs", "1", peer={"scale": 2.08}) == paired.DIFFER


def test_a_pair_that_does_not_fit_is_refused_before_loading(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 5 * 2**30)
    log = tmp_path / "log"
    sides = {"ours": {"bytes": 3 * 2**30, "log": log}, "peer": {"bytes": 4 * 2**30}}
    assert run(**sides) == paired.REFUSED
    error = capsys.readouterr().err
    assert "ours 3.0 and peer 4.0 GiB make 7.0 GiB, available are 5.0 GiB" in error
    assert "2.0 GiB are missing" in error
    assert "load" not in log.read_text()


def test_drifting_pairs_are_dropped_and_replaced(run: Run, tmp_path: Path) -> None:
    speeds = iter([1.0, 1.05, 1.2, 1.2, 1.05, 1.0])  # of the memory, between the pairs

    def probe(threads: int) -> Probe:
        return lambda: {**STEADY, "memory_bytes_per_s": next(speeds)}

    saved = tmp_path / "report.json"
    assert run("--pairs", "3", "--save", str(saved), probe=probe) == 0
    result = json.loads(saved.read_text())["result"]
    assert result["dropped"] == {"machine speed changed by over 10 %": 2}
    kept = [not pair["dropped"] for pair in result["all_pairs"]]
    assert kept == [True, False, True, False, True]


def test_pairs_with_foreign_cpu_use_are_dropped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # (wall, busy on all cores, ours) at the start and end of each pair of ten seconds
    samples = iter(
        machine.CpuSample(*values)
        for values in [
            (0, 0, 0),
            (10, 12, 11.5),
            (20, 20, 20),
            (30, 32, 30),
            (40, 0, 0),
            (50, 9, 9),
        ]
    )
    monkeypatch.setattr(machine, "cpu_sample", lambda sessions: next(samples))
    saved = tmp_path / "report.json"
    assert run("--pairs", "2", "--save", str(saved)) == 0
    result = json.loads(saved.read_text())["result"]
    assert result["dropped"] == {"others used over 0.1 cores": 1}
    assert [pair["foreign_cores"] for pair in result["all_pairs"]] == [0.05, 0.2, 0.0]


def test_too_few_kept_pairs_end_with_an_error(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    flip = itertools.cycle([1.0, 2.0])

    def probe(threads: int) -> Probe:
        return lambda: {**STEADY, "memory_bytes_per_s": next(flip)}

    assert run("--pairs", "2", "--max-pairs", "4", probe=probe) == paired.TOO_FEW
    said = capsys.readouterr()
    assert "2 pairs must be kept; got 0." in said.err
    assert "there is no ratio" in said.out


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (
            "load:crash",
            "must answer 'load'; it ended with exit code 7.* wrote:\n +the reason is here",
        ),
        ("run:garbage", "'run' with one JSON object a line; got b'Loading checkpoint shards: 50%'"),
        ("run:list", r"one JSON object a line; got b'\[1, 2\]'"),
        ("load:error", "worker peer cannot load: no such kernel"),
        ("hello:crash", "worker peer must answer 'hello'"),
    ],
)
def test_a_failing_worker_is_named_and_nothing_is_left(
    run: Run, capsys: pytest.CaptureFixture[str], fail: str, words: str
) -> None:
    assert run(peer={"fail": fail}) == paired.FAILED
    assert re.search(words, capsys.readouterr().err, re.DOTALL)
    assert children() == []


def test_a_reply_without_a_field_names_it(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(peer={"drop": "bytes"}) == paired.FAILED
    assert "worker peer must answer 'estimate' with 'bytes'; got []" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("set_to", "words"),
    [
        ("run:seconds=0", "'run' with 'seconds' as a finite number above 0; got 0"),
        ("run:seconds=-1.5", "'run' with 'seconds' as a finite number above 0; got -1.5"),
        ("run:seconds=NaN", "'run' with 'seconds' as a finite number above 0; got nan"),
        ('run:seconds="1"', "'run' with 'seconds' as a finite number above 0; got '1'"),
        ('run:stages={"vision":-1}', "'run' with 'stages' as an object of which every value"),
        ("estimate:bytes=-1", "'estimate' with 'bytes' as a whole number of at least 0; got -1"),
        (
            "inputs:prefix_positions=0",
            "'inputs' with 'prefix_positions' as a whole number of at least 1; got 0",
        ),
        (
            "result:first_call_s=Infinity",
            "'result' with 'first_call_s' as a finite number above 0; got inf",
        ),
        ("hello:name=null", "'hello' with 'name' as a text; got None"),
    ],
)
def test_an_impossible_reply_is_refused(
    run: Run, capsys: pytest.CaptureFixture[str], set_to: str, words: str
) -> None:
    assert run(peer={"set": set_to}) == paired.FAILED
    assert f"worker peer must answer {words}" in capsys.readouterr().err
    assert children() == []


def test_a_hanging_run_ends_at_its_limit(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--first-run-limit", "0.3", peer={"fail": "run:hang"}) == paired.FAILED
    assert "worker peer must answer 'run' within 0.3 s" in capsys.readouterr().err
    assert children() == []


def test_what_a_worker_started_ends_with_it(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(peer={"fail": "load:child"}) == paired.FAILED
    found = re.search(r"child (\d+)", capsys.readouterr().err)
    assert found is not None
    assert not alive(int(found[1]))


def test_a_command_that_does_not_exist_is_named(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--peer", "command:/no/such/program") == paired.FAILED
    assert "'/no/such/program' gave" in capsys.readouterr().err
    assert children() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pairs", "0"], "--pairs must be at least 1; got 0"),
        (["--peer-cameras", "1"], "must not be below"),
        (["--layers", "19"], r"layers must be in \[1, 18\]; got 19"),
        (["--peer", "hff"], "--peer must be phyai, hf, .* for pi05; got 'hff'"),
        (["--model", "pi0", "--peer", "openvino"], "for pi0; got 'openvino'"),
        (["--model", "gr00t_n17", "--layers", "3"], r"layers must be in \[4, 16\]; got 3"),
        (["--model", "gr00t_n17", "--peer-cameras", "3"], "must be left out for gr00t_n17"),
        (["--model", "minicpm_robot", "--layers", "3"], r"layers must be in \[4, 24\]; got 3"),
        (["--model", "minicpm_robot", "--peer-cameras", "4"], "left out for minicpm_robot"),
        (["--model", "minicpm_robot", "--peer", "hf-kv-cache"], "for minicpm_robot; got"),
        (["--model", "cosmos3", "--peer", "hf"], "for cosmos3; got 'hf'"),
        (["--model", "cosmos3_policy", "--layers", "37"], r"layers must be in \[1, 36\]; got 37"),
        (["--max-pairs", "0"], "--max-pairs must be at least 1; got 0"),
        (["--peer-tokens", "0"], "must not be below"),
        (["--depth-fraction", "nan"], "--depth-fraction must be a finite number above 0; got nan"),
        (["--tolerance", "nan"], "--tolerance must be a finite number above 0; got nan"),
        (["--tolerance", "0"], "--tolerance must be a finite number above 0; got 0"),
        (["--run-limit", "-1"], "--run-limit must be a finite number above 0; got -1"),
        (["--first-run-limit", "inf"], "--first-run-limit must be a finite number above 0"),
        (["--drift-limit", "nan"], "--drift-limit must be a finite number of at least 0"),
        (["--foreign-limit", "-0.1"], "--foreign-limit must be a finite number of at least 0"),
    ],
)
def test_wrong_options(
    run: Run, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(*words) == paired.USAGE
    assert re.search(message, capsys.readouterr().err)


def test_a_peer_without_its_environment_says_how_to_get_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sides, "ROOT", tmp_path)
    assert run("--peer", "openvino") == paired.REFUSED
    assert "Run: python benchmarks/paired.py --setup openvino" in capsys.readouterr().err
    assert run("--model", "minicpm_robot", "--peer", "hf") == paired.REFUSED
    assert "Run: python benchmarks/paired.py --setup hf-minicpm" in capsys.readouterr().err


def test_defaults_are_the_model_s() -> None:
    def checked(*words: str) -> list[int]:
        args = cli.checked(cli.parser("").parse_args(words))
        return [args.cameras, args.tokens, args.steps, args.peer_cameras, args.peer_tokens]

    assert checked() == [2, 20, 10, 2, 20]
    assert checked("--model", "gr00t_n17") == [2, 24, 4, 2, 24]
    assert checked("--model", "minicpm_robot") == [3, 64, 4, 3, 64]
    assert checked("--model", "minicpm_robot", "--cameras", "1")[0] == 1
    assert checked("--model", "cosmos3_policy") == [1, 32, 4, 1, 32]
    first = {name: model.first_peer for name, model in MODELS.items()}
    assert first == {name: "diffusers" if "cosmos" in name else "hf" for name in MODELS}


def test_every_environment_has_its_packages() -> None:
    names = {*sides.ENVIRONMENTS.values()}
    names |= {name for model in MODELS.values() for name in model.environments.values()}
    for name in names:
        assert (ROOT / f"benchmarks/peers/requirements-{name}.txt").is_file(), name


def test_waiting_threads_of_workers_do_not_spin() -> None:
    args = cli.parser("").parse_args(["--threads", "2"])
    values = sides.environment_of(args)
    assert (values["OMP_WAIT_POLICY"], values["KMP_BLOCKTIME"]) == ("PASSIVE", "0")
    assert values["OMP_NUM_THREADS"] == "2"


def children() -> list[int]:
    """Return the processes this one has started and that have not ended."""
    found = []
    for folder in os.listdir("/proc"):
        if folder.isdigit():
            try:
                text = Path(f"/proc/{folder}/stat").read_text()
            except OSError:
                continue
            state, parent = text.rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z" and "fake_worker" in command(folder):
                found.append(int(folder))
    return found


def command(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def alive(process: int) -> bool:
    """Return whether a process still runs; one that was killed may take a moment to go."""
    for _ in range(50):
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.02)
    return True
