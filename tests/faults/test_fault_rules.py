"""The rules behind the fault suite, without processes: blame, retries, return, expiry, memory."""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
import weakref
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from phyai_gateway import certificate
from phyai_gateway.messages import Call, Fault, InferRequest, bare
from phyai_gateway.router import RouteSettings
from tests.gateway.stub_world import StubBackend, World, fault_of, run, until, world
from tests.gateway.test_http_tls import make_certificate


class Request(InferRequest):
    """A request whose end can be seen."""

    __slots__ = ("__weakref__",)


def member_state(w: World, stub: StubBackend) -> str:
    return w.member(stub).state


def test_one_that_never_answered_is_judged_by_what_the_others_need() -> None:
    """A robot's short deadline is no excuse, or a server that hangs would be asked for ever."""

    async def work() -> None:
        async with world(2) as w:
            hung, good = w.stubs.values()
            w.member(good).latencies.add(0.001)
            w.member(hung).weight = 100  # it is asked first
            hung.release.clear()
            for _ in range(5):
                assert member_state(w, hung) == "ready"
                call = Call("test", deadline=time.monotonic() + 0.05)
                assert (await fault_of(w.ask(call=call))).status == "deadline_exceeded"
            assert member_state(w, hung) == "ejected"
            assert await w.ask() == good.number

    run(work)


def test_a_client_that_gives_up_at_its_deadline_says_what_the_deadline_would() -> None:
    """One that leaves early says nothing about the server."""

    async def work() -> None:
        async with world(2) as w:
            hung, good = w.stubs.values()
            w.member(good).latencies.add(0.001)
            w.member(good).draining = True
            hung.release.clear()
            for share in (0.2, 0.95):
                before = w.member(hung).breaker.failures_in_row
                call = Call("test", deadline=time.monotonic() + 0.2)
                asked = asyncio.create_task(w.ask(call=call))
                await asyncio.sleep(0.2 * share)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                found = w.member(hung).breaker.failures_in_row - before
                assert found == int(share > 0.9)

    run(work)


def test_a_server_that_stops_costs_a_robot_nothing_however_many_ask() -> None:
    async def work() -> None:
        async with world(2) as w:
            stopping, good = w.stubs.values()
            stopping.fault = Fault("unavailable", "server is stopping.", retry_after=1.0)
            w.member(stopping).breaker.record = lambda *_, **__: False  # type: ignore[method-assign]
            found = await asyncio.gather(*(w.ask() for _ in range(60)))
            assert set(found) == {good.number}
            assert len(stopping.seen) >= 20  # more than the retries that busy servers get

    run(work)


def test_a_server_that_came_up_again_is_tried_at_once() -> None:
    async def work() -> None:
        async with world(2) as w:
            bad, _ = w.stubs.values()
            bad.fault = Fault("internal", "broken")
            while member_state(w, bad) == "ready":
                try:
                    await w.ask()
                except Fault:
                    continue
            bad.down, bad.fault = True, None
            for _ in range(3):
                await w.probe(w.member(bad))
            bad.down = False
            await w.probe(w.member(bad))
            assert await w.ask() == bad.number
            assert member_state(w, bad) == "ready"

    run(work)


def test_a_refused_request_is_not_kept_by_its_fault() -> None:
    """Without the garbage collector: a cycle would keep its bytes till that comes by."""

    async def work() -> None:
        async with world(2, route=RouteSettings()) as w:
            for stub in w.stubs.values():
                stub.fault = Fault("unavailable", "server is stopping.", retry_after=1.0)
                stub.seen = _Nothing()
            gc.collect()
            gc.disable()
            try:
                request = Request("r1", "pi05")
                kept = weakref.ref(request)
                with suppress(Fault):
                    await w.gateway.router.infer(request, Call("test"))
                del request
                for stub in w.stubs.values():
                    stub.fault = None
                await until(lambda: kept() is None, 1.0)
            finally:
                gc.enable()

    run(work)


class _Nothing(list):  # type: ignore[type-arg]
    def append(self, _: object) -> None:
        """Keep nothing."""


def test_a_bare_fault_has_no_way_back_to_its_request() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            raise Fault("internal", "outer") from None
    except Fault as error:
        found = bare(error)
    assert found.__traceback__ is None
    assert found.__context__ is None


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_end_of_a_certificate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = make_certificate(tmp_path, "own")
    left = certificate.expiry(files.cert) - datetime.now(UTC)
    assert timedelta(days=1, hours=23) < left < timedelta(days=2, minutes=1)
    certificate.warn(files.cert)
    assert "expires on" in caplog.text
    files.cert.write_text("no certificate")
    certificate.warn(files.cert)  # who loads it says what is wrong
    text = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"
    files.cert.write_text(text)
    certificate.warn(files.cert)
    with pytest.raises((ValueError, IndexError)):
        certificate.expiry(files.cert)
