"""RequestLoop with joining: who shares a batch, and that each request keeps what is its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Observation
from phyai.errors import ActionRejected, RequestError
from phyai.types import Prepared
from tests.core.gated_loop import (
    FOREVER_MS,
    WAIT_S,
    Gate,
    Held,
    alone,
    batches,
    observation,
    result,
)
from tests.core.toy_adapter import (
    STATE,
    ToyAdapter,
    ToyRequest,
    open_engine,
    registry,
    use_hooks,
)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PHYAI_DEVICE", raising=False)
    with registry():
        yield


# ---------------------------------------------------------------- who shares a batch


def test_without_batch_wait_nothing_joins_not_even_what_waits() -> None:
    with Held(wait_ms=0.0) as held:
        futures = [held.engine.submit(observation(float(i))) for i in range(3)]
    [result(future) for future in futures]
    assert batches(held.engine) == {"count": 4, "requests": 4, "joined": 0, "rows": {1: 3, 4: 1}}
    assert "batch_rows" not in result(futures[0]).info
    assert result(futures[0]).timing.keys() >= {"queue", "prepare", "solve", "total"}
    held.engine.close()


def test_whole_requests_join_in_order_until_the_batch_is_full() -> None:
    with Held() as held:
        engine = held.engine
        sizes = (1, 3, 2, 2, 1, 3)  # 4, 4, 4 rows
        requests = [[observation(float(i))] * n for i, n in enumerate(sizes)]
        futures = [engine.submit(request) for request in requests]
    answers = [result(future) for future in futures]
    assert batches(engine) == {"count": 4, "requests": 7, "joined": 6, "rows": {4: 4}}
    for request, answer in zip(requests, answers, strict=True):
        want = alone(request)
        assert len(answer) == len(want)
        for ours, theirs in zip(answer, want, strict=True):
            np.testing.assert_allclose(ours.actions, theirs.actions, rtol=1e-6)
            assert ours.info["batch_rows"] == 4
    engine.close()


def test_in_one_bucket_results_are_equal_to_the_bit() -> None:
    runtime = {"static_shapes": True}
    with Held(runtime=runtime, max_batch_size=2) as held:
        futures = [held.engine.submit(observation(i / 3)) for i in range(2)]
    for i, future in enumerate(futures):
        pair = [observation(i / 3), observation(0.7)]  # the same bucket, with another beside it
        want, _ = alone(pair, runtime=runtime, max_batch_size=2)
        assert np.array_equal(result(future).actions, want.actions)
    assert batches(held.engine)["joined"] == 2
    held.engine.close()


def test_a_lone_request_goes_when_it_has_waited_and_a_full_one_at_once() -> None:
    with open_engine(runtime={"batch_wait_ms": 1.0}) as engine:
        assert result(engine.submit(observation())).horizon == 3
        assert engine.step(observation()).info["batch_rows"] == 1
    with open_engine(runtime={"batch_wait_ms": FOREVER_MS}) as engine:
        assert len(result(engine.submit([observation()] * 4))) == 4


def test_callers_of_step_share_a_batch() -> None:
    answers: dict[int, Any] = {}
    with open_engine(runtime={"batch_wait_ms": FOREVER_MS}) as engine:

        def ask(number: int) -> None:
            answers[number] = engine.step(observation(float(number)))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert batches(engine) == {"count": 1, "requests": 4, "joined": 4, "rows": {4: 1}}
    for number, answer in answers.items():
        want = alone(observation(float(number)), ToyAdapter).actions
        np.testing.assert_allclose(answer.actions, want, rtol=1e-6)


def test_another_key_begins_the_next_batch_and_is_not_overtaken() -> None:
    order: list[str] = []
    with Held(wait_ms=1.0) as held:
        submit = held.engine.submit
        made = {
            "a": ToyRequest(torch.ones(1, STATE)),
            "b": ToyRequest(torch.ones(1, STATE), steps=2),
            "c": ToyRequest(torch.ones(2, STATE)),
        }
        futures = {name: submit(request) for name, request in made.items()}
        for name, future in futures.items():
            future.add_done_callback(lambda _, name=name: order.append(name))
    assert [result(future).shape[0] for future in futures.values()] == [1, 1, 2]
    assert order == ["a", "b", "c"]
    assert batches(held.engine)["joined"] == 0
    held.engine.close()


def test_model_requests_share_a_batch_and_own_their_result() -> None:
    with Held() as held:
        states = [torch.full((n, STATE), float(n)) for n in (1, 3)]
        one, two = [held.engine.submit(ToyRequest(state)) for state in states]
    first, second = result(one), result(two)
    assert batches(held.engine)["joined"] == 2
    assert torch.allclose(second, alone(ToyRequest(states[1])), rtol=1e-6)
    kept = second.clone()
    first.zero_()
    assert torch.equal(second, kept)
    held.engine.close()


class Alone(Gate):
    name = "toy-alone"

    def prepare(self, request: Any) -> Prepared:
        return replace(super().prepare(request), joinable=False)


def test_an_adapter_may_refuse_to_join() -> None:
    with Held(Alone) as held:
        futures = [held.engine.submit(observation(float(i))) for i in range(3)]
    [result(future) for future in futures]
    assert batches(held.engine)["rows"] == {1: 3, 4: 1}
    held.engine.close()


class Summed(Gate):
    """Model-space results that no longer tell the rows apart."""

    name = "toy-summed"

    def output(self) -> Any:
        output = super().output()
        output.tensors = lambda x, cache, prepared: x["action"].sum(0)  # type: ignore[method-assign]
        return output


def test_results_that_cannot_be_divided_are_made_one_by_one() -> None:
    with Held(Summed, max_batch_size=2) as held:
        states = [torch.full((1, STATE), float(i)) for i in range(4)]
        futures = [held.engine.submit(ToyRequest(state)) for state in states]
    for state, future in zip(states, futures, strict=True):
        assert torch.equal(result(future), alone(ToyRequest(state), Summed))
    rows = batches(held.engine)["rows"]
    assert rows[1] == 4
    assert rows[2] == 2  # the one that held the model, and the only attempt
    held.engine.close()


# ---------------------------------------------------------------- each keeps its own


def test_a_bad_request_fails_alone() -> None:
    with Held() as held:
        good = [held.engine.submit(observation(float(i))) for i in range(2)]
        bad = held.engine.submit(Observation(state=[1.0]))
        late = held.engine.submit(observation(deadline="soon"))
        more = held.engine.submit([observation(3.0), observation(4.0)])
        for future, match in ((bad, "4 values"), (late, "deadline")):
            assert isinstance(future.exception(WAIT_S), RequestError)
            assert match in str(future.exception())
    assert [result(future).horizon for future in good] == [3, 3]
    assert len(result(more)) == 2
    assert batches(held.engine)["joined"] == 3
    held.engine.close()


def test_a_blocked_chunk_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.core.test_contract_hooks import too_far, validator

    use_hooks(monkeypatch, limits=validator(too_far))
    with Held() as held:
        futures = [held.engine.submit(observation(first)) for first in (0.0, 50.0, 0.1, 0.2)]
    assert isinstance(futures[1].exception(WAIT_S), ActionRejected)
    assert [result(futures[i]).horizon for i in (0, 2, 3)] == [3, 3, 3]
    assert batches(held.engine)["rows"] == {4: 2}
    held.engine.close()


def test_nan_of_one_request_is_its_own() -> None:
    with Held() as held:
        futures = [held.engine.submit(observation(first)) for first in (0.0, 7.0, 0.1, 0.2)]
        model = [held.engine.submit(ToyRequest(torch.full((2, STATE), v))) for v in (7.0, 1.0)]
    for future in (futures[1], model[0]):
        error = future.exception(WAIT_S)
        assert isinstance(error, ActionRejected)
        assert "must be finite" in str(error)
    np.testing.assert_allclose(result(futures[2]).actions, alone(observation(0.1)).actions, 1e-6)
    assert result(model[1]).isfinite().all()
    assert held.engine.core.runner._bound == {}  # its buffers held NaN
    held.engine.close()


def test_each_has_its_own_timing() -> None:
    with Held() as held:
        early = held.engine.submit(observation(0.0))
        time.sleep(0.02)
        late = held.engine.submit([observation(1.0)] * 3)
    first, second = result(early).timing, result(late)[0].timing
    assert first["queue"] > second["queue"]
    assert first["solve"] == second["solve"]
    for timing in (first, second):
        assert timing["total"] >= timing["queue"] + timing["solve"]
    held.engine.close()
