"""Folders that are built once: whole or not there, one builder at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phyai import built_folder
from phyai.built_folder import cached_folder, is_whole
from phyai.errors import ConfigError


def test_failed_build_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half.json").write_text("{}")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        cached_folder(tmp_path, "thing", fail)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
    folder = cached_folder(tmp_path, "thing", lambda f: _touch(f / "whole.json"))
    assert is_whole(folder)


def _touch(path: Path) -> None:
    path.write_text("{}")


def test_unwritable_cache_is_a_config_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigError, match=r"cache folder .*file"):
        cached_folder(blocker, "thing", lambda folder: None)


BUILD = """
import sys, time
from pathlib import Path
from phyai.built_folder import cached_folder
def build(folder):
    print("built", flush=True)
    for i in range(20):
        (folder / f"{i}.json").write_text("{}")
        time.sleep(0.02)
print("ready", flush=True)
sys.stdin.readline()
print(cached_folder(Path(sys.argv[1]), "thing", build))
"""


def test_processes_that_build_at_once_build_once(tmp_path: Path) -> None:
    damaged = tmp_path / "thing"
    damaged.mkdir()
    (damaged / "0.json").write_text("[")
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for run in runs:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
    outputs = []
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("\n")
        run.stdin.flush()
    for run in runs:
        out, _ = run.communicate(timeout=120)
        assert run.returncode == 0
        outputs.append(out.split())
    assert sum("built" in out for out in outputs) == 1
    assert {out[-1] for out in outputs} == {str(damaged)}
    assert is_whole(damaged)


def test_cache_without_file_locks_still_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built_folder, "fcntl", None)
    assert is_whole(cached_folder(tmp_path, "thing", lambda f: _touch(f / "a.json")))
