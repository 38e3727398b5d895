"""Answers and their callbacks: which thread hears, settles and calls back. Without workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from phyai.deployment.answers import Listening
from phyai.deployment.calls import Call, Replica
from phyai.deployment.channel import Channel, Message
from phyai.deployment.dispatch import Dispatch
from phyai.deployment.values import encode


class FakeSupervisor:
    """Keeps what is to be done soon; counts what is paused; ``interrupt`` raises in ``resume``."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.paused = 0
        self.interrupt = False

    def pause(self, _: Any) -> None:
        self.paused += 1

    def resume(self, _: Any) -> None:
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt
        self.paused -= 1

    def soon(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def run(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()


class World:
    """One worker at the other end of ``there``, one call, and a pool that settles it."""

    def __init__(self) -> None:
        here, there = Channel.pair()
        self.here, self.there = Channel(here, "parent"), Channel(there, "worker")
        self.dispatch = Dispatch([("cpu",)])
        self.supervisor = FakeSupervisor()
        self.replica: Replica = self.dispatch.replicas[0]
        self.worker = SimpleNamespace(
            replica=self.replica, channel=self.here, listening=threading.Lock()
        )
        self.dispatch.ready(self.replica, self.worker)
        self.call = Call("step", None)
        self.dispatch.choose(self.call)
        self.before: Callable[[], None] = lambda: None
        listening = Listening(self)  # type: ignore[arg-type]
        worker: Any = self.worker
        self.call.future.listen = partial(listening.wait, worker, self.call.id)

    def on_own_thread(self) -> bool:
        return False

    def heard_from(self, worker: Any, message: Message) -> None:
        self.before()
        if (call := self.dispatch.settle(self.replica, message.call_id)) is not None:
            call.succeed(message.value())

    def answer(self) -> None:
        self.there.send("result", self.call.id, *encode("done"), reply=True)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.here.close()
    made.there.close()


def test_an_answer_that_is_there_is_taken_without_any_time(world: World) -> None:
    future = world.call.future
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    world.answer()
    assert future.result(timeout=0) == "done"
    assert world.supervisor.paused == 0


def test_an_answer_behind_other_messages_is_taken_without_any_time(world: World) -> None:
    for number in range(3):
        world.there.send("beat", 0, *encode(number))
    world.answer()
    assert world.call.future.exception(timeout=-1.0) is None
    assert len(world.supervisor.jobs) == 3


def test_a_callback_added_while_the_answer_is_taken_runs_on_the_pools_thread(world: World) -> None:
    future, threads = world.call.future, list[int]()
    world.before = lambda: future.add_done_callback(lambda _: threads.append(threading.get_ident()))
    world.answer()
    assert future.result(timeout=10) == "done"
    assert threads == []
    pools = threading.Thread(target=world.supervisor.run)
    pools.start()
    pools.join()
    assert threads == [pools.ident]
    future.add_done_callback(lambda _: threads.append(threading.get_ident()))  # done: at once
    assert threads[1:] == [threading.get_ident()]


def test_an_answer_somebody_wants_to_be_called_for_is_left_to_the_pool(world: World) -> None:
    future, heard = world.call.future, list[Any]()
    future.add_done_callback(lambda done: heard.append(done.result()))
    world.answer()
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    world.supervisor.run()
    assert heard == ["done"]


@pytest.mark.parametrize("answered", [True, False])
def test_ctrl_c_after_waiting_leaves_no_call_in_flight_nor_a_deaf_pool(
    world: World, answered: bool
) -> None:
    world.supervisor.interrupt = True
    if answered:
        world.answer()
    with pytest.raises(KeyboardInterrupt):
        world.call.future.result(timeout=0.01)
    assert not world.worker.listening.locked()
    world.supervisor.run()
    assert world.supervisor.paused == 0
    # With the answer in hand it is lost; else it still comes.
    assert world.call.future.done() == answered
    assert world.replica.in_flight == (0 if answered else 1)


def test_ctrl_c_while_the_answer_is_read_ends_the_call(world: World) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    world.before = interrupted
    world.answer()
    with pytest.raises(KeyboardInterrupt):
        world.call.future.result(timeout=10)
    assert world.replica.in_flight == 0
    assert isinstance(world.call.future.exception(timeout=0), KeyboardInterrupt)
