"""The parts of benchmarks/peers: weights, sizes, padding, the machine, our side as a worker."""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks import paired
from benchmarks.peers import machine, report
from benchmarks.peers.base import Refused
from benchmarks.peers.models import MODELS
from benchmarks.peers.options import split_options
from benchmarks.peers.pairing import Measured, Pair
from benchmarks.peers.pi.batch import Batch


def batch() -> Batch:
    return Batch(
        torch.zeros(1, 2, 3, 4, 4), torch.ones(1, 2, dtype=torch.bool),
        torch.ones(1, 5, dtype=torch.int64), torch.ones(1, 5, dtype=torch.bool),
        torch.zeros(1, 6, 8), 10,
    )  # fmt: skip


def test_padding_is_masked_and_black() -> None:
    assert batch().unpadded
    padded = batch().padded(3, 7)
    assert not padded.unpadded
    assert padded.image_masks.tolist() == [[True, True, False]]
    assert padded.token_mask.tolist() == [[True] * 5 + [False] * 2]
    assert padded.images[:, 2].eq(-1).all()
    assert padded.images[:, :2].eq(0).all()
    assert padded.tokens[0, 5:].tolist() == [0, 0]
    with pytest.raises(Refused, match="must not shrink a batch of 2 cameras and 5 tokens"):
        batch().padded(1, 5)


def test_options_of_our_side_become_nested_settings() -> None:
    plugin, engine = split_options("seed=3 precision=fp32 config.runtime.graph_backend=eager")
    assert plugin == {"seed": 3, "precision": "fp32"}
    assert engine == {"config": {"runtime": {"graph_backend": "eager"}}}
    with pytest.raises(Refused, match="name=value; got 'fast'"):
        split_options("fast")
    for text in ("seed=NaN", "config.x.y=-Infinity", "sizes=[1,NaN]"):
        with pytest.raises(Refused, match="must be finite"):
            split_options(text)


def test_own_cpu_time_is_not_foreign() -> None:
    before = machine.cpu_sample([])
    ended = time.process_time() + 0.2
    while time.process_time() < ended:
        pass
    after = machine.cpu_sample([])
    assert after.own_s - before.own_s == pytest.approx(0.2, abs=0.1)
    assert after.busy_s - before.busy_s >= 0.1
    nobody = machine.CpuSample(after.wall_s, after.busy_s, before.own_s)
    assert nobody.foreign_since(before) > after.foreign_since(before)


def test_process_times_read_a_name_with_brackets() -> None:
    tail = "S 1 20 30 0 -1 0 0 0 0 0 100 50 25 5 20 0 1 0 0"
    session, seconds = machine.process_times(f"123 (a) b) {tail}")
    assert session == 30
    assert seconds == pytest.approx(180 / os.sysconf("SC_CLK_TCK"))


def test_probe_reports_both_speeds() -> None:
    speeds = machine.SpeedProbe(1)()
    assert speeds.keys() == {"matrix_flops_per_s", "memory_bytes_per_s"}
    assert min(speeds.values()) > 1e6


def pair(ours_s: float, peer_s: float, dropped: str = "") -> Pair:
    return Pair(ours_s, peer_s, {}, {}, 0.0, 0.0, dropped)


def test_the_ratio_is_the_median_of_ratios_of_kept_pairs() -> None:
    pairs = [pair(1, 2), pair(2, 5), pair(1, 4), pair(1, 100, "noise")]
    found = report.summary(Measured(pairs, []))
    assert found["ratio"] == {"median": 2.5, "min": 2.0, "max": 4.0}
    assert found["peer_s"]["median"] == statistics.median([2, 5, 4])
    assert found["dropped"] == {"noise": 1}


def test_the_ratio_of_the_network_itself_leaves_pixels_out() -> None:
    pairs = [
        Pair(2, 9, {"vision": 1, "prefix": 0.2, "loop": 0.8}, {"vision": 7, "loop": loop}, 0, 0, "")
        for loop in (1.5, 2.0, 4.0)
    ]
    found = report.summary(Measured(pairs, []))
    assert found["inner_ratio"] == {"median": 2.0, "min": 1.5, "max": 4.0}
    assert report.summary(Measured([pair(1, 2)], []))["inner_ratio"] is None


def test_stage_shares_far_from_the_official_code_void_a_ratio() -> None:
    shares = MODELS["pi05"].shares
    assert shares is not None
    official = shares.stages
    assert report.share_problems({"vision": 2.65, "prefix": 3.27, "loop": 1.62}, official) == []
    problems = report.share_problems({"vision": 1.2, "prefix": 1.0, "loop": 2.0}, official)
    assert problems == ["prefix takes 24 % of the stages, not 43 %",
                        "loop takes 48 % of the stages, not 22 %"]  # fmt: skip
    assert report.share_problems({}, official) == ["the peer reports no stages"]


def test_golden_folder_without_cases_fails(tmp_path: Path) -> None:
    worker = shlex.join([sys.executable, "-m", "benchmarks.peers.worker", "phyai"])
    words = ["--peer", f"command:{worker}", "--verify-golden", str(tmp_path)]
    assert paired.run(words) == paired.FAILED
