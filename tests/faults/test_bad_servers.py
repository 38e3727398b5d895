"""A model server that hangs, lies or breaks off, beside a good one: what robots notice of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tests.faults import bad_servers as bad
from tests.faults.processes import SOON_S, Gateway, Model, eventually, run, running
from tests.faults.robots import CODE, robots

pytestmark = pytest.mark.slow
DEADLINE_S = 4.0  # where a server is only found out by it
PATIENT_S = 15.0  # where nothing should last until it
ROBOTS = 8
TRIALS = 3  # that a bad one may get in the time the test looks on


async def load_beside_a_bad_one(
    endpoint: str, *, probed: bool, most_bad: int, codes: set[Any]
) -> None:
    """Check what 8 robots get from a good server and the bad one at the endpoint.

    probed: whether its probes find the bad one good.  most_bad: requests that may fail before it is
    left alone.
    """
    model = Model(1, 0.02)
    gateway = Gateway([model.endpoint, endpoint])
    gateway_ready, gateway.serving = gateway.serving, lambda count=None: gateway_ready(1)  # type: ignore[method-assign]
    deadline_s = DEADLINE_S if CODE.DEADLINE_EXCEEDED in codes else PATIENT_S
    async with running(model, gateway):

        async def found() -> bool:
            good = (await gateway.backend(model.endpoint))["healthy"]
            return good and (await gateway.backend(endpoint))["healthy"] is probed

        await eventually(found, SOON_S, "the first probes")
        at = time.monotonic()
        async with robots(gateway.ports["native"], ROBOTS, deadline_s=deadline_s) as load:

            async def left_alone() -> bool:
                return not (await gateway.backend(endpoint))["healthy"]

            took = await eventually(left_alone, SOON_S, f"bad server is left alone {load}")
            asked = await gateway.asked_of(endpoint)
            await asyncio.sleep(4.0)
            await load.more(50)
            assert await gateway.asked_of(endpoint) <= asked + TRIALS
        print(f"noticed in {took:.2f} s; {load.codes(at)}")
        # Not the robots' errors: the good one, too, may be late on a machine that does much else.
        assert (await gateway.backend(endpoint))["failures"] <= most_bad, load.codes()
        assert {one.code for one in load.bad()} <= codes, load.codes()
        assert set(load.by_server()) == {1}
        assert (await gateway.backend(endpoint))["last_error"]


@pytest.mark.parametrize(
    ("answer", "most_bad", "codes"),
    [
        (bad.hangs, 40, {CODE.DEADLINE_EXCEEDED}),
        (bad.garbage, 10, {CODE.DATA_LOSS}),
        (bad.wrong_id, 10, {CODE.DATA_LOSS}),
        (bad.late, 40, {CODE.DEADLINE_EXCEEDED}),
        (bad.fails, 10, {CODE.INTERNAL}),
    ],
)
def test_a_server_that_passes_its_probes_and_answers_badly(
    answer: bad.Answer, most_bad: int, codes: set[Any]
) -> None:
    """Left alone after 5 failures in a row; no wrong or late actions ever reach a robot."""

    async def work() -> None:
        async with bad.grpc_server(answer) as endpoint:
            await load_beside_a_bad_one(endpoint, probed=True, most_bad=most_bad, codes=codes)

    run(work)


@pytest.mark.parametrize("talk", [bad.says_nothing, bad.says_garbage])
def test_something_else_at_the_address(talk: Callable[[Any, Any], Awaitable[None]]) -> None:
    """It is never ready, so no request is lost to it."""

    async def work() -> None:
        async with bad.tcp_server(talk) as endpoint:
            await load_beside_a_bad_one(endpoint, probed=False, most_bad=0, codes=set())

    run(work)


@asynccontextmanager
async def wired() -> AsyncIterator[tuple[bad.Wire, str, Model]]:
    """A good server behind a wire; gives its address there."""
    model = Model(2, 0.02)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(model))
        wire = bad.Wire(model.endpoint)
        served: AbstractAsyncContextManager[str] = bad.tcp_server(wire.talk)
        yield wire, await stack.enter_async_context(served), model


def test_a_connection_that_dies_silently() -> None:
    """Half open: found out by its requests and probes, used again when the wire is back."""

    async def work() -> None:
        async with wired() as (wire, endpoint, _):
            model = Model(1, 0.02)
            gateway = Gateway([model.endpoint, endpoint])
            async with (
                running(model, gateway),
                robots(gateway.ports["native"], ROBOTS, deadline_s=DEADLINE_S) as load,
            ):
                await load.more(100)
                assert set(load.by_server()) == {1, 2}
                wire.mute = True
                at = time.monotonic()

                async def gone() -> bool:
                    return not (await gateway.backend(endpoint))["healthy"]

                took = await eventually(gone, SOON_S, "the dead wire is noticed")
                asked = await gateway.asked_of(endpoint)
                await asyncio.sleep(3.0)
                await load.more(50)
                print(f"noticed in {took:.2f} s; {load.codes(at)}")
                assert await gateway.asked_of(endpoint) <= asked + TRIALS
                assert (await gateway.backend(endpoint))["failures"] <= 40
                wire.mute = False
                back = time.monotonic()
                await load.until(lambda: load.by_server(back)[2] > 5, 60)

    run(work)


def test_replies_that_break_off() -> None:
    """Lost: what was on the cut connection; UNAVAILABLE, never half an answer."""

    async def work() -> None:
        async with wired() as (wire, endpoint, _):
            model = Model(1, 0.02)
            gateway = Gateway([model.endpoint, endpoint])
            async with (
                running(model, gateway),
                robots(gateway.ports["native"], ROBOTS, deadline_s=PATIENT_S) as load,
            ):
                await load.more(100)
                wire.cut_after = 700  # handshake and probes pass, answers end in the middle
                await asyncio.sleep(6.0)
                assert {one.code for one in load.bad()} <= {CODE.UNAVAILABLE}, load.codes()
                assert len(load.bad()) <= 60, load.codes()
                wire.cut_after = None
                back = time.monotonic()
                await load.until(lambda: load.by_server(back)[2] > 5, 60)
                await load.more(100)

    run(work)
