"""Calls of ranks that a launcher runs: each gets the outcome of rank 0's own, whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pluggy import PluginManager

from phyai.deployment.inline import Inline
from phyai.engine_config import ParallelConfig
from phyai.errors import (
    ActionRejected,
    EngineUnavailableError,
    PluginError,
    WeightUpdateError,
)
from phyai.hooks import hookimpl
from phyai.plugins import add_hooks, create_manager
from phyai.request_job import Job
from tests.core.rank_adapter import ask, installed, number
from tests.core.rank_engines import all_step, ranks
from tests.core.thread_ranks import on_all

SHORT = ParallelConfig(tp_size=2, timeout_s=0.4)


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with installed(tmp_path_factory.mktemp("calls")) as cls:
        yield cls


def both_work(engines: list[Inline]) -> None:
    assert [number(one) for one in all_step(engines, ask("add", 1.0))] == [3.0, 3.0]


def hold_back(engine: Inline, until: threading.Event) -> None:
    """Have what was submitted begin late; step, on its caller's thread, begins at once."""
    core: Any = engine.core
    step = core.step

    def late(*args: Any, **how: Any) -> Any:
        if threading.current_thread().name == "phyai-engine":
            assert until.wait(30)
        return step(*args, **how)

    core.step = late


# ---------------------------------------------------------------- whose outcome it is


def test_a_call_gets_its_own_outcome_also_when_a_later_one_runs_first(args: Any) -> None:
    with ranks(args()) as engines:
        stepped = threading.Event()
        hold_back(engines[0], stepped)

        def program(rank: int) -> list[float]:
            engine, mine = engines[rank], float(1 - rank)  # rank 0's numbers count
            future = engine.submit(ask("add", 2.0 * mine))
            time.sleep(0.1 * rank)  # its thread waits for an outcome before this one does
            found = number(engine.step(ask("add", 5.0 * mine)))
            if rank == 0:
                stepped.set()
            version = engine.update_weights({"scale": torch.ones(1)}.items())
            return [found, number(future.result(30)), version]

        assert on_all(2, program) == [[15.0, 6.0, 1]] * 2


def test_calls_of_several_kinds_stay_together(args: Any) -> None:
    with ranks(args()) as engines:

        def program(rank: int) -> list[list[float]]:
            engine, found = engines[rank], []
            for turn in range(1, 11):
                first = engine.submit(ask("add", float(turn)))
                second = engine.submit(ask("bad" if turn % 3 == 0 else "add", 2.0))
                stepped = number(engine.step(ask("add", 100.0 + turn)))
                error = isinstance(second.exception(30), Exception)
                scale = {"scale": torch.ones(1)}
                found.append([stepped, number(first.result(30)), error])
                engine.update_weights(scale.items())
            return found

        wanted = [[3.0 * (100 + n), 3.0 * n, n % 3 == 0] for n in range(1, 11)]
        assert on_all(2, program) == [wanted, wanted]


def test_a_request_cancelled_in_rank_0s_queue_is_cancelled_on_all(args: Any) -> None:
    with ranks(args()) as engines:
        cancelled = threading.Event()
        hold_back(engines[0], cancelled)

        def program(rank: int) -> list[Any]:
            first, second, third = (engines[rank].submit(ask("add", n)) for n in (1.0, 2.0, 3.0))
            said = second.cancel()
            if rank == 0:
                cancelled.set()
            with pytest.raises(CancelledError):
                second.result(30)
            return [number(first.result(30)), said, second.cancelled(), number(third.result(30))]

        lead, other = on_all(2, program)
        assert lead == [3.0, True, True, 9.0]
        assert other == [3.0, False, True, 9.0]  # only rank 0 can take a request back
        assert engines[0].stats()[0]["in_flight"] == 0
        both_work(engines)


def two_of(engine: Inline, lead: bool) -> tuple[Future[Any], Future[Any]]:
    """Submit two requests; on rank 0 the first one has been taken up then, the other waits."""
    first, second = (engine.submit(ask("add", n)) for n in (1.0, 2.0))
    while lead and (not engine._loop._threads or len(engine._loop._queue) > 1):
        time.sleep(0.001)
    return first, second


def test_what_waits_when_rank_0_closes_fails_on_all(args: Any) -> None:
    with ranks(args()) as engines:
        closing = threading.Event()
        hold_back(engines[0], closing)

        def program(rank: int) -> list[Any]:
            first, second = two_of(engines[rank], lead=rank == 0)
            if rank == 0:
                closer = threading.Thread(target=engines[0].close)
                closer.start()
                while not second.done():
                    time.sleep(0.001)
                closing.set()
                closer.join()
            return [number(first.result(30)), second.exception(30)]

        for value, error in on_all(2, program):
            assert value == 3.0
            assert isinstance(error, EngineUnavailableError)
            assert error.reason == "closed"


@pytest.mark.parametrize("all_close", [False, True])
def test_a_rank_that_follows_waits_for_its_outcomes_when_it_closes(
    args: Any, all_close: bool
) -> None:
    with ranks(args()) as engines:
        closing = threading.Event()
        hold_back(engines[0], closing)

        def program(rank: int) -> list[Any]:
            first, second = two_of(engines[rank], lead=rank == 0)
            if rank == 0:
                threading.Timer(0.1, closing.set).start()
            if rank or all_close:
                engines[rank].close()
            return [number(first.result(30)), second.exception(30) or number(second.result())]

        for value, other in on_all(2, program):
            assert value == 3.0
            if all_close:
                assert isinstance(other, EngineUnavailableError)
                assert other.reason == "closed"
            else:
                assert other == 6.0
        assert [engine.core.ranks.broken for engine in engines if engine.core.ranks] == [None] * 2


@pytest.mark.parametrize(("do", "code"), [("quit", 3), ("quit early", 4)])
def test_code_that_would_end_the_process_is_an_error_on_every_rank(
    args: Any, do: str, code: int
) -> None:
    with ranks(args()) as engines:
        for error in all_step(engines, ask(do, 1.0)):
            assert isinstance(error, PluginError)
            assert f"SystemExit({code})" in str(error)
        both_work(engines)


def test_an_update_that_would_end_the_process_is_an_error_on_every_rank(args: Any) -> None:
    with ranks(args()) as engines:
        items = {"scale": torch.tensor([16.0])}
        for error in on_all(2, lambda rank: engines[rank].update_weights(items.items())):
            assert isinstance(error, WeightUpdateError)
            assert "got SystemExit: 16" in str(error)
            assert error.__cause__ is not None  # some weights may be new already
        both_work(engines)


# ---------------------------------------------------------------- out of step


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_message_that_breaks_off_ends_the_replica(
    args: Any, rank: int, kind: type[BaseException]
) -> None:
    with ranks(args(), SHORT) as engines:
        control: Any = engines[rank].core.services.parallel.control
        broadcast, calls = control.broadcast, []

        def breaks(*args: Any, **how: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise kind("in the middle of it")
            return broadcast(*args, **how)

        control.broadcast = breaks
        errors = all_step(engines, torch.zeros(4096, 1))  # more than a first frame holds
        assert isinstance(errors[rank], kind)
        control.broadcast = broadcast
        for error in all_step(engines, ask("add", 1.0)):
            assert isinstance(error, EngineUnavailableError)
            assert error.reason == "poisoned"


def test_nothing_is_announced_while_rank_0_closes(args: Any) -> None:
    with ranks(args()) as engines:
        core: Any = engines[0].core
        job = Job(core, ask("add", 1.0))
        job.prepare()
        closing, close = threading.Event(), core.ranks.close

        def slowly() -> None:
            closing.set()
            time.sleep(0.2)
            close()

        core.ranks.close = slowly

        def program(rank: int) -> Any:
            if rank:
                return engines[1].step(None)
            closer = threading.Thread(target=core.close)
            closer.start()
            assert closing.wait(30)
            try:
                return core.run([job])
            finally:
                closer.join()

        for error in on_all(2, program):
            assert isinstance(error, EngineUnavailableError)
            assert error.reason == "closed"


# ---------------------------------------------------------------- validators


def guard(blocks: dict[int, float], asked: list[int]) -> PluginManager:
    """Return hooks that block an action on one rank alone, as a clock or a counter might."""

    @hookimpl
    def phyai_validate_action(chunk: Any, adapter: Any) -> str | None:
        asked.append(adapter.rank)
        return "too much" if chunk.actions[0, 0] == blocks.get(adapter.rank) else None

    manager = create_manager()
    add_hooks(manager, SimpleNamespace(phyai_validate_action=phyai_validate_action), "guard")
    return manager


@pytest.mark.parametrize("output_rank", [0, 1])
def test_validators_of_the_output_rank_decide_for_all(args: Any, output_rank: int) -> None:
    asked: list[int] = []
    hooks = guard({output_rank: 6.0, 1 - output_rank: 3.0}, asked)
    with ranks(args(), output_rank=output_rank, hooks=hooks) as engines:
        both_work(engines)
        for error in all_step(engines, ask("add", 2.0)):
            assert isinstance(error, ActionRejected)
            assert "'guard' blocked the chunk: too much" in str(error)
        both_work(engines)
        assert set(asked) == {output_rank}


def test_of_a_joined_batch_only_the_blocked_request_fails_on_all(args: Any) -> None:
    with ranks(args(), hooks=guard({0: 6.0}, []), batch_wait_ms=2000.0) as engines:

        def program(rank: int) -> list[Any]:
            futures = [engines[rank].submit(ask("add", n)) for n in (1.0, 2.0, 3.0, 4.0)]
            errors = [future.exception(30) for future in futures]
            return [
                type(e) if e else number(f.result()) for e, f in zip(errors, futures, strict=True)
            ]

        assert on_all(2, program) == [[3.0, ActionRejected, 9.0, 12.0]] * 2
        assert engines[0].core.batches.as_dict()["rows"] == {4: 1}


def test_a_blocked_chunk_of_a_run_that_nobody_asked_for_breaks_nothing(args: Any) -> None:
    with ranks(args(), hooks=guard({0: 6.0}, [])) as engines:
        lead: Any = engines[0].core
        other: Any = engines[1].core
        prepared = lead.prepare(ask("add", 2.0))
        error, nothing = on_all(
            2, lambda rank: other.ranks._obey(False) if rank else lead.run_prepared(prepared)
        )
        assert isinstance(error, ActionRejected)
        assert nothing is None
        both_work(engines)
