"""Joining as pure functions: what may share a batch, when it starts, how its result is divided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from phyai.errors import RequestError
from phyai.joining import (
    NotRowsFirst,
    deadline_s,
    joined,
    may_join,
    part_of,
    row_ranges,
    with_deadline,
    without_deadline,
)
from phyai.result_checks import not_finite
from phyai.scheduler import (
    EWMA_WEIGHT,
    KEYS_KEPT,
    MARGIN_S,
    SLOWER,
    Plan,
    RunTimes,
    Scheduler,
)
from phyai.types import Key, Observation, Prepared

KEY, OTHER = Key(num_steps=2), Key(num_steps=3)


def prepared(rows: int = 1, key: Key = KEY, first: float = 0.0, **changes: Any) -> Prepared:
    state = first + torch.arange(4.0 * rows).view(rows, 4)
    return replace(Prepared({"state": state}, rows, key), **changes)


# ---------------------------------------------------------------- which


@pytest.mark.parametrize(
    "other",
    [
        prepared(key=OTHER),
        prepared(meta=("decoded",)),
        prepared(joinable=False),
        prepared(tensors={"state": torch.zeros(1, 5)}),
        prepared(tensors={"state": torch.zeros(1, 4, dtype=torch.float64)}),
        prepared(tensors={"state": torch.zeros(1, 4), "more": torch.zeros(1)}),
        prepared(tensors={"state": torch.zeros(2, 4)}),  # not its rows
        prepared(tensors={"state": None}),
        prepared(session_ids=("a", "b")),
        prepared(seqs=()),
    ],
)
def test_what_is_not_alike_does_not_join(other: Prepared) -> None:
    assert may_join(prepared(), prepared(3))
    assert not may_join(prepared(), other)
    assert not may_join(other, prepared())


def test_a_subclass_of_prepared_may_hold_more_than_is_known_and_runs_alone() -> None:
    class More(Prepared):
        pass

    assert not may_join(prepared(), More({"state": torch.zeros(1, 4)}, 1, KEY))


def test_rows_stay_in_order_and_come_back_to_their_request() -> None:
    parts = [
        prepared(2, first=0.0, meta=("a", "b")),
        prepared(1, first=90.0, meta=("c",), session_ids=("s",), seqs=(4,)),
    ]
    whole = joined(parts)
    assert (whole.rows, whole.key, whole.meta) == (3, KEY, ("a", "b", "c"))
    assert (whole.session_ids, whole.seqs) == ((None, None, "s"), (None, None, 4))
    ranges = row_ranges(parts)
    assert ranges == [slice(0, 2), slice(2, 3)]
    for part, rows in zip(parts, ranges, strict=True):
        assert torch.equal(whole.tensors["state"][rows], part.tensors["state"])
    assert joined(parts[:1]) is parts[0]
    assert joined([prepared(), prepared()]).session_ids is None


def test_a_part_of_a_result_is_memory_of_its_own() -> None:
    whole = {"a": torch.arange(3.0), "b": {"c": torch.arange(6).view(3, 2)}}
    part = part_of(whole, slice(1, 2), 3)
    part["a"][:] = 9
    assert whole["a"].tolist() == [0, 1, 2]
    assert part["b"]["c"].tolist() == [[2, 3]]
    assert part_of(["x", "y", "z"], slice(1, 3), 3) == ["y", "z"]
    for result in (torch.tensor(1.0), torch.zeros(2), {"a": torch.zeros(4)}, "abc", None, [1]):
        with pytest.raises(NotRowsFirst, match=r"one row per robot \(3\)"):
            part_of(result, slice(0, 1), 3)


def test_the_rows_that_are_not_finite_are_told_from_the_others() -> None:
    x = {"action": torch.ones(3, 2), "sound": torch.ones(3, 1)}
    x["sound"][1] = float("inf")
    bad = not_finite(x, [slice(0, 1), slice(1, 3)])
    assert list(bad) == [1]
    assert "'sound' must be finite" in str(bad[1])
    assert x["sound"].flatten().tolist() == [1, 0, 0]
    assert not_finite(x, [slice(0, 3)]) == {}


# ---------------------------------------------------------------- when


@dataclass
class Entry:
    prepared: Prepared
    ready_at: float = 0.0
    deadline: float | None = None


def plan(*waiting: Entry, now: float = 0.0, rows: int = 4, wait: float = 1.0, **more: Any) -> Plan:
    scheduler = Scheduler(rows, more.get("static", False))
    times = more.get("times", RunTimes())
    return scheduler.plan(waiting, now, wait, times, more.get("limits", {}))


def test_a_lone_request_waits_for_others_and_no_longer() -> None:
    assert plan(Entry(prepared(), ready_at=5.0), now=5.5) == Plan(1, 6.0)
    assert plan(Entry(prepared(), ready_at=5.0), now=7.0) == Plan(1, 7.0)


def test_joined_ones_start_when_the_first_has_waited() -> None:
    two = [Entry(prepared(), ready_at=5.0), Entry(prepared(2), ready_at=5.9)]
    assert plan(*two, now=5.9) == Plan(2, 6.0)


def test_a_full_batch_starts_at_once() -> None:
    assert plan(Entry(prepared(4))) == Plan(1, 0.0)
    assert plan(Entry(prepared(3)), Entry(prepared(1)), Entry(prepared(1))) == Plan(2, 0.0)


@pytest.mark.parametrize(
    "next_one", [prepared(key=OTHER), prepared(3), prepared(joinable=False), prepared(meta=(0,))]
)
def test_one_that_does_not_fit_begins_the_next_batch_and_nobody_overtakes_it(
    next_one: Prepared,
) -> None:
    waiting = [Entry(prepared(2)), Entry(next_one), Entry(prepared())]
    assert plan(*waiting) == Plan(1, 0.0)


def test_one_that_refuses_to_join_is_not_kept_waiting() -> None:
    assert plan(Entry(prepared(joinable=False))) == Plan(1, 0.0)


def test_a_learnt_limit_counts_as_the_most_rows() -> None:
    waiting = [Entry(prepared()), Entry(prepared()), Entry(prepared())]
    assert plan(*waiting, limits={(KEY, True): 2}) == Plan(2, 0.0)
    assert plan(*waiting, limits={(KEY, False): 2}) == Plan(3, 1.0)


def known(*runs: tuple[int, float]) -> RunTimes:
    """Return times after which batches are expected to need these seconds, margins included."""
    times = RunTimes()
    for rows, seconds in runs:
        times.add(KEY, rows, (seconds - MARGIN_S) / SLOWER)
    return times


def test_a_batch_starts_in_time_for_the_earliest_deadline() -> None:
    times = known((1, 0.25), (2, 0.5))
    assert plan(Entry(prepared(), deadline=0.75), times=times) == Plan(1, pytest.approx(0.5))
    assert plan(Entry(prepared(), deadline=9.0), times=times) == Plan(1, 1.0)
    two = [Entry(prepared(), deadline=9.0), Entry(prepared(), deadline=1.25)]
    assert plan(*two, times=times) == Plan(2, pytest.approx(0.75))
    assert plan(Entry(prepared(), deadline=0.1), now=0.05, times=times) == Plan(1, 0.05)


def test_with_a_deadline_and_no_idea_of_the_time_it_takes_nothing_is_waited_for() -> None:
    assert plan(Entry(prepared(), deadline=100.0)) == Plan(1, 0.0)


def test_nobody_joins_whose_rows_would_make_another_late() -> None:
    times = known((1, 0.25), (2, 0.5))
    two = [Entry(prepared(), deadline=0.4), Entry(prepared())]
    assert plan(*two, times=times) == Plan(1, 0.0)
    late_anyway = [Entry(prepared(), deadline=0.2), Entry(prepared())]
    assert plan(*late_anyway, times=times) == Plan(2, 0.0)
    own = [Entry(prepared()), Entry(prepared(), deadline=0.4)]  # alone it would be later still
    assert plan(*own, times=times) == Plan(2, 0.0)


def test_with_static_shapes_the_bucket_is_what_takes_time() -> None:
    entries = [Entry(prepared(), deadline=0.9) for _ in range(3)]
    times = known((4, 0.5))
    assert plan(*entries, times=times, static=True) == Plan(3, pytest.approx(0.4))


def test_run_times_follow_what_happens_and_forget_old_keys() -> None:
    times = RunTimes()
    times.add(KEY, 2, 30.0)  # built its graphs
    times.add(KEY, 2, 1.0)
    assert times.expected(KEY, 2) == 1.0
    times.add(KEY, 2, 2.0)
    assert times.expected(KEY, 2) == pytest.approx(1.0 + EWMA_WEIGHT)
    assert times.expected(KEY, 1) == pytest.approx(1.2)
    assert times.expected(KEY, 6) == pytest.approx(3.6)
    for steps in range(10, 10 + KEYS_KEPT):
        times.add(Key(num_steps=steps), 1, 0.1)
    assert times.expected(KEY, 2) is None
    assert len(times._of) == KEYS_KEPT == len(times._first)


# ---------------------------------------------------------------- deadlines


def test_the_deadline_is_the_least_of_the_rows_and_not_the_adapters_business() -> None:
    rows = [Observation(options={"deadline": 2, "seed": 1}), Observation(options={"deadline": 0.5})]
    assert deadline_s(rows) == 0.5
    assert deadline_s(rows[0]) == 2.0
    assert deadline_s(torch.zeros(1)) is deadline_s(Observation()) is None
    assert [row.options for row in without_deadline(rows)] == [{"seed": 1}, {}]
    assert without_deadline(rows[0]).options == {"seed": 1}
    assert without_deadline(one := Observation()) is one
    assert without_deadline(request := object()) is request
    assert [row.options["deadline"] for row in with_deadline(rows, 9.0)] == [0.5, 0.5]
    assert with_deadline(rows[0], 1.0).options == {"deadline": 1.0, "seed": 1}
    assert with_deadline(request, 1.0) is request


@pytest.mark.parametrize("value", ["soon", float("nan"), float("inf"), True, [1.0], 10**400])
def test_a_deadline_is_a_number(value: Any) -> None:
    with pytest.raises(RequestError, match="'deadline' must be a number of seconds from now"):
        deadline_s(Observation(options={"deadline": value}))
