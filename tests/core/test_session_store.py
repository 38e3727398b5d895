"""The store: who is evicted, what expires, what is remembered, and many threads at once."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from phyai import sessions as sessions_module
from phyai.errors import (
    EngineUnavailableError,
    PluginContractError,
    RequestError,
    SessionClosed,
    SessionEvicted,
    SessionExpired,
    SessionLost,
    SessionUnknown,
)
from phyai.session_results import frozen, joined, split
from phyai.types import ActionChunk, Media
from tests.core.session_adapter import Odometer, counts, frame, way
from tests.core.toy_adapter import open_engine, registry

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


# ---------------------------------------------------------------- lost sessions


def test_the_least_recently_used_session_makes_room() -> None:
    with open_engine(Odometer, runtime={"max_sessions": 2}) as engine:
        engine.step(frame("a", 0))
        engine.step(frame("b", 0))
        engine.step(frame("a", 0))  # sent again: that is use, too
        engine.step(frame("c", 0))
        with pytest.raises(SessionEvicted, match=r"'b' must be live for seq 1.*max_sessions"):
            engine.step(frame("b", 1))
        assert way(engine.step(frame("a", 1))) == 2
        got = counts(engine)
        assert (got["live"], got["opened"], got["evicted"], got["capacity"]) == (2, 3, 1, 2)
        assert way(engine.step(frame("b", 0, 5.0))) == 5  # and c leaves
        with pytest.raises(SessionEvicted):
            engine.step(frame("c", 1))
        assert way(engine.step(frame("b", 1))) == 6


def test_a_request_that_fails_evicts_nobody() -> None:
    with open_engine(Odometer, runtime={"max_sessions": 1}) as engine:
        engine.step(frame("a", 0))
        with pytest.raises(Exception, match="finite"):
            engine.step(frame("b", 0, float("nan")))
        assert way(engine.step(frame("a", 1))) == 2
        assert counts(engine)["evicted"] == 0


def test_sessions_expire_by_the_clock_and_each_use_winds_it_up() -> None:
    now = [100.0]
    with open_engine(Odometer, runtime={"session_ttl_s": 10}) as engine:
        engine.core.sessions.clock = lambda: now[0]
        engine.step(frame("a", 0))
        engine.step(frame("b", 0))
        for seq in range(1, 4):
            now[0] += 9.0
            engine.step(frame("a", seq))
        with pytest.raises(SessionExpired, match="no request within 10 s"):
            engine.step(frame("b", 1))
        assert way(engine.step(frame("a", 4))) == 5
        got = counts(engine)
        assert (got["live"], got["expired"]) == (1, 1)
        now[0] += 11.0
        assert counts(engine)["live"] == 0
        assert way(engine.step(frame("a", 0))) == 1


def test_how_a_session_was_lost_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "LOST_KEPT", 2)
    with open_engine(Odometer) as engine:
        for name in "abc":
            engine.step(frame(name, 0))
            engine.close_session(name)
        for name, error in (("a", SessionUnknown), ("b", SessionClosed), ("c", SessionClosed)):
            with pytest.raises(error) as caught:
                engine.step(frame(name, 1))
            assert type(caught.value) is error
            assert isinstance(caught.value, SessionLost)
            again = pickle.loads(pickle.dumps(caught.value))
            assert type(again) is error
        engine.step(frame("c", 0))
        assert list(engine.core.sessions._lost) == ["b"]


# ---------------------------------------------------------------- threads


class Gated(Odometer):
    """Waits in plan() until the test opens it; only while ``wait`` is set."""

    name = "odometer-gated"
    wait = False

    def conditioning(self) -> Any:
        from phyai.adapter import NoConditioning

        adapter = self
        self.entered, self.open = threading.Event(), threading.Event()

        class Gate(NoConditioning):
            def plan(self, cache: Any, batch: Any) -> None:
                if adapter.wait:
                    adapter.entered.set()
                    assert adapter.open.wait(WAIT_S)

        return Gate()


class Background:
    """A call in a thread of its own, and what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._outcome = call, []  # type: ignore[var-annotated]
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._call())
        except BaseException as error:
            self._outcome.append(error)

    def result(self) -> Any:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        (outcome,) = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def test_the_same_seq_from_many_threads_is_one_step() -> None:
    with open_engine(Odometer) as engine:
        for seq in range(5):
            calls = [Background(lambda s=seq: engine.step(frame("a", s))) for _ in range(8)]  # type: ignore[misc]
            assert [way(call.result()) for call in calls] == [seq + 1] * 8
        assert engine.adapter.prepared == 5  # type: ignore[attr-defined]
        assert counts(engine)["retries"] == 5 * 7


def test_many_sessions_from_many_threads_and_few_places() -> None:
    """More robots than places at once: each waits for its turn, and evictions are told."""
    with open_engine(Odometer, runtime={"max_sessions": 2}) as engine:

        def drive(name: str) -> int:
            lost = 0
            seq = 0
            for _ in range(12):
                try:
                    assert way(engine.step(frame(name, seq))) == seq + 1
                    seq += 1
                except SessionEvicted:
                    lost, seq = lost + 1, 0
            return lost

        calls = [Background(lambda n=n: drive(n)) for n in "abcdef"]  # type: ignore[misc]
        lost = sum(call.result() for call in calls)
        got = counts(engine)
        assert got["evicted"] == got["opened"] - 2
        assert lost <= got["evicted"]
        assert got["bytes"] == 2 * 8


def test_a_session_in_use_is_not_evicted() -> None:
    with open_engine(Gated, runtime={"max_sessions": 2}) as engine:
        gate: Any = engine.adapter
        engine.step(frame("a", 0))
        engine.step(frame("b", 0))
        gate.wait = True
        running = Background(lambda: engine.step(frame("a", 1)))
        assert gate.entered.wait(WAIT_S)
        other = Background(lambda: engine.step(frame("c", 0)))  # a is in use: b has to leave
        gate.open.set()
        assert way(running.result()) == 2
        assert way(other.result()) == 1
        assert way(engine.step(frame("a", 2))) == 3
        with pytest.raises(SessionEvicted):
            engine.step(frame("b", 1))


def test_an_expired_session_in_use_is_kept() -> None:
    now = [0.0]
    with open_engine(Gated, runtime={"session_ttl_s": 10.0}) as engine:
        gate: Any = engine.adapter
        engine.core.sessions.clock = lambda: now[0]
        engine.step(frame("a", 0))
        gate.wait = True
        running = Background(lambda: engine.step(frame("a", 1)))
        assert gate.entered.wait(WAIT_S)
        now[0] = 60.0
        assert counts(engine)["live"] == 1
        gate.open.set()
        assert way(running.result()) == 2
        assert way(engine.step(frame("a", 2))) == 3


@pytest.mark.parametrize("seq", [0, 1])
@pytest.mark.parametrize("call", ["reset_session", "close_session"])
def test_a_session_that_is_let_go_while_it_runs_keeps_nothing(call: str, seq: int) -> None:
    with open_engine(Gated) as engine:
        gate: Any = engine.adapter
        if seq:
            engine.step(frame("a", 0))
        gate.wait = True
        running = Background(lambda: engine.step(frame("a", seq)))
        assert gate.entered.wait(WAIT_S)
        getattr(engine, call)("a")
        gate.open.set()
        assert way(running.result()) == seq + 1
        error = SessionClosed if call == "close_session" else RequestError
        with pytest.raises(error, match=r"expected seq is 0|must be 0"):
            engine.step(frame("a", seq + 1))
        assert way(engine.step(frame("a", 0, 4.0))) == 4


@pytest.mark.parametrize("seq", [0, 1])
def test_a_session_closed_before_its_request_runs_costs_no_cache(seq: int) -> None:
    """Its graphs stay as well: nothing has run that could have spoilt them."""

    class Closing(Odometer):
        name = "odometer-closing"

        def prepare(self, request: Any) -> Any:
            made = super().prepare(request)
            if request.state[0] == 7.0:
                engine.close_session("a")
            return made

    with open_engine(Closing) as engine:
        engine.step(frame("b", 0))
        if seq:
            engine.step(frame("a", 0))
        caches = list(engine.core.runner._bound.values())
        if seq:
            with pytest.raises(SessionClosed):
                engine.step(frame("a", seq, 7.0))
        else:
            assert way(engine.step(frame("a", seq, 7.0))) == 7
        with pytest.raises(SessionClosed):
            engine.step(frame("a", seq + 1))
        assert list(engine.core.runner._bound.values()) == caches
        assert way(engine.step(frame("a", 0))) == 1
        assert way(engine.step(frame("b", 1))) == 2


def test_close_refuses_whoever_waits_for_a_session() -> None:
    engine = open_engine(Gated)
    gate: Any = engine.adapter
    gate.wait = True
    running = Background(lambda: engine.step(frame("a", 0)))
    assert gate.entered.wait(WAIT_S)
    waiting = Background(lambda: engine.step(frame("a", 1)))
    closing = Background(engine.close)
    gate.open.set()
    assert way(running.result()) == 1
    closing.result()
    with contextlib.suppress(EngineUnavailableError):
        assert way(waiting.result()) == 2  # it may have been in time
    with pytest.raises(EngineUnavailableError):
        engine.step(frame("a", 1))


# ---------------------------------------------------------------- stored results


def test_a_stored_result_shares_no_memory() -> None:
    arrays = np.ones((2, 3), np.float32)
    chunk = ActionChunk(arrays, ("x", "y", "z"), np.ones(2, bool), arrays, 5.0, info={"a": arrays})
    copies = frozen([chunk, Media("image", np.zeros((2, 2, 3), np.uint8)), {"t": torch.ones(1, 2)}])
    arrays[:] = 7.0
    for _ in range(2):
        kept, media, tensors = copies()
        assert kept.actions.tolist() == np.ones((2, 3)).tolist()
        assert kept.info["a"].sum() == 6.0
        assert (kept.names, kept.control_hz) == (("x", "y", "z"), 5.0)
        for array in (kept.actions, kept.info["a"], media.data):
            array[:] = 9
        tensors["t"].zero_()


def test_results_are_taken_apart_by_row() -> None:
    result = {"video": torch.arange(6).view(3, 2), "nested": {"sound": torch.arange(3)}}
    rows = split(result, 3)
    assert rows[1]["video"].tolist() == [[2, 3]]
    whole = joined(rows)
    assert torch.equal(whole["video"], result["video"])  # type: ignore[arg-type]
    assert whole["nested"]["sound"].tolist() == [0, 1, 2]
    for wrong in (torch.zeros(2), torch.tensor(1.0), [1, 2], "abc", None):
        with pytest.raises(PluginContractError, match="one row per robot"):
            split(wrong, 3)
