"""Messages that arrive, that don't, and whose client leaves."""

from __future__ import annotations

import asyncio

import pytest

from phyai_gateway.protocols.arrivals import Arrivals
from tests.gateway.stub_world import run, until


def test_what_arrives_in_time_is_given_and_leaves_no_timer() -> None:
    async def body() -> None:
        arrivals = Arrivals(0.08)

        async def soon() -> str:
            await asyncio.sleep(0)
            return "message"

        assert await arrivals.wait(soon()) == "message"
        assert not arrivals._since
        await until(lambda: arrivals._timer is None)

    run(body)


def test_each_late_one_is_given_up_and_others_go_on() -> None:
    async def body() -> None:
        arrivals = Arrivals(0.04)
        held = asyncio.Event()

        async def patient() -> str:
            await asyncio.sleep(0)
            return "message"

        late = [asyncio.create_task(arrivals.wait(held.wait())) for _ in range(3)]
        results = await asyncio.gather(*late, arrivals.wait(patient()), return_exceptions=True)
        assert [type(one) for one in results[:3]] == [TimeoutError] * 3
        assert results[3] == "message"
        assert await arrivals.wait(patient()) == "message"

    run(body)


def test_errors_and_cancellation_from_outside_stay_what_they_are() -> None:
    async def body() -> None:
        arrivals = Arrivals(60.0)

        async def broken() -> None:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await arrivals.wait(broken())
        waits = asyncio.create_task(arrivals.wait(asyncio.Event().wait()))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert not arrivals._since
        assert arrivals._timer is not None
        arrivals._timer.cancel()

    run(body)
