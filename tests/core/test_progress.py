"""Progress of a request, and cancelling one between two of its steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
import torch

from phyai import DeploymentConfig, Engine, EngineArgs, plugins
from phyai.cli.run import stepwise
from phyai.errors import EngineUnavailableError
from phyai.request_watch import RequestFuture, Stops, Watch
from tests.core.guided_adapter import GuidedAdapter, prepared
from tests.core.test_guidance import UNITS, request, same
from tests.core.toy_adapter import open_engine, registry

JOINING = pytest.mark.parametrize("wait_ms", [0.0, 1.0])


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


class Held:
    """An ``on_progress`` that stops the request's thread after a step until it is let go on."""

    def __init__(self, at: int) -> None:
        self.at, self.heard = at, list[tuple[int, int]]()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self.heard.append((done, total))
        if done == self.at:
            self.reached.set()
            assert self.go_on.wait(30)


# ---------------------------------------------------------------- progress


@UNITS
@JOINING
def test_progress_is_told_per_step_or_at_the_end(unit: str, wait_ms: float) -> None:
    heard: list[tuple[int, int]] = []
    with open_engine(GuidedAdapter, unit=unit, runtime={"batch_wait_ms": wait_ms}) as engine:
        want = engine.step(request(2))
        future = engine.submit(request(2), lambda *told: heard.append(told))
        same(future.result(30), want)
        same(engine.submit(request(2)).result(30), want)
    assert heard == ([(n, 4) for n in (1, 2, 3, 4)] if unit == "step" else [(4, 4)])


@pytest.mark.parametrize("raised", [RuntimeError("no screen"), SystemExit(3)], ids=repr)
def test_a_listener_that_raises_is_logged_once_and_changes_nothing(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(done: int, total: int) -> None:
        raise raised

    with open_engine(GuidedAdapter, unit="step") as engine:
        same(engine.submit(request(1), fails).result(30), engine.step(request(1)))
    assert sum("on_progress" in r.getMessage() for r in caplog.records) == 1


def test_a_listener_that_cannot_be_called_is_refused_in_every_mode() -> None:
    inline = open_engine(GuidedAdapter, unit="step")
    pool = DeploymentConfig.local(devices=("cpu",), auto_start=False)  # of an installed plugin
    installed = EngineArgs("pi05", plugins.find("pi05").load_args()(), inline.config)
    for engine in (inline, Engine(installed, deployment=pool)):
        with pytest.raises(TypeError, match=r"on_progress must be callable.*got int\."):
            engine.submit(request(1), 5)  # type: ignore[arg-type]
        engine.close()


@UNITS
@JOINING
def test_a_listener_that_would_wait_for_its_own_request_is_refused(
    unit: str, wait_ms: float
) -> None:
    refused: list[EngineUnavailableError] = []
    later: list[Future[Any]] = []
    with open_engine(GuidedAdapter, unit=unit, runtime={"batch_wait_ms": wait_ms}) as engine:

        def calls(done: int, total: int) -> None:
            later.append(engine.submit(request(1)))
            for call in (
                lambda: engine.step(request(1)),
                lambda: engine.update_weights_all({}),
                engine.close,
            ):
                with pytest.raises(EngineUnavailableError, match="Use another thread") as caught:
                    call()
                refused.append(caught.value)

        first = engine.submit(request(1), calls).result(30)
        same(engine.step(request(1)), first)  # it is open
        for future in later:
            same(future.result(30), first)
        engine.reset_session("robot")
    assert len(refused) == 3 * len(later) > 0
    assert {error.reason for error in refused} == {"wrong_mode"}


# ---------------------------------------------------------------- cancelling


@JOINING
def test_a_running_request_is_cancelled_between_steps(wait_ms: float) -> None:
    with open_engine(GuidedAdapter, unit="step", runtime={"batch_wait_ms": wait_ms}) as engine:
        want, counters = engine.step(request(2)), engine.core.services.profile.counters
        before, held = counters["evaluations.cond"], Held(2)
        future = engine.submit(request(2), held)
        assert held.reached.wait(30)
        assert future.running()
        assert future.cancel()
        assert future.cancel()  # again is fine
        held.go_on.set()
        with pytest.raises(CancelledError):
            future.result(30)
        with pytest.raises(CancelledError):
            future.exception(30)
        assert future.cancelled()
        assert counters["evaluations.cond"] == before + 2
        # The engine is as it was: the same cache, the same numbers, nothing counted as failed.
        same(engine.step(request(2)), want)
        assert len(engine.core.runner._bound) == 1
        (replica,) = engine.stats()["replicas"]
        assert (replica["in_flight"], replica["done"], replica["failed"]) == (0, 2, 0)


def test_who_cancels_in_its_listener_stops_there() -> None:
    futures: list[Future[Any]] = []
    heard: list[int] = []

    def stop(done: int, total: int) -> None:
        heard.append(done)
        while not futures:
            threading.Event().wait(0.001)
        assert futures[0].cancel()

    with open_engine(GuidedAdapter, unit="step") as engine:
        futures.append(engine.submit(request(1), stop))
        with pytest.raises(CancelledError):
            futures[0].result(30)
        assert heard == [1]


def test_a_request_that_waits_is_cancelled_at_once_and_one_in_a_loop_never() -> None:
    with open_engine(GuidedAdapter, unit="step") as engine:
        held = Held(1)
        first, second = engine.submit(request(1), held), engine.submit(request(1))
        assert held.reached.wait(30)
        assert second.cancel()
        assert second.cancelled()
        held.go_on.set()
        first.result(30)
    entered, leave = threading.Event(), threading.Event()

    class Slow(GuidedAdapter):
        name = "guided-slow"

        def start(self, cache: Any) -> Any:
            entered.set()
            assert leave.wait(30)
            return super().start(cache)

    with open_engine(Slow, unit="loop") as engine:
        future = engine.submit(request(1))
        assert entered.wait(30)
        assert not future.cancel()
        leave.set()
        future.result(30)
        assert not future.cancelled()


def test_a_request_is_stopped_before_its_first_step_too() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(GuidedAdapter):
        name = "guided-slow"

        def prepare(self, wanted: Any) -> Any:
            entered.set()
            assert leave.wait(30)
            return super().prepare(wanted)

    with open_engine(Slow, unit="step") as engine:
        future = engine.submit(request(1))
        assert entered.wait(30)
        assert future.cancel()
        leave.set()
        with pytest.raises(CancelledError):
            future.result(30)
        assert engine.core.services.profile.counters["evaluations.cond"] == 0
        engine.step(request(1))


def test_one_request_of_a_batch_leaves_and_the_others_stay() -> None:
    with open_engine(GuidedAdapter, unit="step") as engine:
        runner = engine.core.runner
        batches = [prepared(request(1)), prepared(request(2))]
        want = runner.run_joined(batches)
        watches = [Watch(stoppable=True), Watch(lambda *_: watches[0].stop(), stoppable=True)]
        left, kept = runner.run_joined(batches, Stops(watches))
        assert isinstance(left.error, CancelledError)
        same(kept, want[1])
        assert not watches[1].stop()  # it has its result
        for watch in (stopping := [Watch(stoppable=True), Watch(stoppable=True)]):
            watch.stop()
        with pytest.raises(CancelledError):
            runner.run_joined(batches, Stops(stopping))


def test_a_result_that_came_with_the_wish_to_stop_is_dropped() -> None:
    watch = Watch(stoppable=True)
    future = RequestFuture(watch)
    assert future.set_running_or_notify_cancel()
    assert future.cancel()
    future.set_result(torch.zeros(1))
    assert future.cancelled()
    late = RequestFuture(Watch(stoppable=True))
    late.set_running_or_notify_cancel()
    assert not late.watch.seal()
    assert not late.cancel()
    late.set_result(3)
    assert (late.result(), late.cancelled()) == (3, False)


def test_a_failure_after_the_wish_to_stop_is_a_cancellation() -> None:
    future = RequestFuture(Watch(stoppable=True))
    future.set_running_or_notify_cancel()
    future.cancel()
    future.set_exception(RuntimeError("too late to matter"))
    assert future.cancelled()


def test_asyncio_sees_the_cancellation() -> None:
    async def run(engine: Any) -> None:
        held = Held(1)
        wrapped = asyncio.wrap_future(engine.submit(request(1), held))
        while not held.reached.is_set():
            await asyncio.sleep(0.001)
        wrapped.cancel()
        await asyncio.sleep(0)
        held.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await wrapped

    with open_engine(GuidedAdapter, unit="step") as engine:
        asyncio.run(run(engine))
        engine.step(request(1))


def test_a_batch_stops_when_all_of_it_was_stopped() -> None:
    heard: list[tuple[int, int]] = []
    watches = [Watch(lambda *t: heard.append(t), stoppable=True), Watch(stoppable=True)]
    stops = Stops(watches)
    stops.told(1, 2)
    watches[0].stop()
    stops.told(1, 2)  # told once for each step
    watches[1].stop()
    with pytest.raises(CancelledError):
        stops.told(2, 2)
    assert heard == [(1, 2), (2, 2)]


def test_the_cli_shows_the_steps() -> None:
    shown: list[tuple[int, int, str]] = []

    def progress(*told: Any) -> None:
        shown.append(told)

    for unit, names in (("loop", []), ("step", [f"running: step {n} of 4" for n in range(1, 5)])):
        shown.clear()
        with open_engine(GuidedAdapter, unit=unit) as engine:
            same(stepwise(engine, request(1), progress), engine.step(request(1)))  # type: ignore[arg-type]
        assert [name for *_, name in shown] == names
