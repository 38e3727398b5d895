"""Registrations are kept in a file that survives restarts, damage and a full disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from phyai_gateway.state_file import Registration, StateFile
from tests.gateway.stub_world import run, world


def test_registrations_survive_a_restart(tmp_path: Path) -> None:
    async def work() -> None:
        path = tmp_path / "state.json"
        async with world(2, state=path) as w:
            first, second = w.gateway.members()
            w.gateway.patch(first.id, state="draining", weight=2.0)
            w.gateway.remove(second.id)
            await w.gateway.persist()
            kept = json.loads(path.read_text())["backends"]
            assert [row["endpoint"] for row in kept] == [first.endpoint]
        async with world(state=path) as w:
            (member,) = w.gateway.members()
            assert (member.id, member.weight, member.draining) == (first.id, 2.0, True)
        assert [p.name for p in tmp_path.iterdir()] == ["state.json"]

    run(work)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2, "backends": []}',
        '{"version": 1, "backends": [{"model_name": 3, "endpoint": "h:1"}]}',
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_a_damaged_file_is_set_aside(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(text.encode("latin-1"))
    assert StateFile(path).read() == []
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("state.json.damaged-")
    assert aside.read_bytes() == text.encode("latin-1")
    assert "damaged" in caplog.text
    assert str(tmp_path) not in caplog.text


def test_a_full_disk_keeps_the_old_file_and_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        path = tmp_path / "state.json"
        async with world(1, state=path) as w:
            await w.gateway.persist()
            before = path.read_bytes()

            def full(handle: int) -> None:
                raise OSError(28, "No space left on device")

            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", full)
                await w.add()
                await w.gateway.persist()
                assert path.read_bytes() == before
                assert "No space left" in str(w.gateway.snapshot()["warnings"])
                assert await w.ask() in (0.0, 1.0)
                assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
            await w.gateway.persist()
            assert len(json.loads(path.read_text())["backends"]) == 2
            assert w.gateway.snapshot()["warnings"] == []

    run(work)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "s")
    rows = [Registration(f"m{n}", f"h:{n + 1}") for n in range(50)]
    assert file.write(rows)
    with (tmp_path / "s").open() as held:  # a reader that came before sees the old one whole
        assert file.write(rows[:1])
        assert len(json.load(held)["backends"]) == 50
    assert StateFile(tmp_path / "s").read() == rows[:1]
