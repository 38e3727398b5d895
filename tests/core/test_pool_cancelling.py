"""Cancelling the requests of a pool: its own side decides, and the worker leaves the work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phyai import DeploymentConfig
from phyai.adapter import AdapterArgs
from phyai.core_setup import on_device
from phyai.deployment.answers import Answer
from phyai.deployment.calls import Call, Replica
from phyai.deployment.channel import Channel
from phyai.deployment.launch import WorkerOrder
from phyai.deployment.pool import PoolSpec, ReplicaPool
from phyai.deployment.values import encode
from phyai.deployment.worker import Worker
from phyai.engine_config import DeviceConfig, EngineConfig, ParallelConfig, RuntimeConfig
from phyai.request_loop import RequestLoop
from phyai.request_watch import Watch


def config(wait_ms: float = 0.0, tp: int = 1) -> EngineConfig:
    return EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        runtime=RuntimeConfig(num_threads=1, batch_wait_ms=wait_ms),
        parallel=ParallelConfig(tp_size=tp),
    )


# ---------------------------------------------------------------- the pool's side, without workers


class FakePool(ReplicaPool):
    """A pool whose workers are names; ``sent`` and ``stopped`` are the calls they were told of."""

    def __init__(self, *, stoppable: bool, wait_ms: float = 0.0, retry: bool = False) -> None:
        deployment = DeploymentConfig.local(retry_on_worker_death=retry)
        super().__init__(
            PoolSpec("fake", AdapterArgs(), config(wait_ms), None, deployment, (("cpu",),) * 2)
        )
        self.sent: list[Call] = []
        self.stopped: list[int] = []
        described = {"max_rows": 2, "stoppable": stoppable}
        for replica in self.dispatch.replicas:
            self._ready(replica, f"worker {replica.id}", {}, described)

    def _open(self) -> None: ...

    def _launch(self, replica: Replica) -> None: ...

    def _send(self, replica: Replica, call: Call) -> None:
        self.sent.append(call)
        call.future.stop = lambda: self.stopped.append(call.id)

    def _kill(self, replica: Replica, why: str) -> None: ...

    def _end(self) -> None: ...

    def answer(self, number: int, result: Any = "done", error: Exception | None = None) -> None:
        """Have the worker of a call that was sent answer it."""
        call = self.sent[number]
        replica = next(r for r in self.dispatch.replicas if call.id in r.calls)
        self._settled(replica, call.id, result=lambda: result, error=error)

    def counts(self) -> tuple[int, int, int]:
        found = self.stats()
        in_flight, done, failed = (
            sum(replica[name] for replica in found) for name in ("in_flight", "done", "failed")
        )
        return in_flight, done, failed


def test_a_request_of_single_steps_is_cancelled_until_its_result_arrives() -> None:
    pool = FakePool(stoppable=True)
    first, second = pool.submit(1), pool.submit(2)
    assert first.running()
    assert first.cancel()
    assert pool.stopped == [pool.sent[0].id]
    assert not first.done()  # its worker ends the step, and then says so
    pool.answer(0, error=CancelledError())
    with pytest.raises(CancelledError):
        first.result(timeout=0)
    assert first.cancelled()
    pool.answer(1)
    assert not second.cancel()
    assert second.result(timeout=0) == "done"
    assert pool.counts() == (0, 1, 0)
    assert "stoppable" not in pool.describe()


@pytest.mark.parametrize("error", [None, RuntimeError("it failed meanwhile")])
def test_what_a_worker_still_makes_of_it_is_dropped(error: Exception | None) -> None:
    pool = FakePool(stoppable=True)
    future = pool.submit(1)
    assert future.cancel()
    pool.answer(0, error=error)
    assert future.cancelled()
    assert pool.counts() == (0, 0, 0)


def test_a_request_in_one_loop_is_cancelled_while_another_is_before_it() -> None:
    pool = FakePool(stoppable=False)
    futures = [pool.submit(n) for n in range(4)]  # two for each replica
    assert [future.cancel() for future in futures] == [False, False, True, True]
    assert pool.stopped == [pool.sent[2].id, pool.sent[3].id]
    for number in range(4):
        pool.answer(number)
    assert [future.cancelled() for future in futures] == [False, False, True, True]
    assert pool.counts() == (0, 2, 0)


def test_a_worker_that_joins_may_run_as_many_at_once_as_its_batch_holds() -> None:
    pool = FakePool(stoppable=False, wait_ms=1.0)
    futures = [pool.submit(n) for n in range(6)]  # max_rows = 2
    assert [future.cancel() for future in futures] == [False] * 4 + [True] * 2


def test_what_was_cancelled_is_not_sent_again_when_its_worker_dies() -> None:
    pool = FakePool(stoppable=True, retry=True)
    futures = [pool.submit(1), pool.submit(2)]
    replica = pool.dispatch.replicas[0]
    assert futures[0].cancel()
    pool._died(replica, replica.carrier, "a worker that is gone.")
    assert futures[0].cancelled()
    assert len(pool.sent) == 2
    other = pool.dispatch.replicas[1]
    pool._died(other, other.carrier, "a worker that is gone.")  # nobody is left to take it
    assert not futures[1].cancelled()
    assert futures[1].exception(timeout=0) is not None


def test_what_was_cancelled_while_it_was_kept_back_is_never_sent() -> None:
    pool = FakePool(stoppable=True)
    replica, call = pool.dispatch.replicas[0], Call("step", None, watch=Watch(stoppable=True))
    pool.dispatch.begin(replica, call)
    assert call.future.cancel()  # no worker to tell
    pool._send_or_fail(replica, call)
    assert pool.sent == []
    assert call.future.cancelled()
    assert pool.counts() == (0, 0, 0)


def test_a_settled_answer_knows_nothing_of_its_worker() -> None:
    pool = FakePool(stoppable=True)
    future = pool.submit(1)
    assert isinstance(future, Answer)
    pool.answer(0)
    assert (future.listen, future.stop, future.waits) == (None, None, None)
    assert not future.cancel()
    assert pool.stopped == []


def test_a_worker_whose_steps_arrive_is_not_stuck() -> None:
    pool, heard, now = FakePool(stoppable=True), list[tuple[int, int]](), [0.0]
    pool.dispatch.clock = lambda: now[0]
    for replica in pool.dispatch.replicas:
        pool.dispatch.ready(replica, replica.carrier)
    pool.submit(1, on_progress=lambda *told: heard.append(told))
    replica, call = pool.dispatch.replicas[0], pool.sent[0]
    for step in (1, 2, 3):
        now[0] += 40.0
        pool._stepped(replica, call.id, step, 4)
    assert pool.dispatch.stuck(60.0) == []
    assert heard == [(1, 4), (2, 4), (3, 4)]
    now[0] += 61.0
    assert pool.dispatch.stuck(60.0) == [replica]
    pool._stepped(replica, call.id + 1, 4, 4)  # of a call that is over


# ---------------------------------------------------------------- the worker's side, in here


@dataclass
class FakeCore:
    """``step`` returns the request, or ends as its watch says."""

    stoppable: bool
    ran: list[Any] = field(default_factory=list)
    updates: list[Any] = field(default_factory=list)
    ranks: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    config: EngineConfig = field(default_factory=config)

    def watch(self, on_progress: Any = None) -> Watch:
        return Watch(on_progress, stoppable=self.stoppable)

    def step(self, request: Any, *, watch: Watch | None, **_: Any) -> Any:
        self.ran.append(request)
        watch = watch or Watch()
        watch.tell(1, 2)
        if watch.seal():
            raise CancelledError
        return request

    def update_weights(self, items: Any) -> None:
        self.updates.append((len(self.ran), dict(items)))


@pytest.fixture
def made() -> Iterator[Callable[[bool], tuple[Worker, Channel, FakeCore]]]:
    ends: list[Channel] = []

    def make(stoppable: bool) -> tuple[Worker, Channel, FakeCore]:
        here, there = (
            Channel(sock, role)  # type: ignore[arg-type]
            for sock, role in zip(Channel.pair(), ("parent", "worker"), strict=True)
        )
        ends.extend((here, there))
        core, order = FakeCore(stoppable), WorkerOrder(0, 1, 1.0, None, False)
        core.sessions = SimpleNamespace(reset=None, end=None)  # type: ignore[attr-defined]
        return Worker(core, there, order), here, core  # type: ignore[arg-type]

    yield make
    for end in ends:
        end.close()


def say(worker: Worker, here: Channel, kind: str, call_id: int, value: Any) -> None:
    here.send(kind, call_id, *encode(value))
    worker._hear(wait=True)


def heard(here: Channel) -> list[tuple[str, int, Any]]:
    found = []
    while (message := here.receive()) is not None:
        value = type(message.error()) if message.kind == "failure" else message.value()
        found.append((message.kind, message.call_id, value))
    return found


def begin_next(worker: Worker) -> Any:
    worker._running = worker._queue.popleft()
    return worker._running


@pytest.mark.parametrize("stoppable", [False, True])
def test_a_worker_answers_for_what_it_has_not_begun_at_once(made: Any, stoppable: bool) -> None:
    worker, here, core = made(stoppable)
    for number in (1, 2, 3):
        say(worker, here, "step", number, f"request {number}")
    running = begin_next(worker)
    say(worker, here, "cancel", 0, 2)
    assert heard(here) == [("failure", 2, CancelledError)]
    worker._run(running)
    worker._run(begin_next(worker))
    say(worker, here, "cancel", 0, 2)  # again, or of what is over: nothing
    say(worker, here, "cancel", 0, 1)
    assert core.ran == ["request 1", "request 3"]
    assert heard(here) == [("result", 1, "request 1"), ("result", 3, "request 3")]


def test_a_worker_stops_what_runs_between_two_steps(made: Any) -> None:
    worker, here, _ = made(True)
    say(worker, here, "watched_step", 1, "request")
    running = begin_next(worker)
    say(worker, here, "cancel", 0, 1)
    worker._run(running)
    assert heard(here) == [("stepped", 1, (1, 2)), ("failure", 1, CancelledError)]


def test_a_worker_that_cannot_stop_answers(made: Any) -> None:
    worker, here, _ = made(False)
    say(worker, here, "step", 1, "request")
    running = begin_next(worker)
    say(worker, here, "cancel", 0, 1)
    worker._run(running)
    assert heard(here) == [("result", 1, "request")]


def test_new_weights_are_taken_over_in_turn_and_keep_nobody_from_hearing(made: Any) -> None:
    worker, here, core = made(False)
    say(worker, here, "step", 1, "old")
    say(worker, here, "update_weights", 2, {"scale": torch.ones(1)})
    say(worker, here, "step", 3, "new")
    assert core.updates == []
    assert heard(here) == []
    while worker._queue:
        worker._run(begin_next(worker))
    assert [number for number, _ in core.updates] == [1]
    assert [call for _, call, _ in heard(here)] == [1, 2, 3]


def test_threads_of_a_core_have_its_device(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's current device is a thread's own; new threads would begin with the first one."""
    placed: list[tuple[str, int | None]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: placed.append((threading.current_thread().name, device.index)),
    )
    for name in ("cpu", "cuda"):
        on_device(torch.device(name))
    assert placed == []
    worker, here, core = made(False)
    core.device = torch.device("cuda", 1)
    say(worker, here, "step", 1, "request")
    ears = threading.Thread(target=worker._hear_meanwhile, name="ears")
    ears.start()
    ears.join()
    loop = RequestLoop(core)
    future: Future[Any] = Future()
    loop.submit("another", future)
    assert future.result(30) == "another"
    loop.close()
    assert placed == [("ears", 1), ("phyai-engine", 1)]
