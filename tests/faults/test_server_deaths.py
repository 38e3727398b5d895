"""Model servers that are killed, stopped or get slow while robots ask."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from tests.faults.processes import SOON_S, Gateway, Model, eventually, run, running
from tests.faults.robots import CODE, robots

pytestmark = pytest.mark.slow


def test_a_killed_server_costs_what_ran_there_and_comes_back() -> None:
    """Noticed at once, used again after its restart; lost: what it had in flight."""

    async def work() -> None:
        models = [Model(number, 0.02) for number in range(3)]
        gateway = Gateway([one.endpoint for one in models])
        async with running(*models, gateway), robots(gateway.ports["native"], 24) as load:
            await load.more(300)
            assert set(load.by_server()) == {0, 1, 2}
            at = time.monotonic()
            await models[0].kill()

            async def gone() -> bool:
                return not (await gateway.backend(models[0].endpoint))["healthy"]

            took = await eventually(gone, SOON_S, "the gateway notices")
            print(f"noticed after {took:.2f} s")
            since = max(time.monotonic(), at + 2.0)
            await load.more(200)
            lost = load.lost()
            assert len(lost) <= 16, load.codes()  # a third of 24, and some that came meanwhile
            assert all(one.code is CODE.UNAVAILABLE for one in load.bad())
            assert not load.bad(since)
            back = time.monotonic()
            await models[0].start()
            took = await load.until(lambda: load.by_server(back)[0] > 0, SOON_S)
            print(f"used again {took:.2f} s after its start")
            await load.more(200)
            assert not load.bad(since)

    run(work)


def test_without_any_server_robots_are_told_at_once_and_served_when_one_is_back() -> None:
    """Refused before its deadline, with a hint; lost: what was in flight at the kill."""

    async def work() -> None:
        model = Model(0)
        gateway = Gateway([model.endpoint])
        async with running(model, gateway), robots(gateway.ports["native"], 8) as load:
            await load.more(50)
            at = time.monotonic()
            await model.kill()
            await load.until(lambda: len(load.bad(at + 1)) >= 20, SOON_S)
            assert len(load.lost()) <= 8
            assert set(load.codes(at)) <= {"OK", "UNAVAILABLE"}
            back = time.monotonic()
            await model.start()
            took = await load.until(lambda: bool(load.good(back)), SOON_S)
            print(f"served {took:.2f} s after its start")
            served = load.good(back)[0].ended
            await load.more(50)
            assert not load.bad(served + 0.5)

    run(work)


def test_sigterm_of_a_server_under_load_loses_nothing() -> None:
    """Not one request fails: what it accepted it answers, what it refuses another one takes."""

    async def work() -> None:
        models = [Model(number, 0.05) for number in range(3)]
        gateway = Gateway([one.endpoint for one in models])
        async with running(*models, gateway), robots(gateway.ports["native"], 24) as load:
            await load.more(100)
            for model in models[:2]:
                model.send(signal.SIGTERM)
                assert await model.ended() == 0
                await load.more(50)
            assert not load.bad(), load.codes()
            back = time.monotonic()
            await asyncio.gather(*(model.start() for model in models[:2]))
            await load.until(lambda: len(load.by_server(back)) == 3, SOON_S)
            assert not load.bad(), load.codes()

    run(work)


def test_a_server_that_gets_slow_gets_little() -> None:
    """Nothing fails, and soon the slow one gets no more than its share of time."""

    async def work() -> None:
        models = [Model(number, 0.01) for number in range(3)]
        gateway = Gateway([one.endpoint for one in models])
        async with running(*models, gateway), robots(gateway.ports["native"], 12) as load:
            await load.more(200)
            models[0].tell("2.0")
            since = time.monotonic() + 5
            await load.until(lambda: len(load.good(since)) >= 400, 60)
            shares = load.by_server(since)
            assert shares[0] < 0.1 * shares.total(), shares
            assert not load.bad()
            models[0].tell("0.01")
            back = time.monotonic() + 1
            await load.until(lambda: load.by_server(back)[0] > 50, 60)

    run(work)


def test_a_server_that_stops_answering_is_left_alone() -> None:
    """A stopped process is found out; lost: what ran there till its deadline."""

    async def work() -> None:
        models = [Model(number, 0.02) for number in range(2)]
        gateway = Gateway([one.endpoint for one in models])
        async with (
            running(*models, gateway),
            robots(gateway.ports["native"], 12, deadline_s=3.0) as load,
        ):
            await load.more(200)
            models[0].send(signal.SIGSTOP)

            async def gone() -> bool:
                return not (await gateway.backend(models[0].endpoint))["healthy"]

            took = await eventually(gone, SOON_S, "the gateway notices")
            print(f"noticed after {took:.2f} s")
            asked = await gateway.asked_of(models[0].endpoint)
            await load.more(200)
            await asyncio.sleep(2.0)
            assert await gateway.asked_of(models[0].endpoint) <= asked + 1  # a trial
            assert (await gateway.backend(models[0].endpoint))["failures"] <= 24
            assert {one.code for one in load.bad()} <= {CODE.DEADLINE_EXCEEDED, CODE.UNAVAILABLE}
            models[0].send(signal.SIGCONT)
            back = time.monotonic()
            await load.until(lambda: load.by_server(back)[0] > 10, 60)

    run(work)
