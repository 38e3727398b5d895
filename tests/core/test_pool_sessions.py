"""Sessions and weights of a local pool: pinned, lost with their replica, moved by an update."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from phyai import Engine
from phyai.errors import (
    RequestError,
    SessionClosed,
    SessionLost,
    SessionReplicaDied,
    SessionUnknown,
    WeightUpdateError,
)
from tests.core.pool_adapter import ask, installed, number
from tests.core.test_pool import all_ready, died, gone, pids, pool, replicas, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with installed(tmp_path_factory.mktemp("antics")) as cls:
        yield cls


def move(engine: Engine, session: str, seq: int, by: float = 1.0) -> float:
    return number(engine.step(ask("sum", by, session_id=session, seq=seq)))


def home(engine: Engine, session: str) -> int:
    replica = engine._back.dispatch.replica_of(session)  # type: ignore[union-attr]
    assert replica is not None
    return int(replica.id)


def test_sessions_are_pinned_and_lost_with_their_replica(args: Any) -> None:
    with pool(args(kept=True)) as engine:
        names = [f"robot {n}" for n in range(6)]
        for seq in range(3):
            for name in names:
                assert move(engine, name, seq) == seq + 1
        homes = {name: home(engine, name) for name in names}
        assert sorted(homes.values()) == [0, 0, 0, 1, 1, 1]
        assert move(engine, names[0], 2) == 3.0  # the stored result
        with pytest.raises(RequestError, match=r"must be 3 \(the next one\) or 2"):
            move(engine, names[0], 7)
        with pytest.raises(SessionUnknown, match="is not known here"):
            move(engine, "nobody", 4)
        engine.reset_session(names[1])
        assert move(engine, names[1], 0) == 1.0
        engine.close_session(names[2])
        with pytest.raises(SessionClosed):
            move(engine, names[2], 3)
        assert move(engine, names[2], 0) == 1.0
        on_two = [next(n for n in names if homes[n] == place) for place in (0, 1)]
        rows = [ask("sum", 1.0, session_id=name, seq=3) for name in on_two]
        with pytest.raises(RequestError, match="must live on one replica"):
            engine.step(rows)
        victim = replicas(engine)[0]["pid"]
        os.kill(victim, signal.SIGKILL)
        all_ready_again(engine, victim)
        for name in (n for n in names[3:] if homes[n] == 1):
            assert move(engine, name, 3) == 4.0
        for name in (n for n in names[3:] if homes[n] == 0):
            with pytest.raises(SessionReplicaDied, match="Send seq 0 to open it anew") as caught:
                move(engine, name, 3)
            assert isinstance(caught.value, SessionLost)
            engine.reset_session(name)  # nothing to reset
            with pytest.raises(SessionReplicaDied):
                move(engine, name, 3)
            assert move(engine, name, 0, 5.0) == 5.0
            assert move(engine, name, 1, 5.0) == 10.0


def all_ready_again(engine: Engine, victim: int) -> None:
    until(lambda: replicas(engine)[0]["pid"] != victim)
    all_ready(engine)


def test_new_weights_reach_every_replica_and_sessions_move(args: Any) -> None:
    with pool(args(kept=True)) as engine:
        names = ["a", "b", "c"]
        for name in names:
            assert move(engine, name, 0, 2.0) == 2.0
        engine.close_session("c")
        before = pids(engine)
        homes = {name: home(engine, name) for name in ("a", "b")}
        slow = [engine.submit(ask("sleep", 1.0)) for _ in range(2)]
        assert engine.version == 0
        assert engine.update_weights_all({"scale": torch.tensor([3.0])}) == 1
        assert {number(engine.step(ask("scale"))) for _ in range(4)} == {3.0}
        assert [number(future.result(timeout=60)) for future in slow] == [1.0, 1.0]
        gone(before)  # the old ones finished, and ended
        assert {name: home(engine, name) for name in ("a", "b")} == homes
        assert move(engine, "a", 0, 2.0) == 2.0  # the stored result went with it
        assert move(engine, "a", 1, 2.0) == 4.0
        assert move(engine, "b", 1, 3.0) == 5.0
        with pytest.raises(SessionClosed):
            move(engine, "c", 1)
        assert engine.update_weights_all([("scale", torch.tensor([4.0]))], version=17) == 17
        assert engine.version == 17
        assert move(engine, "a", 2, 2.0) == 6.0
        died(engine.submit(ask("kill")))
        all_ready(engine)
        assert {number(engine.step(ask("scale"))) for _ in range(4)} == {
            4.0
        }  # also after a restart
        everybody = pids(engine)
    gone(everybody)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"scal": torch.ones(1)}, "KeyError: 'scal'"),
        ({"scale": -torch.ones(1)}, "ValueError: scale must be positive"),
        ({"scale": torch.tensor([13.0])}, "exited with code 13"),
        ({"scale": object()}, r"weights\[0\]\[1\]"),
    ],
)
def test_an_update_that_fails_changes_nothing(
    args: Any, weights: dict[str, Any], words: str
) -> None:
    with pool(args(kept=True)) as engine:
        assert move(engine, "a", 0) == 1.0
        workers = {replica["pid"] for replica in replicas(engine)}
        with pytest.raises(WeightUpdateError, match=words):
            engine.update_weights_all(weights)
        assert engine.version == 0
        assert {number(engine.step(ask("pid"))) for _ in range(2)} == workers
        assert {number(engine.step(ask("scale"))) for _ in range(2)} == {1.0}
        assert move(engine, "a", 1) == 2.0
        if words.startswith("ValueError"):
            engine.update_weights_all({"scale": torch.tensor([2.0])})
            assert number(engine.step(ask("scale"))) == 2.0
            assert move(engine, "a", 2) == 3.0
        everybody = pids(engine)
    gone(everybody)


def test_no_request_is_lost_while_weights_change(args: Any) -> None:
    with pool(args(kept=True)) as engine:
        stop, errors, seqs = threading.Event(), [], [0, 0]

        def drive(robot: int) -> None:
            try:
                while not stop.is_set():
                    seq = seqs[robot]
                    assert move(engine, f"robot {robot}", seq) == seq + 1
                    assert number(engine.step(ask("scale"))) in (1.0, 2.0, 3.0)
                    seqs[robot] += 1
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=drive, args=(robot,)) for robot in range(2)]
        for thread in threads:
            thread.start()
        for value in (2.0, 3.0):
            engine.update_weights_all({"scale": torch.tensor([value])})
        until(lambda: errors or min(seqs) > 2)
        stop.set()
        for thread in threads:
            thread.join()
        assert not errors
        assert number(engine.step(ask("scale"))) == 3.0


def test_without_a_loader_weights_stay(args: Any) -> None:
    with pool(args()) as engine:
        engine.update_weights_all({"scale": torch.tensor([2.0])})
        workers = {replica["pid"] for replica in replicas(engine)}
        loaders = pids(engine) - workers
        for loader in loaders:
            os.kill(loader, signal.SIGKILL)
        gone(loaders)
        with pytest.raises(WeightUpdateError, match="need the loader"):
            engine.update_weights_all({"scale": torch.tensor([3.0])})
        assert {number(engine.step(ask("scale"))) for _ in range(2)} == {2.0}
        died(engine.submit(ask("kill")))
        error = wait_dead(engine)
        assert "weights of the last update" in error
        assert {number(engine.step(ask("scale"))) for _ in range(2)} == {
            2.0
        }  # the one that is left


def wait_dead(engine: Engine) -> str:
    until(lambda: "dead" in [replica["state"] for replica in replicas(engine)])
    return next(str(r["last_error"]) for r in replicas(engine) if r["state"] == "dead")


def test_plugins_that_do_not_share_memory_say_so(args: Any) -> None:
    with pool(args(thread=True), 1) as engine:
        with pytest.raises(WeightUpdateError, match="where they share memory"):
            engine.update_weights_all({"scale": torch.tensor([3.0])})
        assert number(engine.step(ask("scale"))) == 1.0
