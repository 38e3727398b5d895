"""Guided requests over cfg and tp ranks, and leaving them: all ranks stop after the same step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phyai.errors import EngineUnavailableError
from phyai.parallel import Mesh
from phyai.ranks import together
from phyai.request_watch import Watch
from tests.core.guided_adapter import ACTIONS, HORIZON, GuidedAdapter
from tests.core.guided_ranks import all_submit, evaluations, guided_ranks
from tests.core.process_ranks import on_processes
from tests.core.rank_engines import all_step
from tests.core.test_guidance import UNITS, close, request, same
from tests.core.thread_ranks import on_all
from tests.core.toy_adapter import open_engine, registry


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


def one_rank(unit: str, *requests: Any) -> list[Any]:
    with open_engine(GuidedAdapter, unit=unit) as engine:
        return [engine.step(one) for one in requests]


def traffic(engine: Any) -> dict[str, tuple[int, int]]:
    groups = engine.core.services.parallel
    return {
        g.axis: (g.traffic.collectives, g.traffic.payload_bytes) for g in (groups.tp, groups.cfg)
    }


def stop_at(step: int) -> Any:
    """Cancel the first request once it hears of that step."""

    def stop(futures: list[Any], done: int) -> None:
        if done == step:
            assert futures[0].cancel()

    return stop


# ---------------------------------------------------------------- guided requests


@UNITS
def test_guided_requests_over_cfg_and_tp_ranks_give_one_ranks_bits(unit: str) -> None:
    asked = [
        request(2, known=True),
        request(1, interval=(0.2, 0.8)),
        request(3, guided=False),
        request(2, rtc=True),
    ]
    want = one_rank(unit, *asked)
    with guided_ranks(unit=unit) as engines:
        for _ in ("first", "again"):
            for one, expected in zip(asked, want, strict=True):
                for got in all_step(engines, one):
                    same(got, expected)
        cores = [engine.core for engine in engines]
        encoded = [{e[1] for e in core.args.log if e[0] == "encode"} for core in cores]  # type: ignore[attr-defined]
        assert encoded == [{"cond"}, {"cond"}, {"cond", "uncond"}, {"cond", "uncond"}]


def test_each_rank_evaluates_one_branch_and_exchanges_once_per_step() -> None:
    with guided_ranks(unit="step") as engines:
        all_step(engines, request(2))
        assert evaluations(engines) == [4] * 4
        leaves = HORIZON * ACTIONS + 1
        prompts = [4 * 2 * n * 3 for n in (5, 5, 2, 2)]  # what encode adds up over tp
        for engine, prompt in zip(engines, prompts, strict=True):
            assert traffic(engine) == {
                "tp": (1 + 4, prompt + 4 * (4 * 2 * HORIZON * ACTIONS)),
                "cfg": (4, 4 * (4 * 2 * leaves)),
            }


# ---------------------------------------------------------------- leaving


def test_a_request_is_cancelled_on_all_ranks_after_the_same_step() -> None:
    (want,) = one_rank("step", request(2))
    with guided_ranks(unit="step") as engines:
        outcomes = all_submit(engines, [request(2)], stop_at(2))
        assert [type(one) for (one,) in outcomes] == [CancelledError] * 4
        assert evaluations(engines) == [2] * 4
        assert [traffic(engine)["cfg"][0] for engine in engines] == [2] * 4
        for got in all_step(engines, request(2)):
            same(got, want)
        assert [len(engine.core.runner._bound) for engine in engines] == [1] * 4
        assert [engine.stats()[0]["failed"] for engine in engines] == [0] * 4


@pytest.mark.parametrize("step", [1, 4])
def test_it_may_leave_after_the_first_step_and_after_the_last(step: int) -> None:
    with guided_ranks(Mesh(cfg=2), unit="step") as engines:
        outcomes = all_submit(engines, [request(1)], stop_at(step))
        assert [type(one) for (one,) in outcomes] == [CancelledError] * 2
        assert evaluations(engines) == [step] * 2
        (want,) = one_rank("step", request(1))
        for got in all_step(engines, request(1)):
            same(got, want)


def test_it_may_leave_before_its_first_step() -> None:
    watches: list[Watch] = []

    class Stopped(GuidedAdapter):
        name = "guided-stopped"

        def prepare(self, wanted: Any) -> Any:
            watches[-1].stop()
            return super().prepare(wanted)

    with guided_ranks(Mesh(cfg=2), Stopped, unit="step") as engines:
        cores = [engine.core for engine in engines]
        watches.append(cores[0].watch())
        errors = on_all(2, lambda rank: cores[rank].step(request(1), watch=watches[0]))
        assert [type(error) for error in errors] == [CancelledError] * 2
        assert evaluations(engines) == [0, 0]
        watches.append(Watch())  # which cannot be stopped
        one, two = on_all(2, lambda rank: cores[rank].step(request(1), watch=watches[1]))
        same(one, two)


def test_one_request_of_a_batch_leaves_on_all_ranks_and_the_others_stay() -> None:
    asked = [request(1), request(3)]  # which fill a batch
    want = one_rank("step", *asked)
    with guided_ranks(unit="step", runtime={"batch_wait_ms": 10_000.0}) as engines:
        outcomes = all_submit(engines, asked, stop_at(2))
        for left, kept in outcomes:
            assert isinstance(left, CancelledError)
            close(kept, want[1])
        assert evaluations(engines) == [4] * 4
        assert [engine.core.batches.as_dict()["rows"] for engine in engines] == [{4: 1}] * 4
        for outcome in all_submit(engines, asked):
            for got, expected in zip(outcome, want, strict=True):
                close(got, expected)


def test_only_rank_0_can_cancel_and_in_unit_loop_nobody() -> None:
    with guided_ranks(Mesh(cfg=2), unit="step") as engines:
        assert [engine.core.watch().stoppable for engine in engines] == [True, False]
    heard: list[int] = []

    def refused(futures: list[Any], done: int) -> None:
        heard.append(done)
        assert not futures[0].cancel()

    with guided_ranks(Mesh(cfg=2), unit="loop") as engines:
        ((one,), (two,)) = all_submit(engines, [request(1)], refused)
        same(one, two)
    assert heard == [4]


def test_what_can_be_stopped_costs_nothing_on_tp_and_cfg() -> None:
    with guided_ranks(unit="step") as engines:
        all_step(engines, request(2))
        once = [traffic(engine) for engine in engines]
        control = engines[0].core.services.parallel.control.traffic
        before = control.collectives
        all_submit(engines, [request(2)])
        for engine, (tp, cfg) in zip(engines, (each.values() for each in once), strict=True):
            assert list(traffic(engine).values()) == [(2 * n, 2 * size) for n, size in (tp, cfg)]
        # The batch, how loading went, before the first step, four steps, the seal, the outcome.
        assert control.collectives - before == 1 + 1 + 1 + 4 + 1 + 1


# ---------------------------------------------------------------- a rank that fails alone


def test_ranks_that_may_stop_hear_at_once_of_one_that_failed_alone() -> None:
    with guided_ranks(Mesh(tp=2), unit="step", fail_at=(1, 3)) as engines:
        plain = request(1, guided=False)
        for (error,) in all_submit(engines, [plain]):
            assert isinstance(error, EngineUnavailableError)
            assert error.reason == "poisoned"
            assert "rank 0: no error; rank 1: ValueError: rank 1 cannot" in str(error)
        assert evaluations(engines) == [3, 2]  # the one that raised is not counted
        for error in all_step(engines, plain):
            assert isinstance(error, EngineUnavailableError)


@pytest.mark.parametrize(("kind", "lives"), [(MemoryError, True), (ValueError, False)])
def test_what_all_tend_to_run_into_they_may_run_into_one_after_the_other(
    kind: type[Exception], lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "FAILED_WAIT_S", 0.05)

    class Late(GuidedAdapter):
        name = "guided-late"
        fails = False

        def start(self, cache: Any) -> Any:
            if self.fails:
                time.sleep(0.3 * self.services.parallel.rank)  # it compiles, say
                raise kind("no memory")
            return super().start(cache)

    with guided_ranks(Mesh(tp=2), Late) as engines:
        all_step(engines, request(1))
        adapters: list[Any] = [engine.core.adapter for engine in engines]
        for adapter in adapters:
            adapter.fails = True
        lead, _ = all_step(engines, request(1))
        assert isinstance(lead, kind) == lives, repr(lead)
        for adapter in adapters:
            adapter.fails = False
        if lives:
            one, two = all_step(engines, request(1))
            same(one, two)


# ---------------------------------------------------------------- processes, gloo


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2), (1, 2)], ids=["cfg 2 x tp 2", "tp 2"])
def test_ranks_that_are_processes_stop_and_fail_alike(
    mesh: tuple[int, int], tmp_path: Path
) -> None:
    whole = request(2)
    (want,) = one_rank("step", whole)
    found = on_processes("tests.core.guided_ranks:over_gloo", mesh, tmp_path, whole)
    for rank in found:
        for name in ("want", "again"):
            for leaf, tensor in want.items():
                assert np.array_equal(rank[name][leaf], tensor.numpy()), (name, leaf)
        assert rank["refused"] == "RequestError: words must be known; got [99]. Use others."
        assert rank["stopped"].startswith("CancelledError")
        if mesh == (1, 2):
            assert "rank 1: ValueError: rank 1 cannot" in rank["alone"]
        else:
            assert np.array_equal(rank["alone"]["action"], want["action"].numpy())
