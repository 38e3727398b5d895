"""Model servers that announce themselves: listed, heard, forgotten, listed again."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from phyai.errors import ConfigError
from phyai_gateway.messages import Fault
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.protocols.native import NativeListener, Registration
from phyai_gateway.server import config
from phyai_gateway.server.registering import Announcement, Registrar, announcement
from phyai_gateway.tokens import TokenStore
from tests.gateway import serving as served
from tests.gateway.stub_router import StubRouter
from tests.gateway.stub_world import Clock, World, run, until, world

TOKEN = "a-long-enough-secret"


@asynccontextmanager
async def listening(w: World, port: int = 0, **options: Any) -> AsyncIterator[str]:
    listener = NativeListener(w.gateway.router, ListenerOptions(port=port, **options))
    found = await listener.start()
    try:
        yield f"127.0.0.1:{found}"
    finally:
        await listener.stop()


@asynccontextmanager
async def announced(*gateways: str, token: str | None = None) -> AsyncIterator[Registrar]:
    wanted = Announcement(gateways, "pi05", "10.0.0.7", None, token)
    made = Registrar(wanted, 50063, retry_s=0.02, longest_s=0.02)
    made.start()
    try:
        yield made
    finally:
        await made.stop()


def endpoints(w: World) -> list[str]:
    return [member.endpoint for member in w.gateway.members() if not member.leaving]


def test_a_server_stays_listed_while_it_beats_and_leaves_by_falling_silent(clock: Clock) -> None:
    async def work() -> None:
        async with world(clock=clock) as w, listening(w) as gateway:
            async with announced(gateway) as registrar:
                await until(lambda: bool(registrar.listed))
                assert endpoints(w) == ["10.0.0.7:50063"]
                (server,) = registrar.listed.values()
                assert server == w.gateway.members()[0].id
                clock.now += 10
                before = w.gateway._announced[server]
                await until(lambda: w.gateway._announced[server] > before)  # a heartbeat
                w.gateway.tick()
                assert endpoints(w)
            clock.now += 15.1
            w.gateway.tick()
            await until(lambda: not w.gateway.members())

    run(work)


def test_a_gateway_that_forgot_or_restarted_lists_it_again() -> None:
    async def work() -> None:
        async with world() as w, listening(w) as gateway, announced(gateway) as registrar:
            await until(lambda: bool(endpoints(w)))
            w.gateway.remove(w.gateway.members()[0].id)
            await until(lambda: bool(endpoints(w)))
            await until(lambda: bool(registrar.listed))
            port = int(gateway.rpartition(":")[2])
        async with world() as w, announced(gateway) as registrar:
            # Nobody listens there yet.
            assert not registrar.listed
            async with listening(w, port):
                await until(lambda: bool(endpoints(w)))
            async with world() as fresh, listening(fresh, port):  # a restart: it knows nobody
                await until(lambda: bool(endpoints(fresh)))

    run(work)


def test_all_gateways_are_told_and_one_that_is_away_keeps_none_from_it() -> None:
    async def work() -> None:
        async with (
            world() as w,
            listening(w) as one,
            listening(w) as two,
            announced("127.0.0.1:1", one, two) as registrar,
        ):
            await until(lambda: set(registrar.listed) == {one, two})

    run(work)


class Rude(StubRouter):
    """A gateway that lists nobody, and says so in lines."""

    async def register(self, endpoint: str, model: str) -> Registration:
        raise Fault("invalid_argument", "no\nERROR all is lost")

    async def heartbeat(self, server_id: str) -> bool:
        return False


def test_a_gateways_words_stay_in_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        listener = NativeListener(Rude(), ListenerOptions())
        try:
            async with announced(f"127.0.0.1:{await listener.start()}"):
                await until(lambda: "no ERROR all is lost" in caplog.text)
        finally:
            await listener.stop()

    run(work)


def test_with_tokens_only_an_admin_may_register(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        store = TokenStore.of({"ops": (TOKEN, ("admin",))})
        async with world() as w, listening(w, tokens=store) as gateway:
            async with announced(gateway):
                await until(lambda: "UNAUTHENTICATED" in caplog.text)
                assert not endpoints(w)
            async with announced(gateway, token=TOKEN):
                await until(lambda: bool(endpoints(w)))
        assert TOKEN not in caplog.text

    caplog.set_level(logging.WARNING)
    run(work)
    assert sum("does not list" in line for line in caplog.text.splitlines()) == 1


def test_the_server_registers_when_ready_and_falls_silent_in_a_drain(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            world() as w,
            listening(w) as gateway,
            served.serving(tmp_path, register_with=[gateway]) as server,
        ):
            assert server.registrar is not None
            await until(lambda: endpoints(w) == [served.address(server)])
            await server.drain(1.0)
            assert server.registrar is None

    with served.registry():
        served.run(work)


def options(**server: Any) -> config.ServerOptions:
    return config.ServerOptions("m", **server)


def test_what_is_advertised() -> None:
    gateways = ("10.0.0.1:50111",)
    for given, found in (
        ({}, "127.0.0.1:5"),
        ({"host": "::1"}, "[::1]:5"),
        ({"host": "0.0.0.0", "advertise": "arm7.example"}, "arm7.example:5"),
        ({"advertise": "arm7:6"}, "arm7:6"),
        ({"advertise": "[fe80::1]:6"}, "[fe80::1]:6"),
    ):
        wanted = announcement(options(register_with=gateways, **given))
        assert wanted is not None
        assert wanted.endpoint(5) == found
    assert announcement(options()) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"register_with": ("nowhere",)}, "HOST:PORT"),
        ({"register_with": ("h:1",), "host": "0.0.0.0"}, "advertise"),
        ({"register_with": ("h:1",), "advertise": "a:b"}, "HOST:PORT"),
        ({"advertise": "h"}, "register_with"),
        ({"register_token_file": "x"}, "register_with"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options(**given)


def test_files_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for given, words in (
        ({"register_token_file": str(empty)}, "one token"),
        ({"register_token_file": str(tmp_path / "none")}, "readable"),
        ({"register_ca": str(empty)}, "PEM"),
    ):
        with pytest.raises(ConfigError, match=words):
            announcement(options(register_with=("h:1",), **given))
