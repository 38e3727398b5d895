"""Who hears what: a worker that runs a request, and a caller that waits for its answer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from phyai import Engine
from phyai.deployment.ears import Ears
from phyai.deployment.supervisor import READ, WRITE, Supervisor
from phyai.errors import EngineUnavailableError
from phyai.types import Observation
from tests.core.pool_adapter import ask, installed, number
from tests.core.test_pool import all_ready, died, gone, pids, pool, replicas, until


class Heard:
    """What came through a socket, and on which threads; ``free`` holds the one that hears."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.words: list[bytes] = []
        self.threads: set[str] = set()
        self.free = threading.Event()
        self.free.set()
        self.came = threading.Semaphore(0)
        self.ears = Ears(sock, self)

    def __call__(self) -> None:
        try:
            word = self.sock.recv(100, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        self.words.append(word)
        self.threads.add(threading.current_thread().name)
        self.came.release()
        assert self.free.wait(10)

    def await_one(self) -> None:
        assert self.came.acquire(timeout=10)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Heard]]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        heard = Heard(there)
        yield here, heard
        heard.ears.close()


def test_what_comes_meanwhile_is_heard_in_order_on_another_thread(
    ends: tuple[socket.socket, Heard],
) -> None:
    here, heard = ends
    here.send(b"before")
    with heard.ears:
        heard.await_one()
        for word in (b"one", b"two", b"three"):
            here.send(word)
        for _ in range(3):
            heard.await_one()
    here.send(b"after")
    assert heard.sock.recv(100) == b"after"  # nobody else takes it
    assert heard.words == [b"before", b"one", b"two", b"three"]
    assert heard.threads == {"phyai-ears"}


def test_leaving_waits_for_what_is_being_heard(ends: tuple[socket.socket, Heard]) -> None:
    here, heard = ends
    left = threading.Event()
    heard.free.clear()

    def work() -> None:
        with heard.ears:
            heard.await_one()
        left.set()

    here.send(b"slow")
    thread = threading.Thread(target=work)
    thread.start()
    assert not left.wait(0.05)
    heard.free.set()
    assert left.wait(10)
    thread.join()


def test_nothing_is_lost_or_heard_twice_however_short_the_work_is(
    ends: tuple[socket.socket, Heard],
) -> None:
    here, heard = ends
    words = [b"%d" % n for n in range(300)]
    sender = threading.Thread(target=lambda: [here.send(word) for word in words])
    sender.start()
    while len(heard.words) < len(words):
        with heard.ears:
            pass
        heard()
    sender.join()
    assert heard.words == words


def test_who_waits_for_room_to_write_is_called_while_others_read() -> None:
    here, there = socket.socketpair()
    calls: list[int] = []
    came = threading.Semaphore(0)

    def callback(events: int) -> None:
        calls.append(events)
        supervisor.want_writing(here, False)
        came.release()

    supervisor = Supervisor(lambda: 1.0)
    supervisor.start()
    with here, there:
        supervisor.watch(here, callback)
        supervisor.want_writing(here, True)
        assert came.acquire(timeout=10)
        supervisor.pause(here)
        supervisor.want_writing(here, True)
        assert came.acquire(timeout=10)
        there.send(b"for the one who paused")
        supervisor.want_writing(here, True)
        assert came.acquire(timeout=10)
        assert calls == [WRITE] * 3
        supervisor.resume(here)
        assert came.acquire(timeout=10)
        assert calls[3] == READ
        supervisor.forget(here)
        supervisor.stop()


# ---------------------------------------------------------------- pools


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with installed(tmp_path_factory.mktemp("antics")) as cls:
        yield cls


@pytest.fixture(scope="module")
def one(args: Any) -> Iterator[Engine]:
    """A pool of one replica, with sessions."""
    with pool(args(kept=True), 1, max_restarts=9) as engine:
        yield engine


def listens(engine: Engine) -> bool:
    """Return whether some thread hears a worker itself."""
    members = engine._back.members  # type: ignore[union-attr]
    return any(member.listening.locked() for member in members)


@pytest.mark.slow
def test_a_worker_hears_of_sessions_and_more_requests_while_one_runs(one: Engine) -> None:
    one.step(ask("sum", 1.0, session_id="arm", seq=0))
    long = one.submit(ask("sleep", 2.0))
    queued = [one.submit(ask("", float(n))) for n in range(40)]
    one.reset_session("arm")
    assert not long.done()
    found = [number(future.result(30)) for future in (long, *queued)]
    assert found == [
        2.0,
        *map(float, range(40)),
    ]
    assert number(one.step(ask("sum", 5.0, session_id="arm", seq=0))) == 5.0


@pytest.mark.slow
def test_requests_of_a_worker_run_in_the_order_they_were_sent(one: Engine) -> None:
    order: list[int] = []
    futures = []
    for n in range(30):
        futures.append(one.submit(ask("sleep", 0.005 * (n % 3))))
        futures[-1].add_done_callback(lambda _, n=n: order.append(n))  # type: ignore[misc]
        time.sleep(0.003 * (n % 2))
    wait(futures)
    until(lambda: len(order) == 30)
    assert order == list(range(30))


@pytest.mark.slow
def test_a_caller_that_waits_hears_its_answer_itself_and_beats_go_on(one: Engine) -> None:
    future, seen = one.submit(ask("sleep", 2.0)), []

    def watch() -> None:
        until(lambda: listens(one))
        while not future.done():
            seen.append(replicas(one)[0]["silent_s"])
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    assert number(future.result(30)) == 2.0
    thread.join()
    # It told meanwhile, every 0.2 s: between two looks its silence had begun anew.
    assert [now for before, now in pairwise(seen[:-1]) if now < before]
    assert not listens(one)


@pytest.mark.slow
def test_waiting_for_so_long_and_errors(one: Engine) -> None:
    future = one.submit(ask("sleep", 2.0))
    for _ in range(3):
        with pytest.raises(TimeoutError):
            future.result(timeout=0.05)
        with pytest.raises(TimeoutError):
            future.exception(timeout=0)
    assert future.exception(timeout=30) is None
    assert number(future.result()) == 2.0
    failing = one.submit(ask("raise", 3.0))
    assert "no such thing as 3.0" in str(failing.exception(timeout=30))
    with pytest.raises(ValueError, match="no such thing"):
        one.step(ask("raise", 3.0))


@pytest.mark.slow
def test_everybody_who_waits_for_one_answer_gets_it(one: Engine) -> None:
    with ThreadPoolExecutor(6) as threads:
        future = one.submit(ask("sleep", 0.25))
        waiting = [threads.submit(future.result, 30) for _ in range(3)]
        waiting += [threads.submit(lambda: wait([future], 30).done.pop().result())]
        waiting += [threads.submit(lambda: next(as_completed([future], 30)).result())]
        assert {number(each.result(30)) for each in waiting} == {0.25}


@pytest.mark.slow
def test_threads_that_each_wait_for_their_own(one: Engine) -> None:
    def ask_on(n: int) -> list[float]:
        return [number(one.submit(ask("", float(n * 100 + i))).result(30)) for i in range(50)]

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(ask_on, range(6)))
    assert found == [[float(n * 100 + i) for i in range(50)] for n in range(6)]
    assert replicas(one)[0]["in_flight"] == 0


@pytest.mark.slow
def test_asyncio_waits_while_a_thread_listens(one: Engine) -> None:
    async def both() -> list[float]:
        first = one.submit(ask("sleep", 0.5))
        thread = asyncio.to_thread(first.result, 30)
        second = asyncio.wrap_future(one.submit(ask("", 2.0)))
        return [number(answer) for answer in await asyncio.gather(thread, second)]

    assert asyncio.run(both()) == [0.5, 2.0]


@pytest.mark.slow
def test_callbacks_run_on_the_thread_of_the_pool_also_when_somebody_waits(one: Engine) -> None:
    names: list[str] = []
    future: Future[Any] = one.submit(ask("sleep", 0.2))
    future.add_done_callback(lambda _: names.append(threading.current_thread().name))
    late: Future[Any] = one.submit(ask("sleep", 1.0))
    future.result(30)

    def add_late() -> None:
        until(lambda: listens(one))
        late.add_done_callback(lambda _: names.append(threading.current_thread().name))

    thread = threading.Thread(target=add_late)
    thread.start()
    late.result(30)
    thread.join()
    until(lambda: len(names) == 2)
    assert names == ["phyai-pool"] * 2


@pytest.mark.slow
def test_ctrl_c_while_waiting_loses_no_answer(one: Engine) -> None:
    future = one.submit(ask("sleep", 2.0))
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until(lambda: listens(one))
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        future.result(30)
    thread.join()
    assert not listens(one)
    assert number(future.result(30)) == 2.0
    assert replicas(one)[0]["in_flight"] == 0


@pytest.mark.slow
def test_a_caller_hears_that_its_worker_died_or_that_its_engine_closed(args: Any) -> None:
    engine = pool(args(), 1, shutdown_timeout_s=0.5)
    everybody = pids(engine)
    pid = replicas(engine)[0]["pid"]
    running = engine.submit(ask("sleep", 60.0))
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    assert "SIGKILL" in str(died(running))
    all_ready(engine)
    everybody |= pids(engine)
    future = engine.submit(ask("sleep", 60.0))
    threading.Timer(0.2, engine.close).start()
    error = future.exception(timeout=30)
    assert isinstance(error, EngineUnavailableError)
    assert error.reason == "closed"
    gone(everybody)


@pytest.mark.slow
def test_large_requests_one_after_the_other_keep_their_memory(one: Engine) -> None:
    images = {"front": np.zeros((224, 224, 3), np.uint8)}
    files = []
    for n in range(30):
        assert number(one.step(Observation(images, [float(n)], ""))) == n
        files.append(len(os.listdir("/proc/self/fd")))
    assert files[-1] <= max(files[:5])
