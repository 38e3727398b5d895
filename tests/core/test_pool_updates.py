"""New weights of replicas of several ranks: what starts meanwhile, and what is taken back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from phyai.deployment.calls import Call, Replica
from phyai.deployment.dispatch import Dispatch
from phyai.deployment.members import Worker
from phyai.deployment.rank_weights import RankWeights
from phyai.errors import WeightUpdateError

NOTHING: Any = None


class Held(RankWeights):
    """Does something once, between the look at what is kept and what follows of it."""

    meanwhile: Callable[[], None] | None = None

    @property
    def kept(self) -> Any:
        found, self.meanwhile, act = self._kept, None, self.meanwhile
        if act is not None:
            act()
        return found

    @kept.setter
    def kept(self, value: Any) -> None:
        self._kept = value


class FakePool:
    """Workers that take over what they get, unless ``refuse`` raises; jobs run when told to."""

    def __init__(self, replicas: int) -> None:
        self.dispatch = Dispatch([("cpu", "cpu")] * replicas)
        self.workers = [
            Worker(NOTHING, NOTHING, replica=replica) for replica in self.dispatch.replicas
        ]
        self.members = set(self.workers)
        self.supervisor = self
        self.jobs: list[Callable[[], None]] = []
        self.got: dict[Worker, dict[str, float]] = {worker: {} for worker in self.workers}
        self.refuse: Callable[[Worker], None] = lambda worker: None
        self.weights = Held(self)  # type: ignore[arg-type]
        self.updating: threading.Thread | None = None

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self.weights.renew(self.workers[number])
        self.run()

    def soon(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def run(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()

    def on_own_thread(self) -> bool:
        return False

    def switched(self, replica: Replica, worker: Worker) -> None:
        self.dispatch.ready(replica, worker)

    def send_to(self, worker: Worker, call: Call) -> None:
        error = None
        try:
            self.refuse(worker)
            self.got[worker].update({name: float(t) for name, t in call.payload.items()})
        except WeightUpdateError as refused:
            error = refused
        self.dispatch.settle(worker.replica, call.id)
        if error is None:
            call.succeed(None)
        else:
            call.fail(error)

    def update(self, value: float) -> None:
        self.weights.update([("scale", torch.tensor(value))])

    def killed(self) -> list[int]:
        return [n for n, worker in enumerate(self.workers) if worker.killed_why is not None]


def at_the_same_time(pool: FakePool, value: float) -> Callable[[], None]:
    """Return what starts an update and lets it go as far as it can."""

    def act() -> None:
        pool.updating = threading.Thread(target=pool.update, args=(value,), daemon=True)
        pool.updating.start()
        pool.updating.join(0.2)  # longer, where it has to wait for us

    return act


@pytest.mark.parametrize("earlier", [False, True])
def test_an_update_never_misses_a_replica_that_gets_ready(earlier: bool) -> None:
    pool = FakePool(2)
    pool.start(0)
    if earlier:
        pool.update(1.0)
        pool.weights.renew(pool.workers[1])  # takes that over; what follows of it waits
    pool.weights.meanwhile = at_the_same_time(pool, 2.0)
    if earlier:
        pool.run()
    else:
        pool.weights.renew(pool.workers[1])
    assert pool.updating is not None
    pool.updating.join(60)
    pool.run()
    assert [replica.state for replica in pool.dispatch.replicas] == ["ready", "ready"]
    assert [pool.got[worker] for worker in pool.workers] == [{"scale": 2.0}] * 2
    assert pool.killed() == []


@pytest.mark.parametrize("earlier", [False, True])
def test_what_started_with_refused_weights_does_not_keep_them(earlier: bool) -> None:
    pool = FakePool(3)
    pool.start(0, 1)
    if earlier:
        pool.update(1.0)
    before = pool.weights.kept

    def refuse(worker: Worker) -> None:
        if worker is pool.workers[1]:
            pool.refuse = lambda worker: None
            pool.start(2)  # a replica gets ready with the new weights, which this one refuses
            raise WeightUpdateError("no room.")

    pool.refuse = refuse
    with pytest.raises(WeightUpdateError, match="no room"):
        pool.update(2.0)
    pool.run()
    assert pool.killed() == [0, 2]
    assert pool.weights.kept is before
    assert pool.got[pool.workers[1]] == ({"scale": 1.0} if earlier else {})


@pytest.mark.parametrize("earlier", [False, True])
def test_what_is_still_starting_takes_over_what_stays(earlier: bool) -> None:
    pool = FakePool(2)
    pool.start(0)
    if earlier:
        pool.update(1.0)

    def refuse(worker: Worker) -> None:
        pool.refuse = lambda worker: None
        pool.weights.renew(pool.workers[1])  # it has the new ones, and did not say so yet
        raise WeightUpdateError("no room.")

    pool.refuse = refuse
    with pytest.raises(WeightUpdateError, match="no room"):
        pool.update(2.0)
    pool.run()
    if earlier:  # every name has an older value to go back to
        assert pool.got[pool.workers[1]] == {"scale": 1.0}
        assert pool.dispatch.replicas[1].state == "ready"
    assert pool.killed() == ([] if earlier else [1])


def test_a_worker_that_accepted_an_update_is_not_ended_by_a_later_one() -> None:
    pool = FakePool(2)
    pool.start(0, 1)
    pool.update(1.0)
    pool.update(2.0)
    pool.run()
    assert pool.killed() == []
    assert all(worker.weights is pool.weights.kept for worker in pool.workers)
