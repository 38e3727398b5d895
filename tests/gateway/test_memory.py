"""The allocator's settings: made where the C library knows them, and left out elsewhere."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import pytest

from phyai_gateway import cli, memory, running


def test_freed_memory_is_kept_where_the_library_can() -> None:
    assert memory.keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not memory.keep_freed_memory()


def test_gateway_sets_it_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    async def run(plan: Any) -> int:
        done.append("run")
        return 0

    monkeypatch.setattr(cli, "keep_freed_memory", lambda: done.append("memory"))
    monkeypatch.setattr(running, "run", run)
    assert cli.main(["--http-port", "0"]) == 0
    assert done == ["memory", "run"]
