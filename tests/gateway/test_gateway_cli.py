"""The command: settings, exposure, signals, and a real model server behind it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgpack
import pytest

from phyai_gateway import running
from phyai_gateway.cli import main, parser
from phyai_gateway.listeners import ConfigError, find_listener, parse_endpoint, parse_listen
from phyai_gateway.proto.encoded import decoded
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.protocols.gr00t import Gr00tListener
from phyai_gateway.protocols.native import NativeListener
from tests.gateway.http_bodies import MSGPACK, PATH, flat
from tests.gateway.http_client import fetch
from tests.gateway.stub_world import StubBackend, World, run, until, world
from tests.ports import free_ports

LIMIT_S = 60.0


class Process:
    """A running phyai-gateway and what it says."""

    def __init__(self, inner: asyncio.subprocess.Process) -> None:
        self.inner, self.lines = inner, list[str]()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.inner.stdout is not None
        async for line in self.inner.stdout:
            self.lines.append(line.decode())

    async def says(self, text: str) -> None:
        await until(lambda: any(text in line for line in self.lines), LIMIT_S)

    async def ended(self) -> int:
        code = await asyncio.wait_for(self.inner.wait(), LIMIT_S)
        await self._reading
        return code


@asynccontextmanager
async def gateway(*arguments: str) -> AsyncIterator[Process]:
    inner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-u",
        "-m",
        "phyai_gateway.cli",
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    process = Process(inner)
    try:
        yield process
    finally:
        if inner.returncode is None:
            inner.kill()
        await process.ended()


@asynccontextmanager
async def model_server(w: World) -> AsyncIterator[tuple[StubBackend, str]]:
    """A native gRPC server over a stub engine; gives its HOST:PORT."""
    stub = await w.add(StubBackend(1.5))
    stub.rows = 2  # it gets requests as bytes, and so counts no rows
    listener = NativeListener(w.gateway.router, ListenerOptions())
    port = await listener.start()
    try:
        yield stub, f"127.0.0.1:{port}"
    finally:
        await listener.stop()


async def serving(http: int) -> None:
    """Wait until the gateway is ready."""
    for _ in range(1200):
        try:
            if (await fetch(http, "GET", "/health/ready")).status == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.05)
    pytest.fail("gateway did not become ready")


def test_the_seeds_command_starts_on_loopback_and_says_how_to_open_it() -> None:
    async def work() -> None:
        async with world() as w, model_server(w) as (stub, endpoint):
            grpc, http, lerobot = free_ports(3)
            async with gateway(
                *("--backend", "pi05", endpoint, "--gateway", f"127.0.0.1:{grpc}"),
                *("--http-port", str(http), "--lerobot", f"127.0.0.1:{lerobot}"),
                *("--lerobot-fps", "30", "--threads", "32"),
            ) as process:
                await process.says("--insecure-bind")
                for name, port in (("native", grpc), ("http", http), ("lerobot", lerobot)):
                    assert f"{name} listens on 127.0.0.1:{port}\n" in process.lines
                await serving(http)
                answer = await fetch(http, "POST", PATH, msgpack.packb(flat()), MSGPACK)
                assert answer.status == 200
                assert decoded(stub.seen[0]).instructions == ("a", "b")
                models = (await fetch(http, "GET", "/v1/models")).json["models"]
                assert models[0]["contract"]["state_dim"] == 8
                process.inner.send_signal(signal.SIGTERM)
                assert await process.ended() == 0

    run(work, 120)


@pytest.mark.slow
def test_sigterm_answers_what_was_accepted_and_state_comes_back(tmp_path: Path) -> None:
    async def work() -> None:
        async with world() as w, model_server(w) as (stub, endpoint):
            grpc, http = free_ports(2)
            arguments = ("--gateway", f"127.0.0.1:{grpc}", "--http-port", str(http))
            arguments += ("--state", str(tmp_path / "state.json"))
            async with gateway(*arguments) as process:
                await process.says("No backend yet")
                body = {"model_name": "pi05", "endpoint": endpoint}
                assert (await fetch(http, "POST", "/v1/backends", body)).status == 202
                await serving(http)
                stub.release.clear()
                asked = asyncio.create_task(
                    fetch(http, "POST", PATH, msgpack.packb(flat()), MSGPACK)
                )
                await until(lambda: stub.running == 1)
                process.inner.send_signal(signal.SIGTERM)
                await process.says("draining")
                assert not asked.done()
                stub.release.set()
                assert (await asked).status == 200
                assert await process.ended() == 0
            async with gateway(*arguments) as process:
                await serving(http)
                stub.release.clear()
                asked = asyncio.create_task(
                    fetch(http, "POST", PATH, msgpack.packb(flat()), MSGPACK)
                )
                await until(lambda: stub.running == 1)
                process.inner.send_signal(signal.SIGTERM)
                await process.says("draining")
                process.inner.send_signal(signal.SIGTERM)
                assert await process.ended() == 1
                with pytest.raises((OSError, Exception)):
                    await asked

    run(work, 120)


@pytest.mark.slow
def test_a_killed_gateway_has_its_registrations_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with world() as w, model_server(w) as (_, endpoint):
            grpc, http = free_ports(2)
            arguments = ("--gateway", f"127.0.0.1:{grpc}", "--http-port", str(http))
            arguments += ("--state", str(tmp_path / "state.json"))
            async with gateway(*arguments) as process:
                await process.says("No backend yet")
                body = {"model_name": "pi05", "endpoint": endpoint}
                assert (await fetch(http, "POST", "/v1/backends", body)).status == 202
                process.inner.kill()
                assert await process.ended() == -signal.SIGKILL
            async with gateway(*arguments):
                await serving(http)

    run(work, 120)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--http-host", "0.0.0.0"], "--insecure-bind"),
        (["--gateway", "0.0.0.0:0"], "--token-file"),
        (["--lerobot", "0.0.0.0:0"], "can send no token"),
        (["--admin", "0.0.0.0:0"], "--insecure-bind"),
        (["--listen", "lerobo"], "Did you mean 'lerobot'"),
        (["--listen", "native=nowhere"], "HOST:PORT"),
        (["--listen", "native,x"], "key=value"),
        (["--listen", "rlinf,x=1"], "rlinf_envelope"),
        (["--backend", "m", "h"], "--backend: endpoint must be HOST:PORT"),
        (["--backend", "m", "h:99999"], "--backend: port"),
        (["--gateway", "h"], "--gateway: endpoint"),
        (["--lerobot", "h"], "--lerobot: endpoint"),
        (["--backend", "", "h:1"], "model_name"),
        (["--lerobot-fps", "30"], "--lerobot"),
        (["--backends-file", "/none"], "--backends-file"),
        (["--robot", "nowhere"], "HOST:PORT"),
        (["--workers", "0"], "--workers"),
        (["--worker", "1"], "--worker"),
        (["--workers", "2"], "--http-port"),
        (["--workers", "2", "--http-port", "9", "--state", "x"], "--backends-file"),
        (["--workers", "2", "--http-port", "9", "--admin", "127.0.0.1:0"], "--admin"),
        (["--tls-cert", "x"], "--tls-key"),
        (["--tls-cert", "/none", "--tls-key", "/none"], "/none, /none: No such file"),
        (["--token-file", "/none"], "'/none' is not: No such file"),
        (["--state", "/none/x"], "folder of --state"),
        (["--timeout", "nan"], "--timeout"),
        (["--queue", "0"], "--queue"),
        (["--probe-period", "0"], "above 0"),
        (["--http-port", "99999"], "--http-port"),
    ],
)
def test_wrong_settings_end_with_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = [] if "--gateway" in arguments else ["--gateway", "127.0.0.1:0"]
    quiet += [] if "--http-port" in arguments else ["--http-port", "0"]
    assert main([*quiet, *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_an_address_in_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        assert main(["--gateway", "127.0.0.1:0", "--http-port", port]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_insecure_bind_says_what_it_risks() -> None:
    async def work() -> None:
        async with world() as w:
            args = parser().parse_args(["--http-host", "0.0.0.0", "--insecure-bind"])
            running.make_listeners(running.plan_of(args), w.gateway)
            (warning,) = w.gateway.snapshot()["warnings"]
            assert "anybody who reaches this port" in warning

    run(work)


def test_a_listener_is_told_its_model() -> None:
    """Clients of GR00T, and openpi's by HOST:PORT, have no way to name one of several."""

    async def work() -> None:
        async with world() as w:
            args = parser().parse_args(["--listen", "gr00t=127.0.0.1:0,model=b,dialect=a"])
            *_, (listener, _) = running.make_listeners(running.plan_of(args), w.gateway)
            assert isinstance(listener, Gr00tListener)
            assert listener._options.default_model == "b"

    run(work)


STARTED = """
import asyncio, os, signal, sys
from phyai_gateway.cli import parser
from phyai_gateway import running

def say(text):
    if text.startswith("Only this machine"):  # everything listens
        os.kill(os.getpid(), signal.SIGTERM)

own_ports = [name for name in running.protocols() if name != "native"]
listen = [word for name in own_ports for word in ("--listen", name + "=127.0.0.1:0")]
words = ["--gateway", "127.0.0.1:0", "--http-port", "0", "--backend", "m", "127.0.0.1:1"]
code = asyncio.run(running.run(running.plan_of(parser().parse_args(words + listen)), say))
heavy = {"torch", "triton", "numpy", "phyai", "PIL", "transformers"}
print(code, len(own_ports) >= 5, sorted(heavy & set(sys.modules)))
"""


def test_a_started_gateway_has_loaded_neither_torch_nor_numpy_nor_the_engine() -> None:
    command = [sys.executable, "-c", STARTED]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert found.stdout.strip() == "0 True []", found.stderr


def test_protocols_are_found_without_import() -> None:
    assert {"native", "rlinf", "kserve"} <= set(running.protocols())
    assert find_listener("native") is NativeListener
    with pytest.raises(ConfigError, match="native"):
        find_listener("nonsense")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("grpc://[::1]:5", ("::1", 5)),
        ("h.example:65535", ("h.example", 65535)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
    ],
)
def test_endpoints(text: str, found: tuple[str, int]) -> None:
    assert parse_endpoint(text) == found


def test_listen_words() -> None:
    found = parse_listen("gr00t=[::1]:0,a=b=c")
    assert (found.protocol, found.host, found.port) == ("gr00t", "::1", 0)
    assert found.options == {"a": "b=c"}
    assert parse_listen("openpi").port is None


def test_lerobot_options_are_passed_on() -> None:
    args = parser().parse_args(
        ["--lerobot", "--lerobot-fps", "20", "--lerobot-alias", "a=b", "--lerobot-alias", "c=d"]
    )
    (_, lerobot) = running.plan_of(args).listens
    assert (lerobot.host, lerobot.port) == ("127.0.0.1", 8080)
    assert lerobot.options.pop("max_observation_age_s") == "1.0"  # type: ignore[attr-defined]
    assert lerobot.options == {"fps": "20", "alias.a": "b", "alias.c": "d"}
