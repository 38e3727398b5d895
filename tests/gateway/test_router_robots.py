"""One robot's requests: sessions keep their backend, and its newest observation wins."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from phyai_gateway.messages import Call, Fault
from phyai_gateway.router import RouteSettings
from tests.gateway.stub_world import PI05, StubBackend, fault_of, run, until, world

STATEFUL = replace(PI05, stateful=True)


# ---------------------------------------------------------------- sessions


def _session(name: str, seq: int) -> dict[str, object]:
    return {"options": {"session_id": name, "seq": seq}}


def test_a_session_stays_and_sessions_spread() -> None:
    async def work() -> None:
        async with world() as w:
            for _ in range(3):
                await w.add(StubBackend(len(w.stubs), STATEFUL))
            home = {n: await w.ask(**_session(f"s{n}", 0)) for n in range(30)}
            assert max(Counter(home.values()).values()) <= 13  # 1.25 of the mean, rounded up
            for seq in range(1, 4):
                for n, where in home.items():
                    assert await w.ask(**_session(f"s{n}", seq)) == where

    run(work)


def test_a_session_is_found_again_after_a_restart_of_the_gateway() -> None:
    async def work() -> None:
        homes = []
        for _ in range(2):
            async with world() as w:
                for _ in range(3):
                    await w.add(StubBackend(len(w.stubs), STATEFUL))
                homes.append([await w.ask(**_session(f"s{n}", 5)) for n in range(20)])
        assert homes[0] == homes[1]
        assert len(set(homes[0])) == 3

    run(work)


def test_a_session_whose_backend_is_gone_is_lost_until_it_begins_again() -> None:
    async def work() -> None:
        async with world() as w:
            for _ in range(2):
                await w.add(StubBackend(len(w.stubs), STATEFUL))
            home = await w.ask(**_session("s", 0))
            gone = list(w.stubs.values())[int(home)]
            w.gateway.remove(w.member(gone).id)
            await until(lambda: gone.closed)
            for _ in range(2):
                fault = await fault_of(w.ask(**_session("s", 1)))
                assert fault.status == "failed_precondition"
                assert "lost" in fault.message
            assert await w.ask(**_session("s", 0)) != home
            assert await w.ask(**_session("s", 1)) != home

    run(work)


def test_a_session_is_lost_when_its_backend_was_down_in_between() -> None:
    async def work() -> None:
        async with world() as w:
            stub = await w.add(StubBackend(0, STATEFUL))
            await w.ask(**_session("s", 0))
            stub.down = True
            for _ in range(3):
                await w.probe(w.member(stub))
            stub.down = False
            await w.probe(w.member(stub))
            assert (await fault_of(w.ask(**_session("s", 1)))).status == "failed_precondition"

    run(work)


def test_a_draining_backend_keeps_its_sessions_and_takes_no_new_ones() -> None:
    async def work() -> None:
        async with world() as w:
            for _ in range(2):
                await w.add(StubBackend(len(w.stubs), STATEFUL))
            home = await w.ask(**_session("s", 0))
            stub = list(w.stubs.values())[int(home)]
            w.gateway.patch(w.member(stub).id, state="draining", weight=None)
            assert await w.ask(**_session("s", 1)) == home
            assert all([await w.ask(**_session(f"t{n}", 0)) != home for n in range(5)])

    run(work)


def test_sessions_of_stateless_models_are_not_pinned() -> None:
    async def work() -> None:
        async with world(2) as w:
            assert {await w.ask(**_session("s", n)) for n in range(4)} == {0.0, 1.0}

    run(work)


# ---------------------------------------------------------------- mailbox


def test_the_latest_observation_of_a_robot_wins() -> None:
    async def work() -> None:
        async with world(1) as w:
            (stub,) = w.stubs.values()
            stub.release.clear()
            call = Call("test", robot="arm")
            tasks = [asyncio.create_task(w.ask(call=call))]
            await until(lambda: stub.running == 1)
            for _ in range(4):
                tasks.append(asyncio.create_task(w.ask(call=call)))
                await asyncio.sleep(0.01)
            stub.release.set()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            dropped = found[1:4]
            assert [f.status for f in dropped if isinstance(f, Fault)] == ["cancelled"] * 3
            assert (found[0], found[4]) == (0.0, 0.0)
            assert stub.most_running == 1
            assert len(stub.seen) == 2
            assert w.gateway.metrics.drop_counts()["superseded"] == 3
            assert w.gateway.router.mailboxes.robots == 0

    run(work)


def test_a_queued_observation_is_replaced_but_other_robots_are_not() -> None:
    async def work() -> None:
        async with world(1, slots=1) as w:
            (stub,) = w.stubs.values()
            stub.release.clear()
            running = asyncio.create_task(w.ask())
            await until(lambda: stub.running == 1)
            pool = w.gateway.router.pools["pi05"]
            old = asyncio.create_task(w.ask(call=Call("test", robot="arm")))
            other = asyncio.create_task(w.ask(call=Call("test", robot="leg")))
            same = asyncio.create_task(w.ask(call=Call("test", robot="arm", principal="else")))
            await until(lambda: pool.waiting == 3)
            new = asyncio.create_task(w.ask(call=Call("test", robot="arm")))
            assert (await fault_of(old)).status == "cancelled"
            stub.release.set()
            assert await asyncio.gather(running, other, same, new) == [0.0] * 4

    run(work)


@pytest.mark.parametrize("slots", [1, 2])
def test_an_old_observation_is_dropped_before_it_reaches_a_backend(slots: int) -> None:
    async def work() -> None:
        async with world(1, slots=slots, route=RouteSettings(max_observation_age_s=0.5)) as w:
            (stub,) = w.stubs.values()
            stub.release.clear()
            # Two slots: the robot's own older request runs. One slot: somebody else's does.
            first = Call("test", robot="arm") if slots == 2 else Call("test")
            running = asyncio.create_task(w.ask(call=first))
            await until(lambda: stub.running == 1)
            fault = await fault_of(w.ask(call=Call("test", robot="arm")))
            assert fault.status == "deadline_exceeded"
            assert "Send a newer one" in fault.message
            assert len(stub.seen) == 1
            stub.release.set()
            await running
            assert w.gateway.metrics.drop_counts()["stale"] == 1
            assert await w.ask(call=Call("test", robot="arm")) == 0.0

    run(work)


def test_a_cancelled_robot_request_gives_its_turn_on() -> None:
    async def work() -> None:
        async with world(1) as w:
            (stub,) = w.stubs.values()
            stub.release.clear()
            call = Call("test", robot="arm")
            first = asyncio.create_task(w.ask(call=call))
            await until(lambda: stub.running == 1)
            second = asyncio.create_task(w.ask(call=call))
            await asyncio.sleep(0.01)
            first.cancel()
            await until(lambda: len(stub.seen) == 2)
            stub.release.set()
            assert await second == 0.0
            assert w.gateway.router.mailboxes.robots == 0

    run(work)
