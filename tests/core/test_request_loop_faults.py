"""RequestLoop against plugins, observers and callbacks that do what they must not."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from phyai import Observation
from phyai.errors import CapacityError, PhyaiError, PluginError, RequestError
from phyai.hooks import hookimpl
from phyai.types import Key, Prepared
from tests.core.gated_loop import (
    FOREVER_MS,
    WAIT_S,
    Gate,
    Held,
    loop_of,
    observation,
    result,
    until,
)
from tests.core.session_adapter import Odometer, frame, way
from tests.core.toy_adapter import open_engine, registry, use_hooks


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PHYAI_DEVICE", raising=False)
    with registry():
        yield


# ---------------------------------------------------------------- plugins


class Odd(Gate):
    """Prepares what the contract does not know; the prompt says which."""

    name = "toy-odd"

    def prepare(self, request: Any) -> Prepared:
        made = super().prepare(request)
        odd = {
            "a key without hash": {"key": Key(num_steps=1, extra=(("a", [1]),))},
            "a key that is not equal to itself": {"key": Key(extra=(("a", torch.ones(2)),))},
            "no mapping": {"tensors": list(made.tensors)},
            "results without number": {"meta": iter("a")},
            "no rows": {"rows": 0},
            "more rows than there are": {"rows": 9},
        }
        how = request.prompt if isinstance(request, Observation) else None
        return replace(made, **odd[how]) if how else made  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how",
    [
        "a key without hash",
        "a key that is not equal to itself",
        "no mapping",
        "results without number",
        "no rows",
        "more rows than there are",
    ],
)
def test_what_a_plugin_must_not_prepare_harms_nobody_else(how: str) -> None:
    with Held(Odd) as held:
        good, odd = observation(), Observation(state=[0.0] * 4, prompt=how)
        requests = [good, odd, odd, good, [good] * 4]
        futures = [held.engine.submit(request) for request in requests]
    for future in futures[1:3]:
        future.exception(WAIT_S)
    assert [result(futures[i]).horizon for i in (0, 3)] == [3, 3]
    assert len(result(futures[4])) == 4
    held.engine.close()


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_failed_forward_fails_its_batch_and_the_next_works(error: Any) -> None:
    with Held() as held:
        held.gate.fails = error("in the middle")
        futures = [held.engine.submit(observation(first)) for first in (0.0, 8.0, 1.0, 2.0)]
        after = [held.engine.submit(observation(first)) for first in (0.0, 3.0, 1.0, 2.0)]
    want = PluginError if error is SystemExit else error
    errors = [future.exception(WAIT_S) for future in futures]
    assert all(isinstance(one, want) for one in errors)
    assert len({id(one) for one in errors}) == 4  # tracebacks are written to
    assert [result(future).info["batch_rows"] for future in after] == [4] * 4
    (replica,) = held.engine.stats()["replicas"]
    assert (replica["done"], replica["failed"], replica["in_flight"]) == (5, 4, 0)
    assert loop_of(held.engine)._limits == {}  # its size was not the reason
    held.engine.close()


@pytest.mark.parametrize("error", [CapacityError, MemoryError, torch.OutOfMemoryError])
def test_what_only_the_shared_batch_has_no_memory_for_runs_alone(error: Any) -> None:
    with Held() as held:
        run = held.engine.core.runner.run_joined

        def small(requests: Any, *more: Any) -> Any:
            held.gate.fails = error("too many rows") if len(requests) > 1 else None
            return run(requests, *more)

        held.engine.core.runner.run_joined = small  # type: ignore[method-assign]
        futures = [held.engine.submit(observation(8.0)) for _ in range(4)]
    assert [result(future).horizon for future in futures] == [3] * 4
    assert list(loop_of(held.engine)._limits.values()) == [2]
    held.engine.close()


class Undecoded(Gate):
    name = "toy-undecoded"

    def output(self) -> Any:
        output = super().output()
        decode = output.decode

        def fails(x: Any, cache: Any, prepared: Prepared) -> Any:
            if any(row.prompt for row in prepared.meta or ()):
                raise RequestError("prompt must be empty")
            return decode(x, cache, prepared)

        output.decode = fails  # type: ignore[method-assign]
        return output


def test_a_result_that_cannot_be_decoded_is_its_own() -> None:
    with Held(Undecoded) as held:
        bad = Observation(state=[0.0] * 4, prompt="go")
        good, odd, more = (held.engine.submit(r) for r in (observation(), bad, [observation()] * 2))
    assert isinstance(odd.exception(WAIT_S), RequestError)
    assert result(good).horizon == 3
    assert len(result(more)) == 2
    held.engine.close()


def test_what_was_kept_of_a_session_never_runs_on_top_of_itself() -> None:
    with open_engine(Odometer, runtime={"batch_wait_ms": FOREVER_MS}, max_batch_size=2) as engine:
        both = [engine.submit(frame(name, 0)) for name in "ab"]
        [result(future) for future in both]
        run = engine.core.runner.run_joined

        def loses(requests: Any, *more: Any) -> Any:
            engine.core.runner.run_joined = run  # type: ignore[method-assign]
            run(requests)
            raise CapacityError("no room left")

        engine.core.runner.run_joined = loses  # type: ignore[method-assign]
        for future in [engine.submit(frame(name, 1)) for name in "ab"]:
            with pytest.raises(RequestError, match=r"must run once.* Send it again"):
                result(future)
        assert [way(engine.step(frame(name, 1))) for name in "ab"] == [2.0, 2.0]


# ---------------------------------------------------------------- observers


def test_observers_hear_of_each_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.core.test_contract_hooks import too_far, validator

    heard: list[tuple[str, str | None]] = []

    class Watch:
        @hookimpl
        def phyai_request_started(self, info: Any) -> None:
            heard.append(("started", None))

        @hookimpl
        def phyai_request_finished(self, info: Any) -> None:
            heard.append(("finished", None if info.error is None else info.error.split("(")[0]))
            raise ValueError("observers are heard, not obeyed")

    use_hooks(monkeypatch, limits=validator(too_far), watch=Watch())  # type: ignore[arg-type]
    with Held() as held:
        held.gate.fails = CapacityError("no room")
        wanted = (0.0, 50.0, 8.0, 7.0)  # fine, blocked, fails its batch, NaN
        futures = [held.engine.submit(observation(first)) for first in wanted]
        bad = held.engine.submit(Observation(state=[1.0]))
        until(lambda: len(loop_of(held.engine)._ready) == 4)
        cancelled = held.engine.submit(observation())
        assert cancelled.cancel()
    kinds = [type(future.exception(WAIT_S)).__name__ for future in [*futures, bad]]
    assert kinds == [
        "NoneType",
        "ActionRejected",
        "CapacityError",
        "ActionRejected",
        "RequestError",
    ]
    held.engine.close()
    assert heard.count(("started", None)) == 6 == sum(kind == "finished" for kind, _ in heard)
    ends = Counter(error for kind, error in heard if kind == "finished")
    blocked = {"ActionRejected": 3}  # the states that held the model are too far, too
    assert ends == {None: 1, "CapacityError": 1, "RequestError": 1, **blocked}


class Uninformed(Gate):
    name = "toy-uninformed"

    def output(self) -> Any:
        output = super().output()
        decode = output.decode
        output.decode = lambda *a: [replace(c, info=None) for c in decode(*a)]  # type: ignore
        return output


def test_a_result_nobody_can_dress_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Any] = []
    with Held(Uninformed, max_batch_size=1) as held:
        held.engine.core._notify["phyai_request_finished"] = ends.append  # type: ignore[assignment]
    assert isinstance(held.first.exception(WAIT_S), TypeError)
    assert [end.error is None for end in ends] == [False]
    held.engine.close()


# ---------------------------------------------------------------- callbacks


@pytest.mark.parametrize("wait_ms", [0.0, FOREVER_MS])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_a_callback_that_raises_ends_no_thread(wait_ms: float, error: Any) -> None:
    def fails(_: Any) -> None:
        raise error("callback")

    with Held(wait_ms=wait_ms) as held:
        for request in (observation(), Observation(state=[1.0])):
            held.engine.submit(request).add_done_callback(fails)
        after = [held.engine.submit(request) for request in (observation(), [observation()] * 4)]
    assert [len(result(after[1])), result(after[0]).horizon] == [4, 3]
    held.engine.close()


def test_a_callback_may_ask_for_a_session_of_its_own_batch() -> None:
    answers: Future[float] = Future()
    with open_engine(Odometer, runtime={"batch_wait_ms": FOREVER_MS}, max_batch_size=2) as engine:
        first = engine.submit(frame("a", 0))
        first.add_done_callback(lambda _: answers.set_result(way(engine.step(frame("b", 1)))))
        engine.submit(frame("b", 0))
        assert answers.result(WAIT_S) == 2.0


def test_a_callback_does_not_wait_for_a_session_that_waits_for_it() -> None:
    errors: Future[PhyaiError] = Future()
    with open_engine(Odometer, runtime={"batch_wait_ms": FOREVER_MS}, max_batch_size=2) as engine:

        def ask(_: Any) -> None:
            until(lambda: len(loop_of(engine)._ready) == 1)
            with pytest.raises(RequestError, match="callback") as caught:
                engine.step(frame("c", 1))
            errors.set_result(caught.value)

        first = engine.submit(frame("a", 0))
        first.add_done_callback(ask)
        waiting = [engine.submit(frame(name, 0)) for name in "bc"]
        assert "Use submit()" in str(errors.result(WAIT_S))
        waiting.append(engine.submit(frame("d", 0)))
        assert [way(result(future)) for future in waiting] == [1.0] * 3


# ---------------------------------------------------------------- counts


def test_busy_time_is_that_of_the_model_however_many_share_it() -> None:
    with Held() as held:
        (running,) = held.engine.stats()["replicas"]
        assert running["busy_s"] > 0.0  # the batch that runs counts
        futures = [held.engine.submit(observation(float(i))) for i in range(4)]
        threading.Event().wait(0.02)
    [result(future) for future in futures]
    (then,) = held.engine.stats()["replicas"]
    total = sum(result(f).timing["total"] for f in futures) / 1e3
    assert running["busy_s"] < then["busy_s"] < total  # they waited all the time
    (idle,) = held.engine.stats()["replicas"]
    assert idle["busy_s"] == then["busy_s"]
    held.engine.close()
