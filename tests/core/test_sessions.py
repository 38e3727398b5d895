"""Sessions through the engine: order, repetition, failures, batches, keys, graphs, memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phyai.adapter import NoConditioning
from phyai.errors import (
    ActionRejected,
    EngineUnavailableError,
    RequestError,
    SessionClosed,
    SessionUnknown,
)
from phyai.hooks import hookimpl
from phyai.types import ActionChunk, Observation
from tests.core.session_adapter import DIM, MoveRequest, Odometer, counts, frame, way
from tests.core.toy_adapter import open_engine, registry, use_hooks


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


# ---------------------------------------------------------------- order


def test_a_session_goes_on_where_it_was() -> None:
    with open_engine(Odometer) as engine:
        assert [way(engine.step(frame("a", seq, 2.0))) for seq in range(4)] == [2, 4, 6, 8]
        assert way(engine.submit(frame("a", 4)).result(30)) == 9


def test_the_same_seq_again_is_the_stored_result_and_runs_nothing() -> None:
    with open_engine(Odometer) as engine:
        adapter: Any = engine.adapter
        engine.step(frame("a", 0))
        first = engine.step(frame("a", 1))
        prepared, replays = adapter.prepared, engine.core.services.graphs.stats()["replays"]
        first.actions[:] = 99.0  # the caller's to change
        for other in (frame("a", 1), frame("a", 1, 50.0), frame("a", 1, prompt="other")):
            again = engine.step(other)
            assert way(again) == 2
            assert again.names == first.names
            assert set(again.timing) == {"queue", "total"}
            again.actions[:] = -1.0
        assert adapter.prepared == prepared
        assert engine.core.services.graphs.stats()["replays"] == replays
        assert way(engine.step(frame("a", 2))) == 3
        assert counts(engine)["retries"] == 3
        assert engine.stats()["replicas"][0]["done"] == 6


def test_any_other_seq_is_refused_with_what_was_expected() -> None:
    with open_engine(Odometer) as engine:
        for seq in range(3):
            engine.step(frame("a", seq))
        for seq in (1, 4, 99):
            with pytest.raises(RequestError, match=rf"must be 3 \(the next one\) or 2.*got {seq}"):
                engine.step(frame("a", seq))
        with pytest.raises(RequestError, match=r"got 0\. Call reset_session"):
            engine.step(frame("a", 0))
        assert way(engine.step(frame("a", 3))) == 4


def test_unknown_sessions_start_with_seq_0() -> None:
    with open_engine(Odometer) as engine:
        with pytest.raises(SessionUnknown, match="seq 3, and expected seq is 0; it is not known"):
            engine.step(frame("a", 3))
        assert way(engine.step(frame("a", 0))) == 1


def test_a_request_without_a_session_starts_from_zeros_and_leaves_nothing() -> None:
    with open_engine(Odometer) as engine:
        assert [way(engine.step(frame(None, None))) for _ in range(2)] == [1, 1]
        assert counts(engine) == {
            "live": 0, "capacity": 8, "opened": 0, "evicted": 0, "expired": 0, "closed": 0,
            "retries": 0, "bytes": 0,
        }  # fmt: skip
        engine.step(frame("a", 0, 5.0))
        assert way(engine.step(frame(None, None))) == 1
        assert way(engine.step(frame("a", 1))) == 6


def test_reset_and_close() -> None:
    with open_engine(Odometer) as engine:
        for _ in range(2):
            engine.reset_session("a")
            engine.close_session("a")  # unknown ids are fine
        engine.step(frame("a", 0))
        engine.step(frame("a", 1))
        engine.reset_session("a")
        with pytest.raises(RequestError, match=r"must be 0 \(the next one\); got 2"):
            engine.step(frame("a", 2))
        assert way(engine.step(frame("a", 0, 7.0))) == 7
        engine.close_session("a")
        engine.close_session("a")
        with pytest.raises(SessionClosed, match="was closed"):
            engine.step(frame("a", 1))
        engine.reset_session("a")
        assert way(engine.step(frame("a", 0))) == 1
        got = counts(engine)
        assert (got["opened"], got["closed"], got["live"]) == (2, 1, 1)
        for call in (engine.reset_session, engine.close_session):
            with pytest.raises(RequestError, match="session_id must be"):
                call("")
    for call in (engine.reset_session, engine.close_session):
        with pytest.raises(EngineUnavailableError):
            call("a")
    assert counts(engine)["live"] == counts(engine)["bytes"] == 0
    assert engine.core.services.memory.nbytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"session_id": "a"}, "must be sent together; got 'a' and None"),
        ({"seq": 0}, "must be sent together; got None and 0"),
        ({"session_id": "", "seq": 0}, "text of 1 to 256 characters; got ''"),
        ({"session_id": "x" * 257, "seq": 0}, "text of 1 to 256 characters"),
        ({"session_id": 7, "seq": 0}, "text of 1 to 256 characters; got 7"),
        ({"session_id": "a", "seq": -1}, "integer >= 0; got -1"),
        ({"session_id": "a", "seq": 0.0}, "integer >= 0; got 0.0"),
        ({"session_id": "a", "seq": True}, "integer >= 0; got True"),
        ({"session_id": "a", "seq": "0"}, "integer >= 0; got '0'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with open_engine(Odometer) as engine:
        with pytest.raises(RequestError, match=message):
            engine.step(Observation(state=[1.0, 10.0], options=options))
        if len(options) == 2:
            request = MoveRequest(torch.ones(1, DIM), (options["session_id"],), (options["seq"],))
            with pytest.raises(RequestError, match=message):
                engine.step(request)
        assert counts(engine)["opened"] == 0
        assert way(engine.step(frame("x" * 256, np.int64(0)))) == 1  # type: ignore[arg-type]
        assert way(engine.step(frame("x" * 256, 1))) == 2


# ---------------------------------------------------------------- failures


class Faulty(Odometer):
    """Changes the row in encode, and then raises while ``fail`` is set."""

    name = "odometer-faulty"
    fail = False

    def conditioning(self) -> Any:
        adapter = self

        class Encode(NoConditioning):
            def encode(self, cache: Any) -> None:
                if adapter.fail:
                    cache["way"].add_(1000.0)
                    raise MemoryError("in the middle")

        return Encode()


@pytest.mark.parametrize("seq", [0, 2])
@pytest.mark.parametrize("fault", ["prepare", "forward", "nan", "validator"])
def test_a_failed_request_leaves_the_session_as_it_was(
    fault: str, seq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @hookimpl
    def phyai_validate_action(chunk: ActionChunk) -> str | None:
        return "too far" if chunk.actions.max() > 500 else None

    use_hooks(monkeypatch, limits=SimpleNamespace(phyai_validate_action=phyai_validate_action))
    bad, error = {
        "prepare": (Observation(state=[1.0] * 3, options=frame("a", seq).options), RequestError),
        "forward": (frame("a", seq), MemoryError),
        "nan": (frame("a", seq, float("nan")), ActionRejected),
        "validator": (frame("a", seq, 100.0), ActionRejected),
    }[fault]
    with open_engine(Faulty) as engine:
        adapter: Any = engine.adapter
        for number in range(seq):
            engine.step(frame("a", number))
        before = counts(engine)
        for _ in range(2):
            adapter.fail = fault == "forward"
            with pytest.raises(error):
                engine.step(bad)
            adapter.fail = False
            after = counts(engine)
            assert {**after, "bytes": 0, "retries": 0} == {**before, "bytes": 0, "retries": 0}
            if seq:
                assert way(engine.step(frame("a", seq - 1))) == seq  # still stored
        assert way(engine.step(frame("a", seq))) == seq + 1
        assert way(engine.step(frame("a", seq))) == seq + 1


def test_one_bad_row_leaves_every_session_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(Odometer) as engine:
        engine.step([frame("a", 0), frame("b", 0)])
        with pytest.raises(ActionRejected):
            engine.step([frame("a", 1), frame("b", 1, float("nan")), frame("c", 0)])
        assert counts(engine)["live"] == 2
        results = engine.step([frame("a", 1), frame("b", 1), frame("c", 0)])
        assert [way(r) for r in results] == [2, 2, 1]


# ---------------------------------------------------------------- several rows


def test_sessions_in_one_batch_and_in_any_order() -> None:
    with open_engine(Odometer) as engine:
        engine.step([frame("a", 0), frame(None, None, 9.0), frame("b", 0, 2.0)])
        results = engine.step([frame("b", 1, 2.0), frame("a", 1), frame("c", 0, 3.0)])
        assert [way(r) for r in results] == [4, 2, 3]
        results = engine.step([frame(None, None), frame("c", 1, 3.0), frame("b", 2, 2.0)])
        assert [way(r) for r in results] == [1, 6, 6]


def test_rows_sent_again_are_answered_beside_rows_that_run() -> None:
    with open_engine(Odometer) as engine:
        engine.step([frame("a", 0), frame("b", 0, 2.0)])
        results = engine.step([frame("a", 0, 70.0), frame("b", 1, 2.0), frame(None, None, 5.0)])
        assert [way(r) for r in results] == [1, 4, 5]
        results = engine.step([frame("a", 0), frame("b", 1)])
        assert [way(r) for r in results] == [1, 4]
        assert way(engine.step(frame("a", 1))) == 2


def test_a_session_has_one_row_in_a_request() -> None:
    with open_engine(Odometer) as engine, pytest.raises(RequestError, match="'a' more than once"):
        engine.step([frame("a", 0), frame("b", 0), frame("a", 1)])


def test_a_request_names_no_more_sessions_than_are_kept() -> None:
    with open_engine(Odometer, runtime={"max_sessions": 2}) as engine:
        with pytest.raises(RequestError, match="at most 2 sessions; got 3"):
            engine.step([frame(name, 0) for name in "abc"])
        results = engine.step([frame("a", 0), frame("b", 0), frame(None, None)])
        assert len(results) == 3


# ---------------------------------------------------------------- model requests


def test_model_requests_have_sessions_too() -> None:
    with open_engine(Odometer) as engine:
        moves = torch.tensor([[1.0, 10.0], [2.0, 20.0]])
        first = engine.step(MoveRequest(moves, ("a", "b"), (0, 0)))
        engine.step(MoveRequest(moves, ("a", "b"), (1, 1)))
        kept = engine.step(MoveRequest(moves, ("b", "a"), (1, 1)))
        assert kept[:, 0, 0].tolist() == [4.0, 2.0]
        assert kept.shape == first.shape
        kept.zero_()
        assert way(engine.step(MoveRequest(moves[:1], ("b",), (1,)))) == 4
        with pytest.raises(RequestError, match="all new or all sent again"):
            engine.step(MoveRequest(moves, ("a", "b"), (1, 2)))
        assert way(engine.step(frame("a", 2))) == 3
        assert way(engine.step(MoveRequest(moves[:1]))) == 1
