"""benchmarks/gateway.py: its figures, its answers' readers, and one short run of all of it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import gateway_figures as figures
from benchmarks import gateway_processes as processes
from benchmarks.gateway_paths import CHECK, GO, Lerobot, _lerobot, _native

from phyai_gateway.decode.pickle_writer import write_timed_actions
from phyai_gateway.proto.codec import decode_reply

ROOT = Path(__file__).resolve().parents[2]


def a_slice(path: str, rate: float, latency_s: float = 0.001) -> figures.Slice:
    count = round(rate)
    cpu = {"gateway": count * 0.002, "bare": count * 0.001}
    return figures.Slice(path, 1, 1.0, [latency_s] * count, [], cpu, 0.5)


def pairs(path: str, rates: list[tuple[float, float, float]]) -> figures.Pairs:
    found = figures.Pairs(path, 1)
    for before, own, after in rates:
        found.pairs.append(
            figures.Pair(
                a_slice("direct", before), a_slice(path, own, 0.003), a_slice("direct", after)
            )
        )
    return found


def test_ratios_are_to_the_direct_path_around_and_drifting_pairs_are_left_out() -> None:
    steady = [(100.0, 50.0, 100.0)] * 5
    native = pairs("native", [*steady, (100.0, 500.0, 200.0)])
    row = figures.summary(native, 0.25, pairs("bare", [(100.0, 80.0, 100.0)] * 6))
    assert (row["pairs"], row["kept"], row["few"]) == (6, 5, False)
    assert row["direct_ratio"]["median"] == 0.5
    assert row["bare_ratio"]["median"] == pytest.approx(0.625)
    assert row["added_p50_ms"]["median"] == pytest.approx(2.0)
    assert row["cpu_ms"]["gateway"] == pytest.approx(2.0)
    table = figures.table([row])
    assert "native" in table
    assert "0.50 (0.50 to 0.50)" in table


def test_with_too_few_steady_pairs_all_count_and_it_is_said() -> None:
    row = figures.summary(pairs("native", [(1.0, 50.0, 100.0)]), 0.25, pairs("bare", [(9, 9, 9)]))
    assert row["few"]
    assert "few" in figures.table([row])


def test_targets_are_met_at_least_and_at_most() -> None:
    rows = [
        {"path": "native", "in_flight": 8, "direct_ratio": {"median": 0.49}},
        {"path": "native", "in_flight": 1, "added_p50_ms": {"median": 1.5}},
    ]
    at_least, at_most = figures.TARGETS[:2]
    assert not at_least.met(rows)
    assert at_most.met(rows)


def test_stub_answers_a_check_with_the_actions_of_its_content() -> None:
    seed = processes.seed_of(_native(CHECK))
    changed = bytearray(_native(CHECK))
    changed[len(changed) // 2] ^= 1
    assert processes.seed_of(bytes(changed)) != seed
    assert processes.seed_of(_native(GO)) != seed
    reply = decode_reply(processes.reply("r1", seed))
    assert reply.actions is not None
    assert reply.actions.data == processes.actions(seed)
    assert len(_lerobot(GO)) == 1


def test_actions_of_a_lerobot_reply_are_read_without_loading_it() -> None:
    rows = [[float(row * 7 + column) for column in range(7)] for row in range(3)]
    data = write_timed_actions(rows, 5.0, 3, 30.0)
    answer = b"\x0a" + bytes([len(data) & 0x7F | 0x80, len(data) >> 7]) + data
    found = Lerobot.actions(object.__new__(Lerobot), answer)
    assert found == struct.pack("<21f", *(value for row in rows for value in row))


@pytest.mark.slow
def test_all_paths_give_the_same_actions_and_every_figure() -> None:
    command = [sys.executable, "benchmarks/gateway.py", "--rounds", "1", "--slice-s", "0.1"]
    done = subprocess.run(
        [*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    assert "all paths give the same actions" in done.stderr
    report = json.loads(done.stdout)
    assert {(row["path"], row["in_flight"]) for row in report["paths"]} == {
        (path, n) for path in ("bare", "native", "lerobot", "openpi", "gr00t") for n in (1, 8)
    }
    assert all(row["requests"] > 0 for row in report["paths"])
    assert len(report["targets"]) == 6
