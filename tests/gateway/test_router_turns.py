"""What the router keeps apart: attempts, sessions of before a restart, shares of backends."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from dataclasses import replace

from phyai_gateway.backends import Member
from phyai_gateway.breaker import Breaker, BreakerSettings
from phyai_gateway.messages import Call, Fault
from phyai_gateway.router import MARGIN_S
from phyai_gateway.sticky import Sessions
from tests.gateway.stub_world import PI05, StubBackend, fault_of, run, until, world

STATEFUL = replace(PI05, stateful=True)


def session(seq: int) -> dict[str, dict[str, object]]:
    return {"options": {"session_id": "s", "seq": seq}}


def test_a_second_attempt_never_goes_to_the_same_backend() -> None:
    async def work() -> None:
        async with world(2) as w:
            first, second = w.stubs.values()
            w.gateway.patch(w.member(first).id, state=None, weight=100)  # always the cheaper one
            first.fault = Fault("unavailable", "server stops.")
            for _ in range(4):
                assert await w.ask() == second.number
            assert len(first.seen) == len(second.seen) == 4

    run(work)


def test_some_of_the_time_is_kept_for_the_way_home() -> None:
    async def work() -> None:
        async with world(1) as w:
            (stub,) = w.stubs.values()
            deadline = time.monotonic() + 10
            await w.ask(call=Call("test", deadline=deadline))
            assert deadline - time.monotonic() - MARGIN_S < stub.timeouts[0] <= 10 - MARGIN_S

    run(work)


def test_a_session_does_not_outlive_its_process() -> None:
    async def work() -> None:
        async with world() as w:
            stub = await w.add(StubBackend(0, STATEFUL))
            await w.add(StubBackend(1, STATEFUL))
            await w.ask(**session(0))
            kept = w.member(stub if stub.seen else list(w.stubs.values())[1])
            kept.incarnation += 1
            assert (await fault_of(w.ask(**session(1)))).status == "failed_precondition"
            await w.ask(**session(0))

    run(work)


def test_a_session_that_is_lost_while_it_waits_is_told_so() -> None:
    async def work() -> None:
        async with world(slots=1) as w:
            stub = await w.add(StubBackend(0, STATEFUL))
            stub.release.clear()
            first = asyncio.create_task(w.ask(**session(0)))
            await until(lambda: stub.running == 1)
            second = asyncio.create_task(w.ask(**session(1)))
            pool = w.gateway.router.pools["pi05"]
            await until(lambda: pool.waiting == 1)
            w.member(stub).incarnation += 1
            stub.release.set()
            await first
            assert (await fault_of(second)).status == "failed_precondition"
            assert (len(stub.seen), w.member(stub).in_flight) == (1, 0)

    run(work)


def test_another_contract_means_another_process() -> None:
    async def work() -> None:
        async with world(1) as w:
            (stub,) = w.stubs.values()
            await asyncio.sleep(0.05)  # the monitor's own first probe
            before = w.member(stub).incarnation
            await w.probe(w.member(stub))
            assert w.member(stub).incarnation == before
            stub.published = replace(PI05, horizon=10)
            await w.probe(w.member(stub))
            assert w.member(stub).incarnation == before + 1

    run(work)


def test_no_backend_gets_many_more_sessions_than_the_others() -> None:
    def member(name: str) -> Member:
        return Member(name, "m", name, StubBackend(), Breaker(BreakerSettings()), up=True)

    async def work() -> None:
        members, sessions = [member(f"h:{n}") for n in range(4)], Sessions()
        held: Counter[str] = Counter()
        for number in range(1, 201):
            held[sessions.member(f"robot {number}", True, members, 0.0).id] += 1
            assert max(held.values()) <= math.ceil(1.25 * number / 4)

    run(work)


def test_a_backend_cannot_ask_for_everything() -> None:
    async def work() -> None:
        async with world() as w:
            for wish, slots in ((10**9, 1024), (0, 32), (True, 32), ("9", 32)):
                contract = replace(PI05, extra={"max_in_flight": wish})
                stub = await w.add(StubBackend(0, contract), f"m{wish}")
                assert w.member(stub).slots == slots

    run(work)
