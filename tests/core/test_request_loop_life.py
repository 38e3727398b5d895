"""RequestLoop with joining: sessions, deadlines, cancelling, and how its threads end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
import torch

from phyai.errors import ActionRejected, EngineUnavailableError, RequestError, SessionClosed
from phyai.request_loop import RequestLoop
from tests.core.gated_loop import (
    FOREVER_MS,
    WAIT_S,
    Held,
    batches,
    loop_of,
    observation,
    result,
    until,
)
from tests.core.session_adapter import MoveRequest, Odometer, frame, way
from tests.core.toy_adapter import open_engine, registry


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PHYAI_DEVICE", raising=False)
    with registry():
        yield


# ---------------------------------------------------------------- sessions


def test_requests_of_a_session_follow_each_other_and_others_join() -> None:
    with open_engine(Odometer, runtime={"batch_wait_ms": FOREVER_MS}) as engine:
        futures = {
            (name, seq): engine.submit(frame(name, seq, move=move))
            for seq in range(3)
            for name, move in (("a", 1.0), ("b", 2.0), ("c", 4.0))
        }
        last = engine.submit([frame(None, None)] * 4)  # nothing joins the last three any more
        for (name, seq), future in futures.items():
            assert way(result(future)) == {"a": 1.0, "b": 2.0, "c": 4.0}[name] * (seq + 1)
        result(last)
        assert batches(engine)["rows"] == {3: 3, 4: 1}
        assert way(engine.submit(frame("a", 2)).result(WAIT_S)) == 3.0  # kept: nothing ran
        assert batches(engine)["count"] == 4


def test_the_session_of_a_model_request_is_told_by_prepare_and_holds_up_the_next() -> None:
    with open_engine(Odometer, runtime={"batch_wait_ms": FOREVER_MS}) as engine:
        moves = torch.tensor([[1.0, 10.0]])
        futures = [engine.submit(MoveRequest(moves, ("a",), (seq,))) for seq in range(3)]
        engine.submit(frame(None, None))  # of another kind
        assert [way(result(future)) for future in futures] == [1.0, 2.0, 3.0]


def test_a_failed_request_of_a_batch_leaves_its_session_alone() -> None:
    class Limited(Odometer):
        name = "odometer-limited"

        def denoiser(self) -> Any:
            inner = super().denoiser()

            class Breaks:
                prediction = inner.prediction

                def __call__(self, x: Any, step: Any, cache: Any) -> Any:
                    out = inner(x, step, cache)
                    return {
                        n: torch.where(t[..., :1] > 50, float("nan"), t) for n, t in out.items()
                    }

            return Breaks()

    with open_engine(Limited, runtime={"batch_wait_ms": FOREVER_MS}, max_batch_size=2) as engine:
        both = [engine.submit(frame(name, 0)) for name in "ab"]
        assert [way(result(future)) for future in both] == [1.0, 1.0]
        bad, good = engine.submit(frame("a", 1, move=99.0)), engine.submit(frame("b", 1))
        assert isinstance(bad.exception(WAIT_S), ActionRejected)
        assert way(result(good)) == 2.0
        again, then = engine.submit(frame("a", 1)), engine.submit(frame("b", 2))
        assert (way(result(again)), way(result(then))) == (2.0, 3.0)


def test_a_session_closed_while_it_waits_fails_its_request_alone() -> None:
    with open_engine(Odometer, runtime={"batch_wait_ms": FOREVER_MS}, max_batch_size=2) as engine:
        [result(future) for future in [engine.submit(frame(name, 0)) for name in "ab"]]
        one = engine.submit(frame("a", 1))
        until(lambda: len(loop_of(engine)._ready) == 1)
        engine.close_session("a")
        two = engine.submit(frame("b", 1))
        assert way(result(two)) == 2.0
        assert isinstance(one.exception(WAIT_S), SessionClosed)


# ---------------------------------------------------------------- deadlines, cancelling, life


def test_a_deadline_ends_the_wait() -> None:
    with open_engine(runtime={"batch_wait_ms": FOREVER_MS}) as engine:
        first = engine.submit(observation(deadline=1e6))  # how long it takes is not known yet
        assert result(first).horizon == 3
        early = [engine.submit(observation(deadline=left)) for left in (-1.0, 0.0, 0.05)]
        assert [result(future).horizon for future in early] == [3] * 3
        with pytest.raises(RequestError, match="deadline"):
            engine.step(observation(deadline=float("nan")))


def test_a_request_can_be_cancelled_until_its_batch_runs() -> None:
    with Held() as held:
        futures = [held.engine.submit(observation(float(i))) for i in range(5)]
        until(lambda: len(loop_of(held.engine)._ready) == 4)
        assert futures[0].cancel()
        assert futures[4].cancel()
        assert not held.first.cancel()
        behind = held.engine.submit([observation()] * 4)
    assert [result(future).info["batch_rows"] for future in futures[1:4]] == [3] * 3
    assert len(result(behind)) == 4
    for number in (0, 4):
        with pytest.raises(CancelledError):
            futures[number].result()
    (replica,) = held.engine.stats()["replicas"]
    assert (replica["done"], replica["failed"], replica["in_flight"]) == (5, 0, 0)
    held.engine.close()


def test_close_fails_what_waits_and_lets_the_running_batch_finish() -> None:
    with Held() as held:
        waiting = [held.engine.submit(observation()) for _ in range(9)]
        closing = threading.Thread(target=held.engine.close)
        closing.start()
        for future in waiting:
            error = future.exception(WAIT_S)
            assert isinstance(error, EngineUnavailableError)
            assert error.reason == "closed"
    assert len(result(held.first)) == 4
    closing.join(WAIT_S)
    assert [t for t in threading.enumerate() if t.name.startswith("phyai")] == []
    with pytest.raises(EngineUnavailableError):
        held.engine.step(observation())


def test_close_frees_one_that_waits_for_a_session() -> None:
    engine = open_engine(Odometer, runtime={"batch_wait_ms": FOREVER_MS})
    futures = [engine.submit(frame("a", seq)) for seq in range(2)]
    engine.submit(frame("b", 0))
    result(futures[0])
    engine.close()
    assert all(future.done() for future in futures)
    assert [t for t in threading.enumerate() if t.name.startswith("phyai")] == []


def test_futures_outlive_the_last_name_of_their_engine_which_then_closes() -> None:
    engine = open_engine(runtime={"batch_wait_ms": 1.0})
    closed = engine.args.plugin_args.closed  # type: ignore[attr-defined]
    adapter = weakref.ref(engine.adapter)
    futures = [engine.submit(observation(float(i))) for i in range(5)]
    del engine
    assert [result(future).horizon for future in futures] == [3] * 5
    until(lambda: gc.collect() >= 0 and adapter() is None)
    assert closed == ["adapter"]
    until(lambda: not any(t.name.startswith("phyai") for t in threading.enumerate()))


def test_the_thread_that_cancels_the_last_reference_ends() -> None:
    # close() has then run inside the loop's own thread: waiting for it would be for ever
    with open_engine() as engine:
        loop = RequestLoop(engine.core)

        class Last:
            def __del__(self) -> None:
                loop.close()

        future: Future[Any] = Future()
        future.cancel()
        loop.submit(observation(), future, keep=Last())
        until(lambda: loop._closed)
        until(lambda: not any(thread.is_alive() for thread in loop._threads))


def test_a_callback_may_ask_again_and_may_close() -> None:
    engine = open_engine(runtime={"batch_wait_ms": FOREVER_MS}, max_batch_size=1)
    answers: list[Any] = []
    done = threading.Event()

    def ask(_: Any) -> None:
        answers.append(engine.step(observation()))
        engine.close()
        done.set()

    engine.submit(observation()).add_done_callback(ask)
    assert done.wait(WAIT_S)
    assert len(answers) == 1
