"""Who serves which request: fairness, slots, deadlines, overload, retries."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from phyai_gateway.faults import QueueFull
from phyai_gateway.messages import Call, Fault, InferRequest, TensorData
from phyai_gateway.router import RouteSettings
from tests.gateway.stub_world import StubBackend, World, fault_of, run, until, world


def test_ties_rotate_evenly() -> None:
    async def work() -> None:
        async with world(3) as w:
            found = [await w.ask() for _ in range(30)]
            assert Counter(found) == {0.0: 10, 1.0: 10, 2.0: 10}
            assert found[:3] != [found[0]] * 3

    run(work)


def test_the_least_outstanding_is_chosen_exactly() -> None:
    async def work() -> None:
        async with world(3) as w:
            busy = list(w.stubs.values())
            for stub in busy:
                stub.release.clear()
            tasks = [asyncio.create_task(w.ask()) for _ in range(9)]
            await until(lambda: sum(s.running for s in busy) == 9)
            assert [s.running for s in busy] == [3, 3, 3]
            busy[1].release.set()
            await until(lambda: busy[1].running == 0)
            busy[1].release.clear()
            more = [asyncio.create_task(w.ask()) for _ in range(3)]
            await until(lambda: busy[1].running == 3)
            assert [s.running for s in busy] == [3, 3, 3]
            for stub in busy:
                stub.release.set()
            await asyncio.gather(*tasks, *more)
            assert all(m.in_flight == 0 for m in w.gateway.members())

    run(work)


def test_a_weight_shifts_the_share() -> None:
    async def work() -> None:
        async with world(2) as w:
            heavy, light = w.stubs.values()
            w.gateway.patch(w.member(heavy).id, state=None, weight=3.0)
            for stub in (heavy, light):
                stub.release.clear()
            tasks = [asyncio.create_task(w.ask()) for _ in range(8)]
            await until(lambda: heavy.running + light.running == 8)
            assert (heavy.running, light.running) == (6, 2)
            heavy.release.set()
            light.release.set()
            await asyncio.gather(*tasks)

    run(work)


def test_request_and_reply_objects_pass_unchanged() -> None:
    async def work() -> None:
        async with world(1) as w:
            (stub,) = w.stubs.values()
            data = memoryview(bytearray(32))
            request = InferRequest("r", "pi05", state=TensorData(data, (8,), "float32"))
            await w.gateway.router.infer(request, Call("test"))
            assert stub.seen[0] is request

    run(work)


def test_slots_hold_and_the_queue_refuses_with_a_hint() -> None:
    async def work() -> None:
        async with world(2, slots=2, queue_per_backend=3) as w:
            stubs = list(w.stubs.values())
            for stub in stubs:
                stub.release.clear()
            tasks = [asyncio.create_task(w.ask()) for _ in range(4 + 6)]
            await until(lambda: w.gateway.router.pools["pi05"].waiting == 6)
            fault = await fault_of(w.ask())
            assert isinstance(fault, QueueFull)
            assert fault.retry_after is not None
            assert 0 < fault.retry_after <= 5
            assert not fault.started
            for stub in stubs:
                stub.release.set()
            assert len(await asyncio.gather(*tasks)) == 10
            assert max(stub.most_running for stub in stubs) == 2
            assert b'rejected_total{reason="resource_exhausted"} 1.0' in w.gateway.metrics.text()

    run(work)


def test_overload_is_refused_in_words_and_recovers() -> None:
    async def work() -> None:
        async with world(2, slots=1, queue_per_backend=2) as w:
            for stub in w.stubs.values():
                stub.delay_s = 0.01
            found = await asyncio.gather(*(w.ask() for _ in range(60)), return_exceptions=True)
            refused = [one for one in found if isinstance(one, BaseException)]
            assert refused
            assert all(isinstance(one, QueueFull) for one in refused)
            assert len(found) - len(refused) >= 6
            assert isinstance(await w.ask(), float)

    run(work)


def test_the_earliest_deadline_goes_first() -> None:
    async def work() -> None:
        async with world(1, slots=1) as w:
            (stub,) = w.stubs.values()
            stub.release.clear()
            first = asyncio.create_task(w.ask())
            await until(lambda: stub.running == 1)
            now = time.monotonic()
            order: list[str] = []

            async def later(name: str, seconds: float) -> None:
                await w.ask(call=Call("test", deadline=now + seconds))
                order.append(name)

            tasks = [asyncio.create_task(later("late", 9)), asyncio.create_task(later("soon", 5))]
            await until(lambda: w.gateway.router.pools["pi05"].waiting == 2)
            stub.release.set()
            await asyncio.gather(first, *tasks)
            assert order == ["soon", "late"]

    run(work)


def test_a_passed_deadline_touches_no_backend() -> None:
    async def work() -> None:
        async with world(1) as w:
            (stub,) = w.stubs.values()
            fault = await fault_of(w.ask(call=Call("test", deadline=time.monotonic() - 1)))
            assert fault.status == "deadline_exceeded"
            assert not fault.started
            assert stub.seen == []

    run(work)


def test_the_deadline_reaches_the_backend_and_ends_the_wait() -> None:
    async def work() -> None:
        async with world(1) as w:
            (stub,) = w.stubs.values()
            stub.release.clear()
            fault = await fault_of(w.ask(call=Call("test", deadline=time.monotonic() + 0.5)))
            assert fault.status == "deadline_exceeded"
            assert fault.started
            assert 0 < stub.timeouts[0] < 0.5
            assert stub.cancelled == 1
            assert w.member(stub).in_flight == 0

    run(work)


def test_the_default_deadline_is_ten_seconds_and_the_ceiling_holds() -> None:
    async def work() -> None:
        async with world(1, route=RouteSettings(max_timeout_s=20)) as w:
            (stub,) = w.stubs.values()
            await w.ask()
            await w.ask(call=Call("test", deadline=time.monotonic() + 1e6))
            assert 5 < stub.timeouts[0] <= 10
            assert 15 < stub.timeouts[1] <= 20

    run(work)


def test_cancelling_frees_the_slot_waiting_or_running() -> None:
    async def work() -> None:
        async with world(1, slots=1) as w:
            (stub,) = w.stubs.values()
            stub.release.clear()
            running = asyncio.create_task(w.ask())
            await until(lambda: stub.running == 1)
            waiting = asyncio.create_task(w.ask())
            await until(lambda: w.gateway.router.pools["pi05"].waiting == 1)
            for task in (waiting, running):
                task.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
            assert stub.cancelled == 1
            assert w.member(stub).in_flight == 0
            assert w.gateway.router.accepted == 0
            stub.release.set()
            assert await w.ask() == 0.0

    run(work)


def test_a_cancellation_storm_leaks_no_slot() -> None:
    async def work() -> None:
        async with world(2, slots=2, queue_per_backend=100) as w:
            for stub in w.stubs.values():
                stub.delay_s = 0.002
            tasks = [asyncio.create_task(w.ask()) for _ in range(120)]
            for index, task in enumerate(tasks):
                if index % 3 == 0:
                    await asyncio.sleep(0)
                task.cancel() if index % 2 else None
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(one, float) for one in found) == 60
            pool = w.gateway.router.pools["pi05"]
            assert pool.waiting == 0
            assert all(m.in_flight == 0 for m in pool.members.values())
            assert w.gateway.router.bytes_in_flight == 0

    run(work)


def test_unknown_model_lists_the_known_ones() -> None:
    async def work() -> None:
        async with world(1) as w:
            fault = await fault_of(w.ask("pi5"))
            assert (fault.status, "pi05" in fault.message) == ("not_found", True)

    run(work)


def test_another_request_id_in_the_answer_is_data_loss() -> None:
    async def work() -> None:
        async with world(1) as w:
            (stub,) = w.stubs.values()
            stub.reply_id = "other"
            assert (await fault_of(w.ask())).status == "data_loss"

    run(work)


def test_a_bug_is_told_without_its_text() -> None:
    class Broken(StubBackend):
        async def infer(self, request: InferRequest, timeout: float) -> object:  # type: ignore[override]
            raise RuntimeError("secret /path/of/ours")

    async def work() -> None:
        async with world() as w:
            await w.add(Broken())
            fault = await fault_of(w.ask())
            assert fault.status == "internal"
            assert "secret" not in fault.message
            assert w.gateway.members()[0].in_flight == 0

    run(work)


def test_bytes_in_flight_are_bounded() -> None:
    async def work() -> None:
        async with world(1, route=RouteSettings(max_bytes_in_flight=100)) as w:
            (stub,) = w.stubs.values()
            stub.release.clear()
            state = TensorData(bytes(80), (20,), "float32")
            first = asyncio.create_task(w.ask(state=state))
            await until(lambda: stub.running == 1)
            assert (await fault_of(w.ask(state=state))).status == "resource_exhausted"
            stub.release.set()
            await first
            assert await w.ask(state=state) == 0.0

    run(work)


# ---------------------------------------------------------------- retries


@pytest.mark.parametrize(
    ("fault", "again"),
    [
        (Fault("unavailable", "refused"), True),
        (Fault("unavailable", "broke off", started=True), False),
        (Fault("resource_exhausted", "busy", retry_after=0.1), True),
        (Fault("resource_exhausted", "GPU memory"), False),
        (Fault("internal", "broke"), False),
        (Fault("invalid_argument", "wrong"), False),
        (Fault("deadline_exceeded", "late", started=True), False),
    ],
)
def test_only_what_cannot_have_started_is_sent_again(fault: Fault, again: bool) -> None:
    async def work() -> None:
        async with world(2) as w:
            bad, good = w.stubs.values()
            bad.fault = fault
            assert await _outcome(w) == (1.0 if again else fault.status)
            assert len(bad.seen) == 1
            assert len(good.seen) == int(again)

    run(work)


async def _outcome(w: World) -> object:
    try:
        return await w.ask()
    except Fault as fault:
        return fault.status


def test_retries_have_a_budget() -> None:
    async def work() -> None:
        async with world(3, route=RouteSettings(retry_burst=2, retry_share=0)) as w:
            for stub in w.stubs.values():
                stub.fault = Fault("resource_exhausted", "busy", retry_after=0.1)
            for _ in range(10):
                assert (await fault_of(w.ask())).status == "resource_exhausted"
            assert sum(len(stub.seen) for stub in w.stubs.values()) == 12

    run(work)
