"""Rare turns: names that no message can carry, races, files half written, backends that change."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import replace
from pathlib import Path

import pytest

from phyai_gateway import gateway as gateway_module
from phyai_gateway import running
from phyai_gateway.backends import NOT_SERVING, Member
from phyai_gateway.breaker import Breaker, BreakerSettings
from phyai_gateway.cli import main, parser
from phyai_gateway.health import ProbeSettings
from phyai_gateway.mailbox import Mailboxes
from phyai_gateway.messages import Call, Fault
from phyai_gateway.pool import Pool
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.protocols.openpi import OpenpiListener
from phyai_gateway.router import RouteSettings
from phyai_gateway.state_file import Registration, StateFile
from phyai_gateway.tls import TlsFiles
from phyai_gateway.tokens import TokenFileError, TokenStore
from tests.gateway.http_client import fetch, served
from tests.gateway.stub_world import PI05, Clock, StubBackend, fault_of, run, until, world
from tests.gateway.test_http_tls import make_certificate, trusting

# ---------------------------------------------------------------- names and files


def test_half_a_character_is_no_model_name() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            body = b'{"model_name": "\\ud800", "endpoint": "h:1"}'
            kind = {"Content-Type": "application/json"}
            answer = await fetch(port, "POST", "/v1/backends", body, kind)
            assert (answer.status, answer.code) == (422, "invalid_payload")
            for path in ("/v1/backends", "/metrics", "/"):
                assert (await fetch(port, "GET", path)).status == 200

    run(work)


def test_a_name_with_line_ends_and_quotes_stays_one_metric() -> None:
    name = 'a"} 1\nphyai_fake{x="'

    async def work() -> None:
        async with world() as w, served(w) as port:
            await w.add(model=name)
            await w.ask(name)
            text = (await fetch(port, "GET", "/metrics")).body.decode()
            assert not [line for line in text.splitlines() if line.startswith("phyai_fake")]
            assert 'model="a\\"} 1\\nphyai_fake{x=\\""' in text

    run(work)


def test_a_saved_backend_that_cannot_be_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    rows = [{"model_name": "\ud800", "endpoint": "h:1"}, {"model_name": "m", "endpoint": "h:2"}]
    path.write_text(json.dumps({"version": 1, "backends": rows}))

    async def work() -> None:
        async with world(state=path) as w:
            assert [member.model for member in w.gateway.members()] == ["m"]

    run(work)


def test_a_weight_beyond_floats_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    row = f'{{"model_name": "m", "endpoint": "h:1", "weight": {10**400}}}'
    path.write_text(f'{{"version": 1, "backends": [{row}]}}')
    assert StateFile(path).read() == []
    assert [p.name.partition("-")[0] for p in tmp_path.iterdir()] == ["state.json.damaged"]


def test_a_file_that_cannot_be_read_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    assert StateFile(path).write([Registration("m", "h:1")])
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert StateFile(path).read() == []
    assert StateFile(path).write([])
    (aside,) = tmp_path.glob("state.json.damaged-*")
    assert aside.read_bytes() == before


def test_scopes_of_any_json_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    for text in ('{"a": {"token": "0123456789abcdef", "scopes": [["infer"]]}}', "[" * 100_000):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(TokenFileError):
            TokenStore.read(path)


@pytest.mark.parametrize("option", ["--backend-ca", "--backend-token-file"])
@pytest.mark.parametrize("text", ["", "two\nlines", "no\u00e9"])
def test_files_for_backends_are_checked_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, text: str
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    words = ["--http-port", "0", "--gateway", "127.0.0.1:0", option, str(path)]
    assert main(words) == 2
    assert option in capsys.readouterr().err


def test_the_state_may_not_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(running.ConfigError, match="--state must be a file"):
        running.plan_of(parser().parse_args(["--state", str(tmp_path)]))


# ---------------------------------------------------------------- certificates


def test_half_a_pair_does_not_spoil_the_certificate_in_use(tmp_path: Path) -> None:
    old, new = make_certificate(tmp_path, "old"), make_certificate(tmp_path, "new")
    used = TlsFiles(tmp_path / "used.pem", tmp_path / "used.key")
    used.cert.write_bytes(old.cert.read_bytes())
    used.key.write_bytes(old.key.read_bytes())

    async def work() -> None:
        async with world(1) as w, served(w, tls=used) as port:
            used.cert.write_bytes(new.cert.read_bytes())  # its key comes a moment later
            (api,) = w.gateway.listeners
            with pytest.raises(ssl.SSLError):
                api.reload_tls()  # type: ignore[attr-defined]
            answer = await fetch(port, "GET", "/health", context=trusting(old.cert))
            assert answer.status == 200

    run(work, 60)


def test_websockets_take_a_new_certificate_too(tmp_path: Path) -> None:
    old, new = make_certificate(tmp_path, "old"), make_certificate(tmp_path, "new")
    used = TlsFiles(tmp_path / "used.pem", tmp_path / "used.key")

    async def work() -> None:
        async with world(1) as w:
            for files, start in ((old, True), (new, False)):
                used.cert.write_bytes(files.cert.read_bytes())
                used.key.write_bytes(files.key.read_bytes())
                if start:
                    listener = OpenpiListener(w.gateway.router, ListenerOptions(tls=used))
                    port = await listener.start()
                else:
                    listener.reload_tls()
                trusted = trusting(files.cert)
                assert (await fetch(port, "GET", "/healthz", context=trusted)).status == 200
            await listener.stop()

    run(work, 60)


# ---------------------------------------------------------------- races


def test_a_replaced_request_does_not_give_away_a_turn_that_it_never_had() -> None:
    async def work() -> None:
        boxes = Mailboxes()
        entered: list[str] = []

        async def robot(name: str, hold: asyncio.Event) -> None:
            async with boxes.turn("arm", 9.0, 9.0):
                entered.append(name)
                await hold.wait()

        hold = asyncio.Event()
        first = asyncio.create_task(robot("first", hold))
        await asyncio.sleep(0)
        second = asyncio.create_task(robot("second", hold))
        await asyncio.sleep(0)
        third = asyncio.create_task(robot("third", hold))
        # The third replaces the second, whose client leaves in the same moment.
        asyncio.get_running_loop().call_soon(second.cancel)
        await asyncio.sleep(0.05)
        assert entered == ["first"]
        hold.set()
        await asyncio.gather(first, third)
        assert (await asyncio.gather(second, return_exceptions=True))[0] is not None
        assert entered == ["first", "third"]
        assert boxes.robots == 0

    run(work)


def test_those_who_wait_for_one_backend_do_not_keep_others_from_a_free_one() -> None:
    def member(name: str, slots: int) -> Member:
        breaker = Breaker(BreakerSettings())
        return Member(name, "m", name, StubBackend(), breaker, slots=slots, up=True)

    async def work() -> None:
        busy, free = member("busy", 1), member("free", 8)
        pool = Pool("m", queue_per_backend=1, members={"busy": busy, "free": free})
        deadline = asyncio.get_running_loop().time() + 10
        held = await pool.acquire(deadline, member=busy)
        waits = [asyncio.create_task(pool.acquire(deadline, member=busy)) for _ in range(2)]
        await asyncio.sleep(0)
        assert pool.waiting == 2
        lease = await pool.acquire(deadline)
        assert lease.member is free
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        pool.release(held, "success")

    run(work)


# ---------------------------------------------------------------- backends come and go


def test_models_of_the_past_do_not_use_up_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "MAX_BACKENDS", 3)

    async def work() -> None:
        async with world() as w:
            for number in range(8):
                member = w.gateway.add(f"m{number}", "h:1")
                w.gateway.remove(member.id)
                while w.gateway.members():
                    await asyncio.sleep(0)
            assert len(w.gateway.router.pools) <= 3
            for number in range(3):
                w.gateway.add("now", f"h:{number + 1}")
            assert (await fault_of(_add(w.gateway))).status == "resource_exhausted"

    run(work)


async def _add(gateway: gateway_module.Gateway) -> None:
    gateway.add("now", "h:9")


def test_an_operators_backend_needs_no_heartbeats(tmp_path: Path) -> None:
    async def work() -> None:
        clock = Clock()
        async with world(clock=clock, state=tmp_path / "s") as w:
            beats = await w.gateway.router.register("h:1", "m")
            await w.gateway.persist()
            assert json.loads((tmp_path / "s").read_text())["backends"] == []  # it comes by itself
            w.gateway.add("m", "h:1")
            assert await w.gateway.router.heartbeat(beats.server_id)
            clock.now += 60
            w.gateway.tick()
            assert [m.leaving for m in w.gateway.members()] == [False]
            assert await w.gateway.router.heartbeat(beats.server_id)
            await w.gateway.persist()
            assert len(json.loads((tmp_path / "s").read_text())["backends"]) == 1
            assert not await w.gateway.router.heartbeat("nobody")

    run(work)


def test_a_rolling_change_of_contract_needs_no_second_probe() -> None:
    async def work() -> None:
        async with world(2) as w:
            first, second = w.stubs.values()
            await asyncio.sleep(0.05)  # the monitor's own first probes
            for stub in (first, second):
                stub.published = replace(PI05, horizon=10)
            await w.probe(w.member(first))
            assert w.member(first).refusal is not None
            assert {await w.ask() for _ in range(4)} == {second.number}
            await w.probe(w.member(second))  # the last one with the old contract is gone
            assert w.member(first).refusal is None
            assert {await w.ask() for _ in range(4)} == {first.number, second.number}

    run(work)


def test_a_drain_that_cuts_requests_says_so() -> None:
    class Stuck:
        async def drain(self) -> None:
            await asyncio.sleep(60)

        async def stop(self) -> None:
            pass

    async def work() -> None:
        async with world(grace_s=0.05) as w:
            assert await w.gateway.drain()
            w.gateway.listeners.append(Stuck())  # type: ignore[arg-type]
            assert not await w.gateway.drain()

    run(work)


def test_a_backend_that_hangs_is_asked_at_once_whether_it_lives() -> None:
    async def work() -> None:
        probe = ProbeSettings(period_s=3600, first_period_s=0.05, timeout_s=0.1)
        async with world(2, probe=probe) as w:
            await asyncio.sleep(0.05)
            hung = next(iter(w.stubs.values()))
            hung.release.clear()
            hung.down = True
            call = Call("test", deadline=time.monotonic() + 0.4)
            for one in w.gateway.members():
                one.latencies.add(0.001)
            asked = [asyncio.create_task(w.ask(call=call)) for _ in range(2)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert sorted(isinstance(one, Fault) for one in answers) == [False, True]
            await until(lambda: not w.member(hung).up)

    run(work)


def test_a_backend_that_says_no_is_down_at_once() -> None:
    async def work() -> None:
        async with world(2) as w:
            leaving = next(iter(w.stubs.values()))
            await asyncio.sleep(0.05)

            async def no() -> None:
                raise Fault("unavailable", "server stops.", reason=NOT_SERVING)

            leaving.probe = no  # type: ignore[method-assign]
            await w.probe(w.member(leaving))
            assert w.member(leaving).state == "ejected"

    run(work)


def test_busy_servers_leave_retries_for_those_that_stop() -> None:
    async def work() -> None:
        async with world(2, route=RouteSettings(retry_burst=2, retry_share=0)) as w:
            first, second = w.stubs.values()
            busy = Fault("resource_exhausted", "queue is full.", retry_after=0.1)
            first.fault = second.fault = busy
            for _ in range(10):
                await fault_of(w.ask())
            assert len(first.seen) + len(second.seen) == 12  # two of them were tried twice
            first.fault, second.fault = Fault("unavailable", "server stops."), None
            assert {await w.ask() for _ in range(2)} == {second.number}

    run(work)


def test_how_much_a_server_holds_is_no_difference_of_models() -> None:
    small = replace(PI05, extra={"max_in_flight": 2, "kind": "tensors"})
    large = replace(PI05, extra={"max_in_flight": 9, "kind": "tensors"})
    assert small.fingerprint == large.fingerprint != PI05.fingerprint
    assert small.to_json()["extra"]["max_in_flight"] == 2


def test_busy_is_neither_a_failure_nor_a_success() -> None:
    clock = Clock()
    breaker = Breaker(BreakerSettings(failures=3), clock)
    for outcome in ("failure", "neutral", "failure", "neutral"):
        assert not breaker.record(outcome)  # type: ignore[arg-type]
    assert breaker.record("failure")
    clock.now += breaker.trip()
    assert breaker.begin()
    assert not breaker.record("neutral", trial=True)
    assert (breaker.state, breaker.admits) == ("half_open", True)


def test_garbage_of_a_backend_is_its_failure() -> None:
    async def work() -> None:
        async with world(2) as w:
            bad = next(iter(w.stubs.values()))
            bad.fault = Fault("data_loss", "server's reply cannot be read.", started=True)
            for _ in range(20):
                try:
                    await w.ask()
                except Fault as fault:
                    assert fault.status == "data_loss"  # noqa: PT017
            assert w.member(bad).state == "ejected"
            assert {await w.ask() for _ in range(4)} == {1.0}

    run(work)
