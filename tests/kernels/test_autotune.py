"""Autotuning: the cheapest kernel that fits, measured once, remembered in a file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from phyai.errors import ConfigError
from phyai.kernels import Autotuner, Candidate, KernelRow, KernelTable, parse_policy, reference
from phyai.kernels.autotune import seconds
from phyai.kernels.samples import sample

CPU = {"device": "cpu", "dtype": "float32"}
COSTS = {"slow": 3.0, "quick": 1.0, "torch.silu": 2.0}


class Bench:
    """Costs by name; counts what it was asked."""

    def __init__(self, **costs: Any) -> None:
        self.costs = costs or COSTS
        self.asked: list[str] = []

    def __call__(self, candidate: Candidate) -> float:
        self.asked.append(candidate.kernel)
        cost = self.costs[candidate.kernel]
        if isinstance(cost, Exception):
            raise cost
        return cost


def table(tuner: Autotuner, policy: Any = None) -> KernelTable:
    made = KernelTable()
    made.add(
        [
            KernelRow("silu", "slow", reference.silu, priority=300),
            KernelRow("silu", "quick", reference.silu, priority=100),
            KernelRow("silu", "never", reference.silu, devices=("cuda",), priority=400),
        ]
    )
    made.use(None if policy is None else parse_policy({"schema": 1, **policy}), tuner)
    return made


def test_the_cheapest_fitting_row_wins_and_is_measured_once() -> None:
    bench = Bench()
    made = table(Autotuner(bench))
    for _ in range(3):
        made.select("silu", **CPU)
    (choice,) = made.choices
    assert choice.row == "quick"
    assert dict(choice.refused)["slow"] == "costs 3, the chosen one 1"
    assert dict(choice.refused)["never"] == "device cpu is not one of cuda"
    assert bench.asked == ["slow", "quick", "torch.silu"]
    made.select("silu", **CPU, width=8)  # other facts, another measurement
    assert len(bench.asked) == 6


def test_a_policy_narrows_what_is_measured() -> None:
    bench = Bench()
    only = {"id": "p", "match": {"op": "silu"}, "prefer": ["slow", "torch.silu"]}
    made = table(Autotuner(bench), {"rules": [only]})
    assert made.explain_one("silu", **CPU).row == "slow"  # a preview measures nothing
    made.select("silu", **CPU)
    assert made.choices[0].row == "torch.silu"
    assert made.choices[0].by == "measurement within rule 'p'"
    assert bench.asked == ["slow", "torch.silu"]
    bench = Bench()
    use = {"id": "p", "match": {"op": "silu"}, "use": "slow"}
    table(Autotuner(bench), {"overrides": [use]}).select("silu", **CPU)
    assert bench.asked == []


def test_results_are_cached_in_a_file_for_the_same_table_and_facts(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tuned.json"
    table(Autotuner(Bench(), path)).select("silu", **CPU)
    data = json.loads(path.read_text())
    (entry,) = data["entries"].values()
    assert entry["costs"] == COSTS
    assert entry["facts"]["dtype"] == "float32"
    bench = Bench()
    made = table(Autotuner(bench, path))
    assert made.explain_one("silu", **CPU).by == "measurement"
    made.select("silu", **CPU)
    assert (made.choices[0].row, bench.asked) == ("quick", [])
    made.add([KernelRow("silu", "new", reference.silu)])  # another catalogue
    bench.costs = {**COSTS, "new": 0.5}
    made.select("silu", **CPU)
    assert made.choices[-1].row == "new"
    assert len(json.loads(path.read_text())["entries"]) == 2
    assert [p.name for p in path.parent.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"version": 0}',
        '{"version": 1, "entries": [1]}',
        '{"version": 1, "entries": {"k": {"costs": {"a": "x"}}}}',
    ],
)
def test_a_damaged_cache_is_measured_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    table(Autotuner(Bench(), path)).select("silu", **CPU)
    assert json.loads(path.read_text())["version"] == 1


def test_a_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "phyai"):
        made = table(Autotuner(Bench(), tmp_path / "file" / "tuned.json"))
        made.select("silu", **CPU)
    assert made.choices[0].row == "quick"
    assert "cannot be written" in caplog.text


def test_nothing_is_measured_while_a_graph_is_captured(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    busy = [True]
    bench = Bench()
    made = table(Autotuner(bench, path, capturing=lambda: busy[0]))
    made.select("silu", **CPU)
    made.select("silu", **CPU, capture=True)
    assert [choice.row for choice in made.choices] == ["slow", "slow"]
    busy[0] = False
    made.select("silu", **CPU, capture=True)
    assert bench.asked == []
    made.select("silu", **CPU)
    assert made.choices[-1].row == "quick"
    busy[0] = True  # what is known may be used
    assert made.explain_one("silu", **CPU).row == "quick"


def test_a_kernel_that_fails_is_no_candidate_and_a_wrong_cost_is_an_error() -> None:
    made = table(Autotuner(Bench(slow=4.0, quick=RuntimeError("boom"), **{"torch.silu": 5})))
    made.select("silu", **CPU)
    assert made.choices[0].row == "slow"
    assert dict(made.choices[0].refused)["quick"] == "measuring it failed: RuntimeError: boom"
    broken = RuntimeError("no")
    made = table(Autotuner(Bench(slow=broken, quick=broken, **{"torch.silu": broken})))
    made.select("silu", **CPU)
    assert (made.choices[0].row, made.choices[0].by) == ("slow", "")
    for cost in (None, float("nan"), True):
        with pytest.raises(ConfigError, match=r"kernel\.benchmark must return a finite number"):
            table(Autotuner(Bench(slow=cost, quick=1, **{"torch.silu": 1}))).select("silu", **CPU)


def test_the_built_in_timer_runs_real_kernels() -> None:
    made = KernelTable()
    made.use(None, Autotuner())
    made.select("attention", **CPU, head_dim=8, queries=4, keys=16, heads=2)
    assert made.choices[0].by == "measurement"
    made.select("silu", **CPU)  # one row: nothing to measure
    made.select("attention", **CPU)  # no sizes: the catalogue's order
    assert [choice.by for choice in made.choices] == ["measurement", "", ""]


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("linear", {"in_features": 6, "out_features": 4, "rows": 3}),
        ("linear", {"in_features": 6, "out_features": 4, "bias": True}),
        ("rms_norm", {"width": 6}),
        ("layer_norm", {"width": 6}),
        ("ada_rms_norm", {"width": 6}),
        ("ada_layer_norm", {"width": 6}),
        ("apply_rope", {"head_dim": 6}),
        ("attention", {"head_dim": 6, "masked": True}),
        ("attention", {"head_dim": 6, "masked": False, "heads": 4, "kv_heads": 2}),
    ],
)
def test_samples_fit_the_references(op: str, sizes: dict[str, Any]) -> None:
    before = torch.random.get_rng_state()
    made = sample({"op": op, "device": "cpu", "dtype": "bfloat16", **sizes})
    assert made is not None
    out = getattr(reference, op)(*made.args, **made.kwargs)
    assert out.dtype == torch.bfloat16
    assert torch.equal(before, torch.random.get_rng_state())
    assert sample({"op": op, "device": "cpu", "dtype": "bfloat16"}) is None


def test_a_candidate_without_a_sample_says_so() -> None:
    candidate = Candidate("silu", "x", reference.silu, CPU, None)
    with pytest.raises(ConfigError, match="has no sample"):
        seconds(candidate)
