"""Backends that fail, come back, are added, drained and removed."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from phyai_gateway.breaker import BreakerSettings
from phyai_gateway.health import ProbeSettings
from phyai_gateway.messages import Call, Fault, InferRequest
from tests.gateway.stub_world import PI05, Clock, StubBackend, World, run, until, world

BROKEN = Fault("internal", "engine failed", started=True)


async def outcomes(w: World, count: int) -> Counter[object]:
    found: list[object] = []
    for _ in range(count):
        try:
            found.append(await w.ask())
        except Fault as fault:
            found.append(fault.status)
    return Counter(found)


# ---------------------------------------------------------------- ejection


def test_five_failures_in_a_row_eject_and_a_trial_brings_back(clock: Clock) -> None:
    async def work() -> None:
        async with world(3, clock=clock) as w:
            bad = next(iter(w.stubs.values()))
            bad.fault = BROKEN
            assert (await outcomes(w, 30))["internal"] == 5
            member = w.member(bad)
            assert member.state == "ejected"
            assert (await outcomes(w, 12)) == {1.0: 6, 2.0: 6}

            clock.now += 10.1  # still broken: the trial fails, the pause doubles
            assert (await outcomes(w, 12))["internal"] == 1
            assert member.breaker.wait_s == pytest.approx(20.0)

            bad.fault = None
            clock.now += 20.1
            found = await outcomes(w, 30)
            assert member.state == "ready"
            assert found == {0.0: 10, 1.0: 10, 2.0: 10}

    run(work)


@pytest.mark.parametrize(
    "status", ["invalid_argument", "not_found", "failed_precondition", "resource_exhausted"]
)
def test_the_requests_own_faults_and_busy_eject_nobody(status: str) -> None:
    async def work() -> None:
        async with world(2) as w:
            bad = next(iter(w.stubs.values()))
            bad.fault = Fault(status, "no")  # type: ignore[arg-type]
            assert (await outcomes(w, 40))[status] == 20
            assert all(m.state == "ready" for m in w.gateway.members())

    run(work)


def test_impatient_clients_eject_nobody() -> None:
    async def work() -> None:
        async with world(2) as w:
            for stub in w.stubs.values():
                stub.delay_s = 0.05
            await outcomes(w, 4)
            loop = asyncio.get_running_loop()
            for _ in range(14):
                with pytest.raises(Fault, match="deadline"):
                    await w.ask(call=Call("test", deadline=loop.time() + 0.01))
            assert all(m.state == "ready" for m in w.gateway.members())

    run(work)


def test_the_last_one_is_never_ejected() -> None:
    async def work() -> None:
        async with world(2) as w:
            for stub in w.stubs.values():
                stub.fault = BROKEN
            assert (await outcomes(w, 40))["internal"] == 40
            assert sorted(m.state for m in w.gateway.members()) == ["ejected", "ready"]

    run(work)


def test_an_ejected_one_is_tried_when_the_others_are_down(clock: Clock) -> None:
    async def work() -> None:
        async with world(2, clock=clock) as w:
            bad, good = w.stubs.values()
            bad.fault = BROKEN
            await outcomes(w, 20)
            bad.fault, good.down = None, True
            for _ in range(3):
                await w.probe(w.member(good))
            assert await w.ask() == 0.0

    run(work)


def test_one_much_slower_than_the_others_is_ejected(clock: Clock) -> None:
    async def work() -> None:
        async with world(3, clock=clock) as w:
            slow, *others = (w.member(stub) for stub in w.stubs.values())
            for _ in range(20):
                slow.latencies.add(0.6)
                for other in others:
                    other.latencies.add(0.1)
            w.gateway.tick()
            clock.now += 29
            w.gateway.tick()
            assert slow.state == "ready"
            clock.now += 2
            w.gateway.tick()
            assert slow.state == "ejected"
            assert "slow" in (slow.last_error or "")

    run(work)


def test_a_returning_one_starts_slowly(clock: Clock) -> None:
    async def work() -> None:
        settings = BreakerSettings(slow_start_s=10)
        async with world(2, clock=clock, breaker=settings) as w:
            bad, good = w.stubs.values()
            bad.fault = BROKEN
            await outcomes(w, 20)
            bad.fault = None
            clock.now += 10.1
            assert await w.ask() == 0.0  # the trial
            assert (await outcomes(w, 10)) == {1.0: 10}
            clock.now += 5
            for stub in (bad, good):
                stub.release.clear()
            tasks = [asyncio.create_task(w.ask()) for _ in range(9)]
            await until(lambda: bad.running + good.running == 9)
            assert (bad.running, good.running) == (3, 6)
            bad.release.set()
            good.release.set()
            await asyncio.gather(*tasks)
            clock.now += 6
            assert (await outcomes(w, 10)) == {0.0: 5, 1.0: 5}

    run(work)


# ---------------------------------------------------------------- probes


def test_three_failed_probes_take_down_and_one_good_one_brings_back() -> None:
    async def work() -> None:
        async with world(2) as w:
            stub = next(iter(w.stubs.values()))
            member = w.member(stub)
            stub.down = True
            for _ in range(2):
                await w.probe(member)
                assert member.state == "ready"
            await w.probe(member)
            assert member.state == "ejected"
            assert (await outcomes(w, 4)) == {1.0: 4}
            stub.down = False
            await w.probe(member)
            assert member.state == "ready"
            assert (await outcomes(w, 4)) == {0.0: 2, 1.0: 2}

    run(work)


def test_a_probe_that_hangs_counts_as_failed() -> None:
    class Hangs(StubBackend):
        async def probe(self) -> None:
            await asyncio.sleep(3600)

    async def work() -> None:
        probe = ProbeSettings(period_s=3600, first_period_s=3600, timeout_s=0.02)
        async with world(probe=probe) as w:
            stub = await w.add(Hangs())
            assert w.member(stub).state == "connecting"
            assert "no answer in time" in (w.member(stub).last_error or "")

    run(work)


def test_without_a_healthy_backend_the_answer_is_immediate() -> None:
    async def work() -> None:
        async with world() as w:
            stub = StubBackend()
            stub.down = True
            await w.add(stub)
            with pytest.raises(Fault) as caught:
                await w.ask()
            assert caught.value.status == "unavailable"
            assert caught.value.retry_after
            assert stub.seen == []

    run(work)


def test_waiting_requests_are_refused_when_the_backend_goes_down() -> None:
    async def work() -> None:
        async with world(1, slots=1) as w:
            (stub,) = w.stubs.values()
            stub.release.clear()
            running = asyncio.create_task(w.ask())
            await until(lambda: stub.running == 1)
            waiting = asyncio.create_task(w.ask())
            await until(lambda: w.gateway.router.pools["pi05"].waiting == 1)
            stub.down = True
            for _ in range(3):
                await w.probe(w.member(stub))
            with pytest.raises(Fault, match="healthy"):
                await waiting
            stub.release.set()
            assert await running == 0.0

    run(work)


def test_the_loop_probes_by_itself_and_hurries_after_a_lost_connection() -> None:
    async def work() -> None:
        probe = ProbeSettings(period_s=3600, first_period_s=0.05, fall=1)
        async with world(1, probe=probe) as w:
            (stub,) = w.stubs.values()
            stub.fault, stub.down = Fault("unavailable", "gone", started=True), True
            assert (await outcomes(w, 1)) == {"unavailable": 1}
            await until(lambda: w.member(stub).state == "ejected")
            await until(lambda: (w.member(stub).last_error or "").startswith("probe: "))
            stub.fault, stub.down = None, False
            await until(lambda: w.member(stub).state == "ready")
            assert w.member(stub).last_error is None  # a ready one doesn't look broken
            assert await w.ask() == 0.0

    run(work)


def test_one_late_probe_does_not_wipe_out_why_a_server_is_left_alone() -> None:
    async def work() -> None:
        async with world(2) as w:
            bad, _ = w.stubs.values()
            w.gateway.router.pools["pi05"].eject(w.member(bad), "too many failures")
            for bad.down, said in ((True, "probe: "), (False, "ejected: too many failures")):
                await w.probe(w.member(bad))
                assert (w.member(bad).last_error or "").startswith(said)

    run(work)


# ---------------------------------------------------------------- contracts


def test_another_contract_behind_the_name_is_kept_out() -> None:
    async def work() -> None:
        async with world(1) as w:
            other = await w.add(StubBackend(1, replace(PI05, state_dim=14)))
            assert (await outcomes(w, 6)) == {0.0: 6}
            row = w.member(other).snapshot()
            assert (row["state"], row["healthy"]) == ("connecting", False)
            assert "--allow-mixed" in row["last_error"]
            assert "in state_dim." in row["last_error"]
            assert w.gateway.router.contract("pi05").state_dim == 8

    run(work)


def test_a_model_does_not_change_because_its_server_is_away() -> None:
    async def work() -> None:
        async with world(1) as w:
            (first,) = w.stubs.values()
            other = await w.add(StubBackend(1, replace(PI05, state_dim=14)))
            first.down = True
            for _ in range(3):
                await w.probe(w.member(first))
            await w.probe(w.member(other))
            assert (await outcomes(w, 2)) == {"unavailable": 2}
            w.gateway.remove(w.member(first).id)
            await until(lambda: first.closed)
            await w.probe(w.member(other))
            assert (await outcomes(w, 2)) == {1.0: 2}

    run(work)


def test_allow_mixed_lets_it_in() -> None:
    async def work() -> None:
        async with world(1, allow_mixed=True) as w:
            await w.add(StubBackend(1, replace(PI05, state_dim=14)))
            assert (await outcomes(w, 6)) == {0.0: 3, 1.0: 3}

    run(work)


def test_a_backend_says_how_many_requests_it_wants() -> None:
    async def work() -> None:
        async with world() as w:
            stub = await w.add(StubBackend(0, replace(PI05, extra={"max_in_flight": 2})))
            stub.delay_s = 0.005
            await asyncio.gather(*(w.ask() for _ in range(8)))
            assert stub.most_running == 2

    run(work)


# ---------------------------------------------------------------- coming and going


def test_draining_under_load_loses_nothing() -> None:
    async def work() -> None:
        async with world(3) as w:
            stubs = list(w.stubs.values())
            for stub in stubs:
                stub.delay_s = 0.004
            answered: list[float] = []
            stop = asyncio.Event()

            async def robot() -> None:
                while not stop.is_set():
                    answered.append(await w.ask())

            robots = [asyncio.create_task(robot()) for _ in range(12)]
            await until(lambda: len(answered) > 40)
            w.gateway.remove(w.member(stubs[0]).id)
            w.gateway.patch(w.member(stubs[1]).id, state="draining", weight=None)
            await until(lambda: stubs[0].closed and stubs[1].running == 0)
            assert stubs[0].cancelled == stubs[1].cancelled == 0
            mark, seen = len(answered), len(stubs[0].seen) + len(stubs[1].seen)
            await until(lambda: len(answered) > mark + 40)
            assert len(stubs[0].seen) + len(stubs[1].seen) == seen
            w.gateway.patch(w.member(stubs[1]).id, state="ready", weight=None)
            await until(lambda: len(stubs[0].seen) + len(stubs[1].seen) > seen)
            stop.set()
            await asyncio.gather(*robots)  # raises if one request failed

    run(work)


def test_registering_again_is_the_same_backend_even_while_it_leaves() -> None:
    async def work() -> None:
        async with world(1) as w:
            (stub,) = w.stubs.values()
            member = w.member(stub)
            assert w.gateway.add("pi05", f"grpc://{member.endpoint}") is member
            stub.release.clear()
            task = asyncio.create_task(w.ask())
            await until(lambda: stub.running == 1)
            w.gateway.remove(member.id)
            assert member.state == "draining"
            assert w.gateway.add("pi05", member.endpoint) is member
            stub.release.set()
            await task
            assert await w.ask() == 0.0
            assert not stub.closed

    run(work)


@pytest.mark.parametrize(
    ("model", "endpoint"),
    [
        ("", "h:1"),
        ("m", "h"),
        ("m", "h:0"),
        ("m", "h:70000"),
        ("m", "http://h:1"),
        ("m", "::1:5"),
        ("m" * 300, "h:1"),
        ("m", "unix:/tmp/x"),
        ("m", "a b:1"),
    ],
)
def test_wrong_registrations_are_refused(model: str, endpoint: str) -> None:
    async def work() -> None:
        async with world() as w:
            with pytest.raises(Fault) as caught:
                w.gateway.add(model, endpoint)
            assert caught.value.status == "invalid_argument"
            assert w.gateway.members() == []

    run(work)


def test_an_announced_server_is_dropped_when_it_falls_silent(clock: Clock) -> None:
    async def work() -> None:
        async with world(clock=clock) as w:
            found = await w.gateway.router.register("10.0.0.9:1", "pi05")
            assert found.interval_s == 5
            clock.now += 14
            assert await w.gateway.router.heartbeat(found.server_id)
            clock.now += 14
            w.gateway.tick()
            assert len(w.gateway.members()) == 1
            clock.now += 2
            w.gateway.tick()
            await until(lambda: not w.gateway.members())
            assert not await w.gateway.router.heartbeat(found.server_id)

    run(work)


# ---------------------------------------------------------------- metrics


def test_metrics_have_the_promised_names() -> None:
    async def work() -> None:
        async with world(1) as w:
            await w.ask()
            with pytest.raises(Fault):
                await w.gateway.router.infer(InferRequest("r", "evil\nname"), Call("test"))
            text = w.gateway.metrics.text().decode()
            member = w.gateway.members()[0].id
            for line in (
                'phyai_requests_total{model="pi05",outcome="ok",protocol="test"} 1.0',
                'phyai_requests_total{model="unknown",outcome="not_found",protocol="test"} 1.0',
                'phyai_request_duration_seconds_bucket{le="0.001",model="pi05",protocol="test"}',
                "phyai_queue_time_seconds_count 1.0",
                'phyai_queue_depth{model="pi05"} 0.0',
                'phyai_requests_inflight{model="pi05"} 0.0',
                f'phyai_backend_up{{backend="{member}"}} 1.0',
                f'phyai_backend_circuit_state{{backend="{member}"}} 0.0',
                f'phyai_backend_inflight{{backend="{member}"}} 0.0',
                f'phyai_backend_latency_ewma_seconds{{backend="{member}"}}',
                'phyai_observations_dropped_total{reason="superseded"} 0.0',
                "phyai_inference_duration_seconds_count 1.0",
                "phyai_build_info{version=",
            ):
                assert line in text, line
            assert "evil" not in text

    run(work)
