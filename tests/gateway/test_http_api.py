"""The gateway's HTTP port: health, management, events, tokens, limits, hostile clients."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from phyai_gateway.protocols.base import Limits
from phyai_gateway.tokens import TokenFileError, TokenStore
from tests.gateway.http_client import fetch, served
from tests.gateway.stub_world import StubBackend, run, until, world

ARM, BOSS = "arm-token-0123456789", "boss-token-0123456789"
TOKENS = TokenStore.of({"arm": (ARM, ("infer",)), "boss": (BOSS, ("admin",))})


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_health_says_alive_ready_and_why_not() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            assert (await fetch(port, "GET", "/health")).json == {"status": "ok"}
            assert (await fetch(port, "GET", "/healthz")).body == b"OK\n"
            answer = await fetch(port, "GET", "/health/ready")
            assert (answer.status, answer.json["reasons"]) == (503, ["no backend is registered"])
            stub = await w.add()
            assert (await fetch(port, "GET", "/health/ready")).status == 200
            assert (await fetch(port, "GET", "/health/model/pi05")).status == 200
            assert (await fetch(port, "GET", "/health/model/other")).status == 404
            stub.down = True
            for _ in range(3):
                await w.probe(w.member(stub))
            answer = await fetch(port, "GET", "/health/ready")
            assert (answer.status, "pi05" in str(answer.json)) == (503, True)
            assert (await fetch(port, "GET", "/health/model/pi05")).status == 503
            assert (await fetch(port, "GET", "/health")).status == 200

    run(work)


def test_backends_are_registered_patched_and_deleted() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            body = {"model_name": "pi05", "endpoint": "10.0.0.1:50063"}
            first = await fetch(port, "POST", "/v1/backends", body)
            again = await fetch(port, "POST", "/v1/backends", body)
            assert (first.status, first.json["healthy"]) == (202, False)
            assert first.json["server_id"] == again.json["server_id"]
            path = f"/v1/backends/{first.json['server_id']}"
            await until(lambda: w.gateway.router.ready("pi05"))  # the loop's first probe
            (row,) = (await fetch(port, "GET", "/v1/backends")).json["backends"]
            assert {"server_id", "model_name", "endpoint", "healthy", "in_flight_requests"} <= set(
                row
            )
            assert (row["healthy"], row["state"]) == (True, "ready")
            contract = (await fetch(port, "GET", "/v1/models/pi05")).json
            assert (contract["state_dim"], contract["fingerprint"]) == (8, row["contract"])
            assert (await fetch(port, "GET", "/v1/models/nobody")).status == 404
            answer = await fetch(port, "PATCH", path, {"state": "draining", "weight": 2})
            assert (answer.json["state"], answer.json["weight"]) == ("draining", 2.0)
            assert (await fetch(port, "PATCH", path, {"state": "ready"})).json["healthy"]
            assert (await fetch(port, "DELETE", path)).status == 202
            await until(lambda: w.gateway.members() == [])
            assert (await fetch(port, "GET", "/v1/backends")).json["backends"] == []
            assert w.gateway.router.models() == ()  # so that the one that is left needs no naming

    run(work)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "", {"model_name": "m"}, 422, "invalid_payload"),
        ("POST", "", {"model_name": "m", "endpoint": "nowhere"}, 422, "invalid_payload"),
        ("POST", "", {"model_name": "m", "endpoint": "h:1", "more": 1}, 422, "invalid_payload"),
        ("POST", "", {"model_name": 3, "endpoint": "h:1"}, 422, "invalid_payload"),
        ("POST", "", {"model_name": "m", "endpoint": "h:1", "weight": "9"}, 422, "invalid_payload"),
        ("POST", "", [1], 422, "invalid_payload"),
        ("POST", "", "[" * 5000, 422, "invalid_payload"),
        ("PATCH", "/nobody", {"state": "ready"}, 404, "not_found"),
        ("DELETE", "/nobody", None, 404, "not_found"),
    ],
)
def test_wrong_management_is_refused_in_words(
    method: str, path: str, body: object, status: int, code: str
) -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            answer = await fetch(port, method, "/v1/backends" + path, body)
            assert (answer.status, answer.code) == (status, code)
            assert w.gateway.members() == []

    run(work)


def test_bodies_that_are_no_json_or_too_large() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            kind = {"Content-Type": "application/json"}
            answer = await fetch(port, "POST", "/v1/backends", b"[" * 60_000, kind)
            assert (answer.status, answer.code) == (400, "invalid_json")
            answer = await fetch(port, "POST", "/v1/backends", b" " * 70_000, kind)
            assert (answer.status, answer.code) == (413, "payload_too_large")

    run(work)


def test_pages_of_other_sites_may_not_manage() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            body = json.dumps({"model_name": "m", "endpoint": "h:1"}).encode()
            path = "/v1/backends"
            # What a form or a script can send without asking first.
            plain = await fetch(port, "POST", path, body, {"Content-Type": "text/plain"})
            assert plain.status == 415
            kind = {"Content-Type": "application/json"}
            other = {**kind, "Origin": "http://evil.example"}
            assert (await fetch(port, "POST", path, body, other)).code == "cross_origin"
            # A name of the attacker's that points to this machine.
            host = {**kind, "Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
            assert (await fetch(port, "POST", path, body, host)).code == "unknown_host"
            assert (await fetch(port, "GET", "/v1/events", headers=host)).status == 403
            own = {**kind, "Origin": f"http://127.0.0.1:{port}"}
            assert (await fetch(port, "POST", path, body, own)).status == 202

    run(work)


def test_tokens_and_their_scopes() -> None:
    async def work() -> None:
        async with world(1) as w, served(w, tokens=TOKENS) as port:
            backends = "/v1/backends"
            answer = await fetch(port, "GET", backends)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            wrong = bearer("guess-guess-guess-guess")
            assert (await fetch(port, "GET", backends, headers=wrong)).status == 401
            assert (await fetch(port, "GET", backends, headers=bearer(ARM))).status == 403
            assert (await fetch(port, "GET", backends, headers=bearer(BOSS))).status == 200
            for token in (ARM, BOSS):
                assert (await fetch(port, "GET", "/metrics", headers=bearer(token))).status == 200
            assert (await fetch(port, "GET", "/metrics")).status == 401
            kind = {"Content-Type": "application/msgpack"}
            path = "/v1/actions/generations"
            assert (await fetch(port, "POST", path, b"\x80", kind)).status == 401
            assert (await fetch(port, "POST", path, b"\x80", kind | bearer(BOSS))).status == 403
            assert (await fetch(port, "POST", path, b"\x80", kind | bearer(ARM))).status == 422
            for open_path in ("/health", "/health/ready", "/", "/v2/health/live"):
                assert (await fetch(port, "GET", open_path)).status == 200
            for answer in (await fetch(port, "GET", backends, headers=bearer(ARM)),):
                assert ARM not in answer.body.decode()

    run(work)


def test_a_token_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"

    def write(data: object, mode: int = 0o600) -> Path:
        path.write_text(json.dumps(data))
        path.chmod(mode)
        return path

    good = {"arm": {"token": ARM, "scopes": ["infer"]}}
    assert TokenStore.read(write(good)).check(ARM, "infer") == "arm"
    for data in (
        [],
        {},
        {"a": {"token": "short"}},
        {"a": {"token": ARM, "scopes": ["root"]}},
        {"a": {"token": ARM}, "b": {"token": ARM}},
        {"a": ARM},
    ):
        with pytest.raises(TokenFileError) as caught:
            TokenStore.read(write(data))
        assert ARM not in str(caught.value)
    with pytest.raises(TokenFileError, match="chmod"):
        TokenStore.read(write(good, 0o644))
    with pytest.raises(TokenFileError):
        TokenStore.read(tmp_path / "none")


def test_every_token_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    calls = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: calls.append(1) or real(a, b))
    TOKENS.check(ARM, "infer")
    assert len(calls) == 2


def test_management_can_have_its_own_port() -> None:
    async def work() -> None:
        async with world(1) as w, served(w, admin=False) as port, served(w, infer=False) as own:
            for path in ("/", "/v1/backends", "/v1/events"):
                assert (await fetch(port, "GET", path)).status == 404
            assert (await fetch(own, "GET", "/v1/backends")).status == 200
            kind = {"Content-Type": "application/msgpack"}
            assert (await fetch(own, "POST", "/v1/actions/generations", b"", kind)).status == 404

    run(work)


# ---------------------------------------------------------------- events


async def _events(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"text/event-stream" in head
    return reader, writer


async def _status(reader: asyncio.StreamReader) -> dict[str, list[dict[str, object]]]:
    await reader.readuntil(b"data: ")
    found: dict[str, list[dict[str, object]]] = json.loads(await reader.readuntil(b"\n"))
    return found


def test_events_follow_the_state_and_end_with_the_gateway() -> None:
    async def work() -> None:
        async with world(1) as w, served(w) as port:
            (stub,) = w.stubs.values()
            reader, writer = await _events(port)
            first = await _status(reader)
            assert [row["state"] for row in first["backends"]] == ["ready"]
            await w.ask()
            w.gateway.patch(w.member(stub).id, state="draining", weight=None)
            second = await _status(reader)
            assert [row["state"] for row in second["backends"]] == ["draining"]
            assert second["models"][0]["requests"] == 1
            assert await w.gateway.drain()  # not cut at the end of its grace
            rest = await asyncio.wait_for(reader.read(), 15)
            assert b'"draining": true' in rest
            writer.close()

    run(work)


def test_watchers_are_bounded_and_leaving_frees_the_place() -> None:
    async def work() -> None:
        async with world(1) as w, served(w) as port:
            streams = [await _events(port) for _ in range(32)]
            assert (await fetch(port, "GET", "/v1/events")).status == 503
            for _, writer in streams:
                writer.close()
            for _ in range(100):
                try:
                    _, writer = await _events(port)
                    writer.close()
                    break
                except AssertionError:
                    await asyncio.sleep(0.05)
            else:
                pytest.fail("no place became free")

    run(work)


# ---------------------------------------------------------------- slow and greedy clients


def test_a_slow_loris_is_dropped_and_others_are_served() -> None:
    async def work() -> None:
        limits = Limits(receive_timeout_s=0.3)
        async with world(1) as w, served(w, limits=limits) as port:
            silent, _ = await asyncio.open_connection("127.0.0.1", port)
            slow, writer = await asyncio.open_connection("127.0.0.1", port)

            async def drip() -> None:
                for byte in b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 1000:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.02)

            dripping = asyncio.create_task(drip())
            assert (await fetch(port, "GET", "/health")).status == 200
            assert await asyncio.wait_for(_until_closed(silent), 15) == b""
            assert await asyncio.wait_for(_until_closed(slow), 15) == b""
            dripping.cancel()

    run(work)


def test_a_second_request_may_not_drip_either() -> None:
    async def work() -> None:
        async with world(1) as w, served(w, limits=Limits(receive_timeout_s=0.3)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"ok")
            writer.write(b"GET /hea")
            assert b"HTTP" not in await asyncio.wait_for(_until_closed(reader), 15)

    run(work)


def test_a_slow_body_is_refused() -> None:
    async def work() -> None:
        async with world(1) as w, served(w, limits=Limits(receive_timeout_s=0.3)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = (
                "POST /v1/actions/generations HTTP/1.1\r\nHost: x\r\n"
                "Content-Type: application/msgpack\r\nContent-Length: 1000\r\n\r\n"
            )
            writer.write(head.encode() + b"\x80")
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), 15)
            assert b"504" in answer.split(b"\r\n", 1)[0]
            writer.close()

    run(work)


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


def test_connections_are_capped_and_headers_bounded() -> None:
    async def work() -> None:
        async with world(1) as w, served(w, limits=Limits(max_connections=5)) as port:
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            extra, _ = await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(_until_closed(extra), 15) == b""
            held[0][1].close()
            await until(lambda: w.gateway.metrics.session_counts()["http"] < 5)
            assert (await fetch(port, "GET", "/health")).status == 200
            reader, writer = held[1]
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 40_000)
            assert b"400" in await asyncio.wait_for(_until_closed(reader), 15)

    run(work)


async def _refused(port: int) -> None:
    """Ask until nobody listens any more."""
    while True:
        try:
            await fetch(port, "GET", "/health")
        except ConnectionRefusedError:
            return
        except OSError:  # it closed in the middle of this one
            continue


def test_what_was_accepted_is_answered_while_draining() -> None:
    async def work() -> None:
        async with world() as w, served(w) as port:
            stub = await w.add(StubBackend(3.0))
            stub.release.clear()
            body = {
                "inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["x"]}]
            }
            task = asyncio.create_task(fetch(port, "POST", "/v2/models/pi05/infer", body))
            await until(lambda: stub.running == 1)
            drain = asyncio.create_task(w.gateway.drain())
            await _refused(port)
            assert not drain.done()
            stub.release.set()
            answer = await task
            assert answer.json["outputs"][0]["data"] == [3.0]
            await drain

    run(work)
