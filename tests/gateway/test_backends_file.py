"""The backends file: followed while it changes, taken whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from phyai_gateway.backends import server_id
from phyai_gateway.listeners import ConfigError
from tests.gateway.stub_world import World, run, until, world


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"model_name": "pi05", "endpoint": f"10.0.0.9:{number}", **more}


def write(file: Path, rows: Any) -> None:
    """Replace the file as careful tools do, so that it is never seen half written."""
    part = file.with_name("part")
    part.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    os.replace(part, file)


@asynccontextmanager
async def following(file: Path, **settings: Any) -> AsyncIterator[World]:
    async with world(backends_file=file, **settings) as w:
        yield w


def ports(w: World) -> list[int]:
    return sorted(int(m.endpoint[-1]) for m in w.gateway.members() if not m.leaving)


def test_backends_come_go_and_change_with_the_file(tmp_path: Path) -> None:
    async def work() -> None:
        file = tmp_path / "backends.json"
        write(file, [row(1), row(2, weight=2)])
        async with following(file) as w:
            assert ports(w) == [1, 2]
            weights = {m.endpoint: m.weight for m in w.gateway.members()}
            assert weights == {"10.0.0.9:1": 1.0, "10.0.0.9:2": 2.0}
            busy = w.gateway.member(server_id("pi05", "10.0.0.9:1"))
            busy.in_flight = 1  # it has a request: it leaves when that is answered
            write(file, [row(2, weight=0.5), row(3)])
            await w.gateway.follow_file()
            assert ports(w) == [2, 3]
            assert busy.state == "draining"
            assert w.gateway.member(server_id("pi05", "10.0.0.9:2")).weight == 0.5
            busy.in_flight = 0
            busy.emptied.set()
            await until(lambda: busy.gone)
            w.gateway.add("pi05", "10.0.0.9:9")  # an operator's, which no file takes away
            write(file, [])
            await w.gateway.follow_file()
            await until(lambda: len(w.gateway.members()) == 1)
            assert ports(w) == [9]

    run(work)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "JSON"),
        ('[{"model_name": "pi05"', "JSON"),
        ("{}", "list"),
        ('["x"]', "row 1 must be a map"),
        (json.dumps([row(1), row(2, colour="red")]), "row 2"),
        (json.dumps([row(1), {"model_name": "pi05", "endpoint": "nowhere"}]), "HOST:PORT"),
        (json.dumps([row(1, weight=-1)]), "weight"),
        (json.dumps([row(1, weight=True)]), "weight"),
        (json.dumps([row(1, model_name=5)]), "model_name"),
        (json.dumps([row(1), row(2), row(1, weight=3)]), "row 3 gives a backend a second weight"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_wrong_file_changes_nothing_and_is_told_of(
    tmp_path: Path, text: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        file = tmp_path / "backends.json"
        write(file, [row(1), row(2)])
        async with following(file) as w:
            assert b"phyai_backends_file_ok 1.0" in w.gateway.metrics.text()
            write(file, text)
            await w.gateway.follow_file()
            await w.gateway.follow_file(force=True)
            assert ports(w) == [1, 2]
            (warning,) = w.gateway.snapshot()["warnings"]
            assert words in warning
            assert b"phyai_backends_file_ok 0.0" in w.gateway.metrics.text()
            assert sum("not taken" in record.message for record in caplog.records) == 1
            write(file, [row(3)])
            await w.gateway.follow_file()
            assert ports(w) == [3]
            assert not w.gateway.snapshot()["warnings"]
            assert b"phyai_backends_file_ok 1.0" in w.gateway.metrics.text()
            file.unlink()
            await w.gateway.follow_file()
            assert ports(w) == [3]
            assert "readable" in w.gateway.snapshot()["warnings"][0]
        with pytest.raises(ConfigError, match="--backends-file"):
            async with following(file):
                pass

    run(work)


def test_yaml_is_read_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "backends.yaml"
    file.write_text("- {model_name: pi05, endpoint: '10.0.0.9:1'}\n")

    async def work() -> None:
        async with following(file) as w:
            assert ports(w) == [1]
            canary = tmp_path / "canary"
            write(file, f"- !!python/object/apply:os.mkdir ['{canary}']\n")
            await w.gateway.follow_file()
            assert ports(w) == [1]
            assert w.gateway.snapshot()["warnings"]
            assert not canary.exists()
        file.write_text("[]\n")
        monkeypatch.setitem(sys.modules, "yaml", None)
        with pytest.raises(ConfigError, match=r"phyai-gateway\[yaml\]"):
            async with following(file):
                pass

    run(work)


BOMB = "&b [" + "*a, " * 9 + "]"


@pytest.mark.parametrize(
    "weight",
    ["!!bool x", "!!int ''", "!!float ''", "!!timestamp x", f"[&a [x, x], {BOMB}]", "&r [*r]"],
)
def test_odd_yaml_is_a_wrong_file_and_no_more(tmp_path: Path, weight: str) -> None:
    async def work() -> None:
        file = tmp_path / "backends.yaml"
        file.write_text("- {model_name: pi05, endpoint: '10.0.0.9:1'}\n")
        async with following(file) as w:
            write(file, f"- {{model_name: pi05, endpoint: '10.0.0.9:2', weight: {weight}}}\n")
            assert await w.gateway.file.follow()  # type: ignore[union-attr]
            assert ports(w) == [1]
            assert w.gateway.snapshot()["warnings"]

    run(work)


def test_another_thing_than_a_file_is_not_waited_for(tmp_path: Path) -> None:
    async def work() -> None:
        file = tmp_path / "backends.json"
        write(file, [row(1)])
        async with following(file) as w:
            file.unlink()
            os.mkfifo(file)
            await w.gateway.follow_file()
            assert ports(w) == [1]
            assert "must be a file" in w.gateway.snapshot()["warnings"][0]

    run(work)


def test_what_finds_no_room_yet_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phyai_gateway.gateway.MAX_BACKENDS", 2)
    monkeypatch.setattr("phyai_gateway.gateway.TICK_S", 0.01)

    async def work() -> None:
        file = tmp_path / "backends.json"
        write(file, [row(1), row(2)])
        async with following(file) as w:
            write(file, [row(3), row(4)])
            await w.gateway.follow_file()  # the old ones have yet to leave
            assert "cannot be added" in w.gateway.snapshot()["warnings"][0]
            await until(lambda: ports(w) == [3, 4])
            assert not w.gateway.snapshot()["warnings"]

    run(work)


def test_an_operators_word_stays_until_the_row_changes(tmp_path: Path) -> None:
    async def work() -> None:
        file, state = tmp_path / "backends.json", tmp_path / "state.json"
        write(file, [row(1), row(2)])
        async with following(file, state=state) as w:
            drained = w.gateway.patch(
                server_id("pi05", "10.0.0.9:1"), state="draining", weight=None
            )
            w.gateway.remove(server_id("pi05", "10.0.0.9:2"))
            write(file, [row(1), row(2), row(3)])
            await w.gateway.follow_file()
            assert ports(w) == [1, 3]
            assert drained.draining
        write(file, [row(3)])
        async with following(file, state=state) as w:  # the state keeps none of the file's
            assert ports(w) == [3]

    run(work)


def test_the_file_is_looked_at_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phyai_gateway.gateway.TICK_S", 0.01)

    async def work() -> None:
        file = tmp_path / "backends.json"
        write(file, [row(1)])
        async with following(file) as w:
            write(file, [row(1), row(2)])
            await until(lambda: ports(w) == [1, 2])
            w.gateway.file.path.unlink()  # type: ignore[union-attr]
            w.gateway.reread()
            await until(lambda: bool(w.gateway.snapshot()["warnings"]))

    run(work)
