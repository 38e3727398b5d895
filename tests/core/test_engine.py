"""Engine: life cycle, threads, futures, errors of one request, what stats and results say."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine, Observation
from phyai.errors import (
    ActionRejected,
    EngineUnavailableError,
    RequestError,
)
from phyai.types import Prepared
from tests.core.toy_adapter import (
    STATE,
    ToyAdapter,
    ToyRequest,
    open_engine,
    registry,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "pi05"


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PHYAI_DEVICE", "PHYAI_DTYPE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with registry():
        yield


class Gate(ToyAdapter):
    """Waits in the network of a request whose state starts with 9 until the test opens it."""

    name = "toy-gate"

    def load(self) -> None:
        super().load()
        self.entered, self.open = threading.Event(), threading.Event()
        self.active = self.most = 0
        gate, policy = self, self.policy

        class Waiting(torch.nn.Module):
            prediction = "clean"

            def forward(self, x: Any, step: Any, cache: Any) -> Any:
                gate.active += 1
                gate.most = max(gate.most, gate.active)
                if float(cache.inputs["state"][0, 0]) == 9.0:
                    gate.entered.set()
                    assert gate.open.wait(30)
                out = policy(x, step, cache)
                gate.active -= 1
                return out

        self.waiting = Waiting()

    def denoiser(self) -> Any:
        return self.waiting


def observation(first: float = 0.0) -> Observation:
    return Observation(state=[first, 0.0, 0.0, 0.0])


def replica(engine: Engine) -> dict[str, Any]:
    (one,) = engine.stats()["replicas"]
    return dict(one)


def phyai_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("phyai")]


# ---------------------------------------------------------------- closed


def test_a_closed_engine_refuses_and_says_so() -> None:
    engine = open_engine()
    engine.close()
    with pytest.raises(EngineUnavailableError, match="closed") as caught:
        engine.step(observation())
    assert caught.value.reason == "closed"
    future = engine.submit(observation())
    assert isinstance(future, Future)
    assert future.done()
    error = future.exception()
    assert isinstance(error, EngineUnavailableError)
    assert error.reason == "closed"
    for call in (engine.setup, lambda: engine.adapter, engine.__enter__):
        with pytest.raises(EngineUnavailableError):
            call()
    assert replica(engine)["state"] == "closed"


def test_close_is_idempotent_and_releases_once() -> None:
    engine = open_engine()
    closed = engine.args.plugin_args.closed  # type: ignore[attr-defined]
    engine.step(observation())
    assert replica(engine)["memory_bytes"] > 0
    engine.close()
    engine.close()
    assert closed == ["adapter"]
    assert replica(engine)["memory_bytes"] == 0


def test_the_context_manager_closes_even_after_an_error() -> None:
    with pytest.raises(KeyError), open_engine() as engine:
        raise KeyError
    assert replica(engine)["state"] == "closed"


@pytest.mark.parametrize("through", ["step", "submit"])
def test_an_engine_nobody_holds_is_closed(through: str) -> None:
    engine = open_engine()
    engine.step(observation()) if through == "step" else engine.submit(observation()).result(30)
    adapter, closed = weakref.ref(engine.adapter), engine.args.plugin_args.closed  # type: ignore[attr-defined]
    del engine
    deadline = time.monotonic() + 30
    # the worker lets go in its own time
    while (adapter() is not None or phyai_threads()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    assert closed == ["adapter"]
    assert adapter() is None
    assert phyai_threads() == []


def test_futures_outlive_the_last_name_of_their_engine() -> None:
    engine = open_engine()
    futures = [engine.submit(observation(float(i))) for i in range(5)]
    del engine
    assert [f.result(30).horizon for f in futures] == [3] * 5


def test_close_fails_what_waits_and_lets_the_running_request_finish() -> None:
    engine = open_engine(Gate)
    gate: Any = engine.adapter
    running = engine.submit(observation(9.0))
    assert gate.entered.wait(30)
    waiting = [engine.submit(observation()) for _ in range(3)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    for future in waiting:
        error = future.exception(30)
        assert isinstance(error, EngineUnavailableError)
        assert error.reason == "closed"
    assert not running.done()
    gate.open.set()
    assert running.result(30).actions.shape == (3, 2)
    closing.join(30)
    assert not closing.is_alive()
    assert phyai_threads() == []


def test_closing_from_a_callback_of_a_future_does_not_hang() -> None:
    engine = open_engine()
    done = threading.Event()
    future = engine.submit(observation())

    def close(_: Any) -> None:
        engine.close()
        done.set()

    future.add_done_callback(close)
    assert done.wait(30)


# ---------------------------------------------------------------- queue and threads


def test_a_queued_request_can_be_cancelled_until_it_starts() -> None:
    with open_engine(Gate) as engine:
        gate: Any = engine.adapter
        running = engine.submit(observation(9.0))
        assert gate.entered.wait(30)
        queued, behind = engine.submit(observation()), engine.submit(observation(1.0))
        assert queued.cancel()
        assert not running.cancel()
        gate.open.set()
        assert behind.result(30).actions.shape == (3, 2)
        with pytest.raises(CancelledError):
            queued.result()
        assert replica(engine)["done"] == 2


def test_submit_keeps_the_order_of_one_thread() -> None:
    finished: list[int] = []
    with open_engine() as engine:
        futures = [engine.submit(observation(float(i))) for i in range(20)]
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: finished.append(i))
        results = [f.result(30) for f in futures]
    assert finished == sorted(finished)
    assert len({tuple(r.actions.ravel()) for r in results}) == 20


def test_submit_and_step_from_many_threads_run_one_at_a_time() -> None:
    with open_engine(Gate) as engine:
        want = {i: engine.step(observation(i / 10)).actions for i in range(8)}
        problems: list[Any] = []

        def work(number: int) -> None:
            try:
                for i in range(8):
                    request = observation(i / 10)
                    got = engine.step(request) if number % 2 else engine.submit(request).result(30)
                    if not np.array_equal(got.actions, want[i]):
                        problems.append((number, i))
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert problems == []
        assert engine.adapter.most == 1  # type: ignore[attr-defined]
        stats = replica(engine)
        assert (stats["done"], stats["failed"], stats["in_flight"]) == (56, 0, 0)


def test_an_error_reaches_its_own_future_with_its_type_and_the_next_request_works() -> None:
    with open_engine() as engine:
        before = engine.submit(observation())
        bad = engine.submit(Observation(state=[1.0]))
        after = engine.submit(observation())
        assert np.array_equal(before.result(30).actions, after.result(30).actions)
        with pytest.raises(RequestError, match="4 values"):
            bad.result(30)


# ---------------------------------------------------------------- a failed forward


class Poisoned(ToyAdapter):
    """NaN, or an exception, in the network for states that say so; taints a buffer meanwhile."""

    name = "toy-poisoned"

    def cache(self) -> Any:
        from phyai.types import BufferSpec

        return lambda key: {
            **ToyAdapter.cache(self)(key),
            "leftover": BufferSpec((), torch.float32),
        }

    def denoiser(self) -> Any:
        policy = self.policy

        class Network(torch.nn.Module):
            prediction = "clean"

            def forward(self, x: Any, step: Any, cache: Any) -> Any:
                out = policy(x, step, cache)
                tainted = cache["leftover"].clone()
                first = float(cache.inputs["state"][0, 0])
                if first >= 7.0:
                    cache["leftover"].fill_(float("nan"))
                    tainted = cache["leftover"]
                if first == 8.0:
                    raise MemoryError("in the middle")
                return {"action": out["action"] + 0.0 * tainted[:, None, None]}

        return Network()


@pytest.mark.parametrize(("first", "error"), [(7.0, ActionRejected), (8.0, MemoryError)])
def test_nothing_of_a_failed_forward_reaches_the_next_request(
    first: float, error: type[Exception]
) -> None:
    with open_engine(Poisoned) as engine:
        want = engine.step(observation()).actions
        for request in (observation(first), ToyRequest(torch.full((1, STATE), first))):
            with pytest.raises(error):
                engine.step(request)
            assert engine.core.runner._bound == {}
            assert engine.core.services.memory.nbytes == 0
            assert np.array_equal(engine.step(observation()).actions, want)
            assert engine.core.services.memory.nbytes > 0


def test_a_blocked_chunk_keeps_the_cache_because_its_numbers_are_sound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.core.test_contract_hooks import too_far, validator
    from tests.core.toy_adapter import use_hooks

    use_hooks(monkeypatch, limits=validator(too_far))
    with open_engine() as engine:
        with pytest.raises(ActionRejected):
            engine.step(observation(50.0))
        assert len(engine.core.runner._bound) == 1


# ---------------------------------------------------------------- stats and timing


def test_stats_count_and_give_percentiles() -> None:
    with open_engine() as engine:
        fresh = replica(engine)
        assert (fresh["done"], fresh["p50_ms"], fresh["p99_ms"]) == (0, None, None)
        for i in range(5):
            engine.step(observation(float(i)))
        with pytest.raises(RequestError):
            engine.step([])
        stats = engine.stats()
    assert (stats["plugin"], stats["mode"]) == ("toy", "inline")
    (one,) = stats["replicas"]
    assert (one["id"], one["state"], one["done"], one["failed"]) == (0, "ready", 5, 1)
    assert (one["in_flight"], one["restarts"]) == (0, 0)
    assert 0 < one["p50_ms"] <= one["p95_ms"] <= one["p99_ms"]
    assert one["memory_bytes"] == 4 * (STATE + STATE + 6 + 6) + 1
    assert one["graphs"]["backend"] == "eager"


def test_in_flight_counts_the_running_and_the_waiting() -> None:
    with open_engine(Gate) as engine:
        gate: Any = engine.adapter
        futures = [engine.submit(observation(9.0)), engine.submit(observation())]
        assert gate.entered.wait(30)
        assert replica(engine)["in_flight"] == 2
        gate.open.set()
        for future in futures:
            future.result(30)


def test_a_chunk_carries_the_time_of_each_stage_and_the_total_counts_nothing_twice() -> None:
    with open_engine(Gate) as engine:
        gate: Any = engine.adapter
        engine.submit(observation(9.0))
        assert gate.entered.wait(30)
        results: list[Any] = []
        blocked = threading.Thread(target=lambda: results.append(engine.step(observation())))
        blocked.start()
        threading.Event().wait(0.3)  # waits for the lock meanwhile
        gate.open.set()
        blocked.join(30)
    timing = results[0].timing
    assert set(timing) == {
        "queue",
        "prepare",
        "load",
        "encode",
        "solve",
        "output",
        "validate",
        "total",
    }
    stages = sum(ms for name, ms in timing.items() if name != "total")
    assert all(ms >= 0 for ms in timing.values())
    assert timing["queue"] > 10
    assert stages <= timing["total"] < stages + 0.5 * timing["queue"]


def test_close_waits_for_a_request_that_is_being_prepared() -> None:
    entered, go = threading.Event(), threading.Event()
    seen: list[str] = []

    class Slow(ToyAdapter):
        name = "slow"

        def prepare(self, request: Any) -> Prepared:
            entered.set()
            assert go.wait(10)
            seen.append("prepared")
            return super().prepare(request)

        def close(self) -> None:
            seen.append("closed")

    engine = open_engine(Slow)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            engine.step(observation())
        except EngineUnavailableError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert entered.wait(10)
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    go.set()
    closing.join(10)
    asking.join(10)
    assert seen == ["prepared", "closed"]
    assert len(errors) == 1
