"""The parts of benchmarks/peers: weights, sizes, padding, the machine, our side as a worker."""

from __future__ import annotations

import itertools
import json
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
from benchmarks.peers.base import Batch, Refused
from benchmarks.peers.pairing import Measured, Pair, Probe
from benchmarks.peers.phyai_peer import split_options
from benchmarks.peers.sizes import Decoder, Sizes, Vision
from benchmarks.peers.weights import cached_checkpoint, draw, moments, write_checkpoint
from safetensors.torch import load_file

from phyai.models.pi.config import PiConfig

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/pi05"
# Released files hold one tensor more: the expert's unused output head.
RELEASED_TENSORS = 812
RELEASED_PARAMETERS = 3.617e9 - 263.32e6


def small_sizes() -> Sizes:
    decoder = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 64}
    return Sizes(
        vision=Vision(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
            image_size=56,
        ),
        text=Decoder(hidden_size=48, intermediate_size=64, **decoder),
        expert=Decoder(hidden_size=32, intermediate_size=64, **decoder),
        chunk=6, action_dim=8,
    )  # fmt: skip


def test_released_sizes_have_the_released_tensors() -> None:
    named = dict(Sizes().tensors())
    assert len(named) == RELEASED_TENSORS - 1
    count = sum(torch.Size(shape).numel() for shape in named.values())
    assert count == pytest.approx(RELEASED_PARAMETERS, rel=1e-3)
    assert Sizes().positions(3, 200) == 968
    assert Sizes().positions(2, 20) == 532


def test_half_depth_cuts_both_decoders_and_the_tower() -> None:
    half = Sizes.of_depth(9)
    layers = [part.num_hidden_layers for part in (half.vision, half.text, half.expert)]
    assert layers == [14, 9, 9]


def test_sizes_and_config_survive_the_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_sizes(), seed=0)
    assert Sizes.from_folder(tmp_path) == small_sizes()
    config = PiConfig.from_folder(tmp_path, "pi05")
    assert (config.chunk_size, config.num_cameras, config.text.hidden_size) == (6, 3, 48)


def test_weights_are_named_distinct_and_reproducible(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_sizes(), seed=5)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == dict(small_sizes().tensors()).keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, draw(name, tuple(tensor.shape), 5)), name
        mean, std = moments(name, tuple(tensor.shape))
        assert float(tensor.float().sub(mean).std()) == pytest.approx(std, rel=0.5), name
    shapes: dict[torch.Size, list[torch.Tensor]] = {}
    for tensor in stored.values():
        shapes.setdefault(tensor.shape, []).append(tensor)
    for same in shapes.values():
        for a, b in itertools.combinations(same, 2):
            assert not torch.equal(a, b)
    assert not torch.equal(draw("a", (64,), 5), draw("a", (64,), 6))


def test_chunks_of_a_large_tensor_differ() -> None:
    halves = draw("a.weight", (2, 2**20), 0)
    assert not torch.equal(halves[0], halves[1])


def test_cache_is_filled_once_and_keyed_by_seed_and_sizes(tmp_path: Path) -> None:
    said: list[str] = []
    first = cached_checkpoint(tmp_path, small_sizes(), 0, said.append)
    assert cached_checkpoint(tmp_path, small_sizes(), 0, said.append) == first
    assert len(said) == 1
    assert cached_checkpoint(tmp_path, small_sizes(), 1, said.append) != first
    assert all(not path.name.startswith(".writing") for path in tmp_path.iterdir())


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


def test_stage_shares_far_from_the_official_code_void_a_ratio() -> None:
    assert report.share_problems({"vision": 2.65, "prefix": 3.27, "loop": 1.62}) == []
    problems = report.share_problems({"vision": 1.2, "prefix": 1.0, "loop": 2.0})
    assert problems == ["prefix takes 24 % of the stages, not 43 %",
                        "loop takes 48 % of the stages, not 22 %"]  # fmt: skip
    assert report.share_problems({}) == ["the peer reports no stages"]


@pytest.mark.slow
def test_our_side_measures_itself_padded_and_unpadded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_sizes(), seed=0)
    worker = shlex.join([sys.executable, "-m", "benchmarks.peers.worker", "phyai"])
    saved = tmp_path / "report.json"

    def steady(threads: int) -> Probe:
        return lambda: {"matrix_flops_per_s": 1.0}

    code = paired.run(
        ["--peer", f"command:{worker}", "--checkpoint", str(tmp_path), "--dtype", "fp32",
         "--cameras", "2", "--tokens", "5", "--peer-cameras", "3", "--peer-tokens", "9",
         "--pairs", "2", "--threads", "1", "--foreign-limit", "99",
         "--weights-cache", str(tmp_path), "--save", str(saved)],
        steady,
    )  # fmt: skip
    assert code == 0
    found = json.loads(saved.read_text())
    assert 0 <= found["equality"]["relative"] < 1e-5
    assert found["ours"]["threads"] == 1
    assert found["result"]["ours_stages_s"].keys() == {"vision", "prefix", "loop"}
    assert found["ours"]["peak_rss_bytes"] > 2**26
    assert found["ours"]["prefix_positions"] == 2 * 16 + 5


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["hf", "hf-bf16-vision", "openvino"])
def test_peer_reproduces_the_golden_actions(
    peer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = paired.ENVIRONMENTS[peer]
    if not (ROOT / ".peers" / environment).is_dir():
        pytest.skip(f"needs: python benchmarks/paired.py --setup {environment}")
    # OpenVINO compiles a graph per case, and float32 alone runs on every CPU.
    pattern = "case_b3_c3_s4.*" if peer == "openvino" else "*"
    for file in (*GOLDEN.glob("*.json"), GOLDEN / "model.safetensors", *GOLDEN.glob(pattern)):
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    code = paired.run(["--peer", peer, "--verify-golden", str(tmp_path), "--threads", "1"])
    assert code == 0, capsys.readouterr().out


def test_golden_folder_without_cases_fails(tmp_path: Path) -> None:
    worker = shlex.join([sys.executable, "-m", "benchmarks.peers.worker", "phyai"])
    words = ["--peer", f"command:{worker}", "--verify-golden", str(tmp_path)]
    assert paired.run(words) == paired.FAILED
