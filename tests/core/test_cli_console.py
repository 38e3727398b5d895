"""What every command shares: progress on stderr, places to write to, JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from phyai.cli import console
from phyai.errors import ConfigError


def test_waiting_is_silent_when_quick_and_speaks_when_slow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with console.Waiting("quick", after_s=30) as progress:
        progress(1, 2, "a")
    assert capsys.readouterr() == ("", "")
    with console.Waiting("slow", after_s=0.01) as progress:
        deadline = time.monotonic() + 10
        while progress._plain_at is None and time.monotonic() < deadline:
            time.sleep(0.01)
        progress._plain_at = 0.0
        progress(1, 4, "a")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "slow ...\nslow 25%\n"


def test_waiting_says_what_is_done_by_then(capsys: pytest.CaptureFixture[str]) -> None:
    with console.Waiting("checking", after_s=30) as progress:
        progress(0, 1, "building the files")
        progress._show()
    assert capsys.readouterr().err == "building the files ...\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_place_that_only_an_attempt_finds_unwritable() -> None:
    for path in ("/proc/v.mp4", "/proc/new/v.mp4", "/proc/version"):
        with pytest.raises(ConfigError, match=r"--out must name .*'/proc.* is not writable"):
            console.check_writable("--out", Path(path))


def test_a_look_at_a_place_leaves_it_as_it_was(tmp_path: Path) -> None:
    old = tmp_path / "old.mp4"
    old.write_text("whole")
    for path in (old, tmp_path / "new.mp4", tmp_path / "a" / "b.mp4"):
        console.check_writable("--out", path)
    console.check_writable("--record", tmp_path, folder=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["old.mp4"]
    assert old.read_text() == "whole"
    for path, text in ((tmp_path, "is a folder"), (tmp_path / ("x" * 300), "too long")):
        with pytest.raises(ConfigError, match=text):
            console.check_writable("--out", path)
    with pytest.raises(ConfigError, match="is a file"):
        console.check_writable("--record", old, folder=True)


def test_json_numbers_that_json_cannot_hold_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"a": float("inf"), "b": [float("nan"), 1.5]})
    assert json.loads(capsys.readouterr().out) == {"a": "inf", "b": ["nan", 1.5]}
