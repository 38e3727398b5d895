"""Dispatch: choosing, pinning, losing and restarting, with made-up replicas and a made-up clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai.deployment.calls import Call, Replica
from phyai.deployment.dispatch import Dispatch
from phyai.deployment.requests import sessions_of
from phyai.errors import EngineUnavailableError, RequestError, SessionLost, SessionReplicaDied
from phyai.request_watch import Watch
from phyai.types import Observation


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def made(count: int, **options: int | float) -> tuple[Dispatch, Clock]:
    clock = Clock()
    dispatch = Dispatch([("cpu",)] * count, clock=clock, **options)  # type: ignore[arg-type]
    for replica in dispatch.replicas:
        dispatch.ready(replica, carrier=f"worker {replica.id}")
    return dispatch, clock


def step(*sessions: str, opens: tuple[str, ...] = ()) -> Call:
    return Call("step", None, sessions, frozenset(opens))


def send(dispatch: Dispatch, *sessions: str, opens: tuple[str, ...] = ()) -> tuple[Replica, Call]:
    call = step(*sessions, opens=opens)
    return dispatch.choose(call), call


def test_ties_rotate_and_the_least_loaded_is_next() -> None:
    dispatch, _ = made(3)
    sent = [send(dispatch) for _ in range(6)]
    assert [replica.id for replica, _ in sent] == [0, 1, 2, 0, 1, 2]
    replica, call = sent[1]
    dispatch.settle(replica, call.id)
    assert send(dispatch)[0].id == 1
    for replica, call in sent:
        dispatch.settle(replica, call.id)
    assert [replica["in_flight"] for replica in dispatch.stats()] == [0, 1, 0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=60), st.integers(1, 4))
def test_no_replica_has_two_more_than_another_that_is_free(
    events: list[tuple[bool, int]], count: int
) -> None:
    dispatch, _ = made(count)
    running: list[tuple[Replica, Call]] = []
    for sends, which in events:
        if sends or not running:
            before = [replica.in_flight for replica in dispatch.replicas]
            replica, call = send(dispatch)
            assert before[replica.id] == min(before)
            running.append((replica, call))
        else:
            replica, call = running.pop(which % len(running))
            assert dispatch.settle(replica, call.id) is call
            assert dispatch.settle(replica, call.id) is None
    assert sum(r.in_flight for r in dispatch.replicas) == len(running)


def test_a_session_stays_where_it_was_opened() -> None:
    dispatch, _ = made(3)
    home, _ = send(dispatch, "a", opens=("a",))
    other, _ = send(dispatch, "b", opens=("b",))
    assert home is not other
    for _ in range(5):
        assert send(dispatch, "a")[0] is home
    with pytest.raises(RequestError, match=r"must live on one replica; got 'a' on 0, 'b' on 1"):
        send(dispatch, "a", "b")
    assert send(dispatch, "a", "new", opens=("new",))[0] is home
    assert dispatch.replica_of("new") is home
    dispatch.unpin("a")
    assert dispatch.replica_of("a") is None


def test_sessions_spread_over_idle_replicas() -> None:
    dispatch, _ = made(2)
    homes = []
    for number in range(6):
        replica, call = send(dispatch, f"s{number}", opens=(f"s{number}",))
        dispatch.settle(replica, call.id)
        replica, call = send(dispatch)  # something else in between turns the rotation
        dispatch.settle(replica, call.id)
        homes.append(dispatch.replica_of(f"s{number}"))
    assert homes.count(dispatch.replicas[0]) == homes.count(dispatch.replicas[1]) == 3


def test_a_dead_replica_fails_its_own_calls_and_loses_its_sessions() -> None:
    dispatch, clock = made(2)
    home, first = send(dispatch, "a", opens=("a",))
    other, second = send(dispatch)
    lost = dispatch.died(home, home.carrier, "a worker that went away.")
    assert lost == [first]
    assert list(other.calls.values()) == [second]
    assert home.state == "restarting"
    assert send(dispatch)[0] is other
    with pytest.raises(SessionReplicaDied, match=r"'a' must be live.*a worker that went away") as e:
        send(dispatch, "a")
    assert isinstance(e.value, SessionLost)
    with pytest.raises(SessionReplicaDied):  # again, for as long as nobody opens it anew
        send(dispatch, "a")
    assert send(dispatch, "a", opens=("a",))[0] is other
    assert send(dispatch, "a")[0] is other
    assert dispatch.due() == []
    clock.now += 0.5
    assert dispatch.due() == [home]
    assert home.state == "starting"
    assert home.restarts == 1


def test_a_late_death_of_a_replaced_worker_changes_nothing_else() -> None:
    dispatch, _ = made(1)
    (replica,) = dispatch.replicas
    worker = replica.carrier
    _, old = send(dispatch)
    dispatch.ready(replica, "next worker")
    _, new = send(dispatch)
    assert dispatch.lost_calls(replica, worker) == [old]
    assert replica.state == "ready"
    assert list(replica.calls.values()) == [new]


def test_restarts_back_off_and_run_out() -> None:
    dispatch, clock = made(2, max_restarts=3, restart_window_s=300.0)
    replica, other = dispatch.replicas
    waits = []
    for number in range(3):
        dispatch.died(replica, f"w{number}", "a worker that was killed.")
        assert replica.restart_at is not None
        waits.append(replica.restart_at - clock.now)
        clock.now = replica.restart_at
        assert dispatch.due() == [replica]
        dispatch.ready(replica, f"w{number + 1}")
    assert waits == [0.5, 1.0, 2.0]
    dispatch.died(replica, "w3", "a worker that was killed.")
    assert replica.state == "dead"
    assert not dispatch.dead()
    assert send(dispatch)[0] is other
    for _ in range(4):
        dispatch.died(other, other.carrier, "a worker that fell over.")
    assert dispatch.dead()
    with pytest.raises(EngineUnavailableError, match=r"none left after 3 restarts.*fell over") as e:
        send(dispatch)
    assert e.value.reason == "worker_died"


def test_old_deaths_do_not_count() -> None:
    dispatch, clock = made(1, max_restarts=1, restart_window_s=10.0)
    (replica,) = dispatch.replicas
    for _ in range(5):
        dispatch.died(replica, replica.carrier, "a worker that was killed.")
        assert replica.state == "restarting"
        clock.now += 10.0
        assert dispatch.due() == [replica]
        dispatch.ready(replica, "again")


def test_while_all_start_again_a_request_is_told_so() -> None:
    dispatch, _ = made(1)
    dispatch.died(dispatch.replicas[0], dispatch.replicas[0].carrier, "a worker that was killed.")
    with pytest.raises(EngineUnavailableError, match="0: restarting") as caught:
        send(dispatch)
    assert caught.value.reason == "starting"


def test_stuck_is_no_progress_not_a_long_queue() -> None:
    dispatch, clock = made(1)
    (replica,) = dispatch.replicas
    calls = [send(dispatch)[1] for _ in range(5)]
    for call in calls[:4]:  # each takes 3 s: the last one waits for 12 s, and nothing is stuck
        clock.now += 3.0
        assert dispatch.stuck(4.0) == []
        dispatch.settle(replica, call.id)
    clock.now += 3.9
    assert dispatch.stuck(4.0) == []
    clock.now += 0.2
    assert dispatch.stuck(4.0) == [replica]
    assert dispatch.stuck(None) == []
    dispatch.settle(replica, calls[4].id)
    clock.now += 1000.0  # idle
    assert dispatch.stuck(4.0) == []


def test_time_in_which_nobody_listened_is_nobodys_fault() -> None:
    dispatch, clock = made(1)
    (replica,) = dispatch.replicas
    send(dispatch)
    clock.now += 3.0
    clock.now += 60.0
    dispatch.excuse(60.0)
    clock.now += 0.9
    assert dispatch.stuck(4.0) == []
    clock.now += 0.2
    assert dispatch.stuck(4.0) == [replica]


def test_counts_and_latencies() -> None:
    dispatch, clock = made(1)
    (replica,) = dispatch.replicas
    for seconds, failed in ((0.1, False), (0.3, False), (0.2, True)):
        _, call = send(dispatch)
        clock.now += seconds
        dispatch.settle(replica, call.id, failed=failed)
        clock.now += 5.0
    control = Call("reset_session", "a")
    dispatch.begin(replica, control)
    dispatch.settle(replica, control.id)
    (found,) = dispatch.stats()
    assert (found["done"], found["failed"], found["in_flight"]) == (2, 1, 0)
    assert found["p50_ms"] == pytest.approx(200.0)
    assert found["p99_ms"] == pytest.approx(298.0)
    assert found["silent_s"] == 0.0


def test_closed_takes_nothing() -> None:
    dispatch, _ = made(1)
    _, call = send(dispatch)
    assert dispatch.close() == [call]
    with pytest.raises(EngineUnavailableError, match="it is closed") as caught:
        send(dispatch)
    assert caught.value.reason == "closed"


def test_remembered_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phyai.deployment.dispatch.PINS_KEPT", 3)
    dispatch, _ = made(1)
    for number in range(5):
        send(dispatch, f"s{number}", opens=(f"s{number}",))
    assert [dispatch.replica_of(f"s{n}") is not None for n in range(5)] == [False] * 2 + [True] * 3


def test_what_a_request_says_of_its_sessions() -> None:
    rows = [
        Observation(options={"session_id": "a", "seq": 3}),
        Observation(),
        Observation(options={"session_id": "b", "seq": 0}),
    ]
    assert sessions_of(rows) == (("a", "b"), frozenset({"b"}))
    assert sessions_of(Observation()) == ((), frozenset()) == sessions_of(object())
    with pytest.raises(RequestError, match="must be sent together"):
        sessions_of(Observation(options={"session_id": "a"}))


# ---------------------------------------------------------------- stopped requests, and steps


def test_a_request_that_was_stopped_is_neither_done_nor_failed() -> None:
    dispatch, _ = made(1)
    for failed in (False, True):
        call = Call("step", None, watch=Watch(stoppable=True))
        replica = dispatch.choose(call)
        assert call.watch.stop()
        assert dispatch.settle(replica, call.id, failed=failed) is call
    (stats,) = dispatch.stats()
    assert (stats["in_flight"], stats["done"], stats["failed"]) == (0, 0, 0)
    call = Call("step", None, watch=Watch(stoppable=True))
    dispatch.settle(dispatch.choose(call), call.id)
    assert not call.watch.stop()  # it is counted as done: nobody stops it now
    assert dispatch.stats()[0]["done"] == 1


def test_a_request_waits_while_its_worker_has_earlier_ones() -> None:
    dispatch, _ = made(1)
    replica, first = send(dispatch)
    session_call = Call("reset_session", "arm")
    dispatch.begin(replica, session_call)
    _, second = send(dispatch)
    _, third = send(dispatch)
    assert [dispatch.waits(call.future) for call in (first, second, third)] == [False, True, True]
    assert [dispatch.waits(call.future, 2) for call in (first, second, third)] == [
        False,
        False,
        True,
    ]
    dispatch.settle(replica, first.id)
    assert [dispatch.waits(call.future) for call in (first, second, third)] == [False, False, True]
    dispatch.ready(replica, carrier="its next worker")
    _, fourth = send(dispatch)
    assert not dispatch.waits(fourth.future)  # those before it are another worker's


def test_a_replica_that_tells_its_steps_is_not_stuck() -> None:
    dispatch, clock = made(1)
    replica, call = send(dispatch)
    clock.now += 50
    assert dispatch.stepped(replica, call.id) is call
    clock.now += 50
    assert dispatch.stuck(60.0) == []
    clock.now += 11
    assert dispatch.stuck(60.0) == [replica]
    dispatch.ready(replica, carrier="its next worker")
    send(dispatch)
    clock.now += 61
    dispatch.stepped(replica, call.id)  # of the worker before: says nothing of this one
    assert dispatch.stuck(60.0) == [replica]
    assert dispatch.stepped(replica, 0) is None
