"""Sweeps: combinations, repeats, medians, shares; on an engine that only pretends to work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phyai.cost import StageCost, Workload
from phyai.errors import ConfigError
from phyai.profile.sweep import Measurement, Spread, batches, grid, measure, parse_sizes


class FakeEngine:
    """Counts requests; request n takes n milliseconds per stage."""

    def __init__(self, *stages: str) -> None:
        self.stages, self.runs = stages, 0
        self.core = SimpleNamespace(last_timing={})

    def step(self, request: Any) -> None:
        self.runs += 1
        times = dict.fromkeys(self.stages, float(self.runs))
        self.core.last_timing = {"queue": 0.0, **times, "total": 10.0 * self.runs}


def spread(ms: float) -> Spread:
    return Spread(ms, ms, ms, 1)


def test_warm_up_and_first_run_stay_out_of_the_medians() -> None:
    engine: Any = FakeEngine("encode", "solve")
    seen: list[int] = []
    done = measure(engine, Workload(), "request", repeat=3, warmup=2,
                   on_run=lambda done, total, name: seen.append(total))  # fmt: skip
    assert engine.runs == 6
    assert seen == [6] * 6
    assert done.first_ms == 10.0
    assert done.stages_ms["solve"] == Spread(5.0, 4.0, 6.0, 3)
    assert done.total_ms.median == 50.0
    assert "queue" not in done.stages_ms


def test_rate_counts_rows() -> None:
    one = Measurement(Workload(rows=4), {"total": spread(200.0)}, 0.0)
    assert one.rows_per_s == pytest.approx(20.0)


def test_grid_is_every_combination() -> None:
    base = Workload(rows=1, cameras=3, tokens=200, steps=10)
    assert grid(base) == [base]
    works = grid(base, rows=(1, 2), steps=(5, 10), tokens=None)
    assert [(w.rows, w.steps) for w in works] == [(1, 5), (1, 10), (2, 5), (2, 10)]
    assert {(w.cameras, w.tokens) for w in works} == {(3, 200)}


def test_sizes_are_parsed_or_refused() -> None:
    assert parse_sizes("--batch", "1,2,8") == (1, 2, 8)
    assert parse_sizes("--batch", None) is None
    for text in ("1,two", "", "1,,2", "2,2"):
        with pytest.raises(ConfigError, match="--batch"):
            parse_sizes("--batch", text)


@pytest.mark.parametrize("fields", [{"rows": 0}, {"steps": 0}, {"cameras": -1}, {"tokens": True}])
def test_impossible_workloads_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Workload(**fields)


STAGES = (
    StageCost("vision", "encode/vision", 1e9, 1.0),
    StageCost("prefix", "encode/prefix", 3e9, 1.0),
    StageCost("loop", "solve", 4e9, 2.0),
)


def measured(**times: float) -> Measurement:
    stages = {name.replace("_", "/"): spread(ms) for name, ms in times.items()}
    return Measurement(Workload(), stages, 0.0, STAGES, STAGES)


def test_latency_shares_add_up() -> None:
    one = measured(encode=50, encode_vision=10, encode_prefix=35, solve=40, total=100)
    shares = one.latency_shares()
    assert shares == pytest.approx({"vision": 0.1, "prefix": 0.35, "loop": 0.4, "other": 0.15})
    assert sum(shares.values()) == pytest.approx(1.0)


def test_a_captured_region_counts_as_a_whole() -> None:
    one = measured(encode=50, solve=40, total=100)
    assert [stage.stage for stage in one.timed] == ["encode", "loop"]
    encode = one.timed[0]
    assert (encode.flops, encode.bytes, encode.note) == (4e9, 2.0, "vision + prefix")
    assert one.latency_shares() == pytest.approx({"encode": 0.5, "loop": 0.4, "other": 0.1})


def test_batches_groups_what_differs_in_rows_only() -> None:
    works = grid(Workload(cameras=2), rows=(4, 1), steps=(1, 2))
    works.append(Workload(steps=7))
    done = [Measurement(work, {"total": spread(1.0)}, 0.0) for work in works]
    groups = list(batches(done))
    assert [[one.workload.rows for one in group] for group in groups] == [[1, 4], [1, 4]]
